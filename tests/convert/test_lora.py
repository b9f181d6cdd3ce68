"""convert/lora.py: every dialect in and out, against the dense changes of tests/golden/lora."""

import dataclasses
import json
import pathlib
import shutil
import warnings
from functools import partial

import diffusers
import hypothesis
import jax
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from convert import disk, export, files, lora, names, weights
from tests.convert import tiny
from wanjax import trees
from wanjax.models import wan

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/lora"
FILES = json.loads((GOLDEN / "manifest.json").read_text())["files"]
RULES = names.rules("transformer", ())


def expected(name):
    """{expert: {diffusers parameter name: dense change}}"""
    out = {}
    for key, value in np.load(GOLDEN / f"expected_{name}.npz").items():
        expert = FILES[name].get("expert", "").removesuffix("_noise") or None
        for side in ("high", "low"):
            if key.startswith(f"{side}_noise."):
                expert, key = side, key.removeprefix(f"{side}_noise.")
        (new,), _ = names.to_diffusers(key, RULES)
        out.setdefault(expert, {})[new] = value
    return out


def check(adapter, want, tolerance):
    assert set(adapter.experts) == set(want)
    for expert, changes in want.items():
        got = adapter.deltas(expert)
        assert set(got) == set(changes)
        for name, value in changes.items():
            np.testing.assert_allclose(
                got[name].reshape(value.shape), value, atol=tolerance, rtol=0, err_msg=name
            )


@pytest.fixture(params=sorted(FILES))
def golden(request, tmp_path):
    """(adapter, expected changes) of one golden file, laid out as its tool writes it."""
    name = request.param
    source = GOLDEN / f"{name}.safetensors"
    if name == "peft_adapter_model":
        source = tmp_path / "adapter_model.safetensors"
        shutil.copy(GOLDEN / f"{name}.safetensors", source)
        shutil.copy(GOLDEN / f"{name}.adapter_config.json", tmp_path / "adapter_config.json")
        source = tmp_path
    return lora.read(source), expected(name)


def test_golden_file_gives_the_expected_dense_change(golden):
    check(*golden, 1e-6)


@pytest.mark.parametrize("dialect", lora.DIALECTS)
def test_golden_file_survives_export_to_every_dialect(golden, tmp_path, dialect):
    adapter, want = golden
    paths = lora.write(adapter, tmp_path / "out", dialect)
    check(lora.read(paths), want, 1e-6) if len(paths) > 1 else check(
        lora.read(paths[0]), want, 1e-6
    )


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui"])
def test_both_experts_in_one_file(tmp_path, dialect):
    adapter = lora.read(GOLDEN / "dual_single_file.safetensors")
    (path,) = lora.write(adapter, tmp_path, dialect, combined=True)
    check(lora.read(path), expected("dual_single_file"), 1e-6)


CONFIG = tiny.CONFIG
FULL = {"blocks/attn1/to_q": (4, 2.0), "blocks/ffn.net.2": (2, 5.0), "proj_out": (3, 3.0)}


def make_trees(config=CONFIG, seed=0, modules=FULL):
    """Random adapter trees on both experts; {module: (rank, alpha)}."""
    rng = np.random.default_rng(seed)
    shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), config.wan)))
    out = {}
    for expert in config.experts:
        flat = {}
        for module, (rank, alpha) in modules.items():
            *stack, fan_in, fan_out = shapes[f"{module}/kernel"].shape
            flat[f"{module}/a"] = rng.standard_normal((*stack, fan_in, rank), np.float32)
            flat[f"{module}/b"] = rng.standard_normal((*stack, rank, fan_out), np.float32)
            flat[f"{module}/scale"] = np.full(stack, alpha / rank, np.float32)
        out[expert] = trees.unflatten({k: jax.numpy.asarray(v) for k, v in flat.items()})
    return out


@pytest.mark.parametrize("dialect", lora.DIALECTS)
def test_trees_come_back_from_every_dialect(tmp_path, dialect):
    want = make_trees()
    lora.write(lora.of_trees(want), tmp_path, dialect)
    got = lora.load(tmp_path, CONFIG)
    assert set(got) == {"high", "low"}
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_rank_alpha_expert_and_metadata_are_in_the_header(tmp_path):
    paths = lora.write(
        lora.of_trees(make_trees(), {"step": "7", "shift": "12.0"}), tmp_path, "diffusers"
    )
    assert [p.name for p in paths] == ["lora_high_noise.safetensors", "lora_low_noise.safetensors"]
    tensors, header = files.open_safetensors(paths[1])
    assert "transformer.blocks.0.attn1.to_q.lora_A.weight" in tensors
    assert (header["wanjax.expert"], header["step"], header["shift"]) == ("low", "7", "12.0")
    settings = json.loads(header["lora_adapter_metadata"])
    assert settings["transformer.r"] == 4 and settings["transformer.lora_alpha"] == 2.0
    assert settings["transformer.alpha_pattern"]["^blocks.2.ffn.net.2"] == 5.0


def test_diffusers_loads_both_files_and_computes_the_same(tmp_path):
    """WanPipeline.load_lora_weights on both experts against wan.denoise with the trees."""
    trees_by_expert = make_trees()
    paths = lora.write(lora.of_trees(trees_by_expert), tmp_path, "diffusers")
    models = {"high": tiny.torch_transformer(seed=0), "low": tiny.torch_transformer(seed=1)}
    pipe = diffusers.WanPipeline(
        None, None, None, None, transformer=models["high"], transformer_2=models["low"]
    )
    pipe.load_lora_weights(str(tmp_path), weight_name=paths[0].name, adapter_name="a")
    pipe.load_lora_weights(
        str(tmp_path), weight_name=paths[1].name, adapter_name="a", load_into_transformer_2=True
    )
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 3, 4, 6, 4), np.float32)  # BTHWC
    ctx = rng.standard_normal((2, 8, 24), np.float32)
    t = np.asarray([900.0, 30.0], np.float32)
    for seed, expert in enumerate(("high", "low")):
        with torch.no_grad():
            want = models[expert](
                torch.tensor(x).permute(0, 4, 1, 2, 3), torch.tensor(t), torch.tensor(ctx)
            ).sample.permute(0, 2, 3, 4, 1)
        clean = tiny.torch_transformer(seed=seed)
        state = {n: files.of_array(v.numpy()) for n, v in clean.state_dict().items()}
        shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), CONFIG.wan)))
        params = weights.place(state, shapes, "transformer")
        denoise = jax.jit(partial(wan.denoise, config=CONFIG.wan))
        got = np.asarray(denoise(params, trees_by_expert[expert], x, t, ctx))
        base = np.asarray(denoise(params, None, x, t, ctx))
        want = want.numpy()
        np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))
        assert np.abs(got - base).max() > 1e-2


# ---- reading: what must be refused, and what must be understood ----


def save(path, tensors, metadata=None):
    lazy = {n: files.of_array(np.asarray(a)) for n, a in tensors.items()}
    files.write_safetensors(path, lazy, metadata)
    return path


def pair(module, rank=2, fan_in=32, fan_out=32, up=".lora_B.weight", down=".lora_A.weight"):
    rng = np.random.default_rng(len(module))
    a = rng.standard_normal((rank, fan_in), np.float32)
    return {module + down: a, module + up: rng.standard_normal((fan_out, rank), np.float32)}


Q = "diffusion_model.blocks.1.self_attn.q"


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t | {f"{Q}.dora_scale": np.ones(32, np.float32)}, "DoRA"),
        (lambda t: t | {"lora_te_x.lora_down.weight": np.ones((2, 2))}, "1 of 3 keys are not Wan"),
        (lambda t: t | {f"{Q}x.lora_A.weight": np.ones((2, 2))}, "not Wan adapter keys"),
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "no complete adapter"),
        (lambda t: t | {f"{Q}.alpha": np.ones(3)}, "not one finite number"),
        (lambda t: t | {f"{Q}.alpha": np.asarray(np.nan)}, "not one finite number"),
        (lambda t: t | {f"{Q}.lora_B.weight": np.ones((32, 3))}, "pair of shapes"),
        (lambda t: t | {f"{Q}.lora_up.weight": np.ones((32, 2))}, "two tensors of kind b"),
        (lambda t: t | {f"{Q}.hada_w1_a": np.ones((32, 2))}, "no complete adapter"),
        (lambda t: {}, "no adapter tensors"),
    ],
)
def test_what_cannot_be_read_whole_is_refused(tmp_path, change, message):
    path = save(tmp_path / "x.safetensors", change(pair(Q)))
    with pytest.raises(ValueError, match=message) as error:
        lora.read(path)
    assert "\n" not in str(error.value) and "x.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        "lora_unet_blocks_1.self_attn.q.lora_{}.weight",  # dots after the underscored prefix
        "lora_unet_blocks_1_self_attn_q.lora_{}.weight",
        "blocks.1.self_attn.q.lora_{}.my_adapter.weight",
        "pipe.dit.blocks.1.self_attn.q.lora_{}.weight",
        "base_model.model.diffusion_model.blocks.1.self_attn.q.lora_{}.default.weight",
        "transformer.blocks.1.attn1.to_q.lora.{}.weight",
        "lora_transformer_blocks_1_attn1_to_q.lora_{}.weight",
        "module._orig_mod.blocks.1.attn1.to_q.lora_{}",
    ],
)
def test_one_module_is_found_under_every_spelling(tmp_path, key):
    sides = ("A", "B") if "alpha" not in key else ()
    sides = ("down", "up") if "unet" in key or "lora." in key else sides
    tensors = dict(zip((key.format(s) for s in sides), pair("m").values(), strict=True))
    adapter = lora.read(save(tmp_path / "x.safetensors", tensors))
    assert list(adapter.modules[None]) == ["blocks.1.attn1.to_q"]


def test_rank_stabilised_scale_is_alpha_over_root_rank(tmp_path):
    settings = {"r": 4, "lora_alpha": 6, "use_rslora": True}
    header = {
        "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in settings.items()})
    }
    path = save(tmp_path / "x.safetensors", pair("transformer.blocks.0.attn1.to_q", 4), header)
    assert lora.read(path).modules[None]["blocks.0.attn1.to_q"].scale == 3.0


def test_alpha_patterns_are_names_and_anything_else_is_refused(tmp_path):
    key = "transformer.blocks.0.attn1.to_q"
    for pattern, scale in (
        ("^blocks.0.attn1.to_q", 4.0),
        ("attn1.to_q", 4.0),
        ("^attn1.to_q", 1.0),
    ):
        settings = {"r": 2, "lora_alpha": 2, "alpha_pattern": {pattern: 8}}
        header = {"lora_adapter_metadata": json.dumps(settings)}
        adapter = lora.read(save(tmp_path / "x.safetensors", pair(key), header))
        assert adapter.modules[None]["blocks.0.attn1.to_q"].scale == scale
    header = {"lora_adapter_metadata": json.dumps(settings | {"alpha_pattern": {"(a+)+$": 8}})}
    with pytest.raises(ValueError, match="is an expression"):
        lora.read(save(tmp_path / "x.safetensors", pair(key), header))


def test_a_missing_alpha_is_said(tmp_path):
    adapter = lora.read(save(tmp_path / "x.safetensors", pair(Q)))
    assert lora.summary(adapter).endswith("1 modules store no alpha: scale 1")


def test_an_adapter_that_changes_nothing_raises(tmp_path):
    tensors = {k: v * ("lora_A" in k) for k, v in pair(Q).items()}
    with pytest.raises(ValueError, match="changes nothing"):
        lora.summary(lora.read(save(tmp_path / "x.safetensors", tensors)))


# ---- experts ----


@pytest.mark.parametrize(
    "name,expert",
    [
        ("style_high_noise", "high"),
        ("Wan22_Lightning_LOW_fp16", "low"),
        ("x-HighNoise-rank64", "high"),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16", "high"),
        ("wan22_low_r64", "low"),
        ("high_quality_style", None),
        ("low_light", None),
        ("highway_follower", None),
        ("slow_motion", None),
        ("below", None),
    ],
)
def test_the_expert_is_read_from_the_file_name(tmp_path, name, expert):
    assert lora.read(save(tmp_path / f"{name}.safetensors", pair(Q))).experts == [expert]


def test_unclear_or_contradicting_experts_are_refused(tmp_path):
    plain = save(tmp_path / "style.safetensors", pair(Q))
    low = save(tmp_path / "style_low_noise.safetensors", pair(Q))
    both = save(tmp_path / "high_to_low.safetensors", pair(Q))
    swapped = save(tmp_path / "a_high_noise.safetensors", pair(Q), {"wanjax.expert": "low"})
    cases = [
        (plain, None, "does not say its expert"),
        (low, "high", "adapter is for low noise, asked for high"),
        (both, None, "both high and low"),
        (swapped, None, "the pair looks swapped"),
        ([low, low], None, "low noise twice"),
        ([plain, low], None, "no expert"),
    ]
    for path, expert, message in cases:
        with pytest.raises(ValueError, match=message):
            lora.load(path, CONFIG, expert=expert)
    single = dataclasses.replace(CONFIG, experts=("high",), boundary=None)
    assert set(lora.load(plain, single)) == {"high"}
    with pytest.raises(ValueError, match="low-noise part"):
        lora.load(low, single)


def test_one_file_goes_onto_both_experts_with_different_strengths(tmp_path):
    weights.save_diffusers(tiny.params(), CONFIG, tmp_path / "m")
    path = save(tmp_path / "style.safetensors", pair(Q) | {f"{Q}.alpha": np.asarray(1.0)})
    args = [str(tmp_path / "m"), "--to", "diffusers", "--out", str(tmp_path / "out")]
    assert export.main([*args, "--lora", f"{path}:high@3.0", "--lora", f"{path}:low@1.5"]) == 0
    old, new = disk.read(tmp_path / "m").tensors, disk.read(tmp_path / "out").tensors
    name = "blocks.1.attn1.to_q.weight"
    change = [new[c][name].all() - old[c][name].all() for c in ("transformer", "transformer_2")]
    a, b = pair(Q).values()
    np.testing.assert_allclose(change[0], 3.0 * 0.5 * b @ a, atol=2e-6)
    np.testing.assert_allclose(change[1], 1.5 * 0.5 * b @ a, atol=2e-6)
    other = "blocks.0.attn1.to_q.weight"
    assert (new["transformer"][other].all() == old["transformer"][other].all()).all()


# ---- against a model ----


def test_image_attention_of_an_i2v_adapter_is_left_out_in_one_line(tmp_path):
    tensors = pair(Q)
    for i in range(3):
        tensors |= pair(f"diffusion_model.blocks.{i}.cross_attn.k_img")
        tensors |= pair(f"diffusion_model.blocks.{i}.cross_attn.v_img")
    path = save(tmp_path / "x_high_noise.safetensors", tensors)
    with pytest.warns(UserWarning, match="1 applied; 6 left out: image attention") as caught:
        assert set(lora.load(path, CONFIG)) == {"high"}
    assert len(caught) == 1
    weights.save_diffusers(tiny.params(), CONFIG, tmp_path / "m")
    args = [
        str(tmp_path / "m"),
        "--to",
        "diffusers",
        "--out",
        str(tmp_path / "o"),
        "--lora",
        str(path),
    ]
    assert export.main(args) == 1 and not (tmp_path / "o").exists()
    assert export.main([*args, "--no-strict"]) == 0


def test_modules_of_wrong_shape_or_layer_are_refused(tmp_path):
    for tensors, message in (
        (pair(Q, fan_in=64), r"to_q.weight \(32, 64\), the model has \(32, 32\)"),
        (pair(Q.replace("1", "7")), "no such module"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.load(save(tmp_path / "x_low.safetensors", tensors), CONFIG)


def test_dense_parts_are_kept_apart_and_merged_exactly(tmp_path):
    tensors = pair(Q) | {
        f"{Q}.diff_b": np.full(32, 0.5, np.float32),
        "diffusion_model.blocks.0.norm3.diff": np.full(32, 0.25, np.float32),
        "diffusion_model.blocks.2.diff_m": np.full((1, 6, 32), 2.0, np.float32),
        "diffusion_model.patch_embedding.diff": np.ones((32, 16, 1, 2, 2), np.float32),
    }
    path = save(tmp_path / "x_high.safetensors", tensors)
    with pytest.raises(ValueError, match="misfits|not low-rank"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora.load(path, CONFIG)
    adapter, skipped = lora.fit(lora.read(path), CONFIG)
    assert (
        "1 left out: patch embedding of (32, 16, 1, 2, 2), the model has (32, 4, 1, 2, 2)"
        in skipped
    )
    assert set(lora.to_trees(adapter, CONFIG)["high"]["blocks"]) == {"attn1"}
    base = weights.of_tree(tiny.params()["high"])
    merged, _ = export.merge(base, adapter, "high", 2.0, None, "transformer")
    for name, value in (("blocks.0.norm2.weight", 0.5), ("blocks.2.scale_shift_table", 4.0)):
        np.testing.assert_allclose(merged[name].all() - base[name].all(), value, rtol=1e-5)
    np.testing.assert_allclose(
        merged["blocks.1.attn1.to_q.bias"].all() - base["blocks.1.attn1.to_q.bias"].all(),
        1.0,
        rtol=1e-5,
    )


def test_padding_of_missing_layers_and_ranks_never_trains():
    """Partial blocks and mixed ranks: padded entries have zero gradient and are not exported."""
    rng = np.random.default_rng(0)
    draw = lambda *s: rng.standard_normal(s, np.float32)
    pairs = {
        "blocks.1.attn1.to_q": lora.LowRank(draw(2, 32), draw(32, 2), 0.5),
        "blocks.2.attn1.to_q": lora.LowRank(draw(3, 32), draw(32, 3), 0.7),
    }
    adapter = lora.Adapter(modules={"high": pairs})
    tree = lora.to_trees(adapter, CONFIG)["high"]
    params = tiny.params()["high"]
    x, ctx = draw(1, 1, 4, 4, 4), draw(1, 8, 24)
    t = np.asarray([500.0], np.float32)
    loss = lambda tree: (wan.denoise(params, tree, x, t, ctx, config=CONFIG.wan) ** 2).sum()
    grad = jax.jit(jax.grad(loss))(tree)["blocks"]["attn1"]["to_q"]
    assert float(np.abs(grad["a"][0]).max()) == float(np.abs(grad["b"][0]).max()) == 0
    assert float(np.abs(grad["a"][1, :, 2:]).max()) == 0 == float(np.abs(grad["b"][1, 2:]).max())
    assert float(np.abs(grad["a"][2]).max()) > 0
    back = lora.of_trees({"high": tree})
    assert set(back.modules["high"]) == set(pairs)
    for module, p in pairs.items():
        np.testing.assert_allclose(back.modules["high"][module].delta(), p.delta(), atol=1e-6)


def test_rounding_of_a_small_change_in_bfloat16_is_reported():
    base = {n: files.cast(t, "bfloat16") for n, t in weights.of_tree(tiny.params()["high"]).items()}
    name = "blocks.0.attn1.to_q"
    a, b = pair("m").values()
    w = base[f"{name}.weight"].all().astype(np.float32)
    scale = 1e-4 * np.linalg.norm(w) / np.linalg.norm(b @ a)
    adapter = lora.Adapter(modules={"high": {name: lora.LowRank(a, b, scale)}})
    merged, rounding = export.merge(base, adapter, "high", 1.0, None, "transformer")
    got = merged[f"{name}.weight"].all()
    assert got.dtype == base[f"{name}.weight"].dtype
    exact = w + np.float32(scale) * (b @ a)
    np.testing.assert_array_equal(got, exact.astype(got.dtype))
    want = np.linalg.norm(got.astype(np.float32) - exact) / np.linalg.norm(exact - w)
    assert np.sqrt(rounding.error / rounding.change) == pytest.approx(want, rel=1e-3)
    assert want > 0.5  # half of the change and more is lost
    assert rounding.moved == (got.astype(np.float32) != w).sum()


# ---- properties ----

MODULES = [
    f"blocks.{layer}.{module}"
    for layer in (0, 3, 12)
    for module in (
        *(f"attn{k}.to_{h}" for k in (1, 2) for h in ("q", "k", "v", "out.0")),
        *("attn2.add_k_proj", "attn2.add_v_proj", "ffn.net.0.proj", "ffn.net.2"),
    )
] + ["proj_out", "condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1"]


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_adapter_survives_any_dialect(data, tmp_path_factory):
    """Random modules, ranks, alphas and stored dtypes: dense change and trees come back."""
    modules = data.draw(st.lists(st.sampled_from(MODULES), min_size=1, max_size=6, unique=True))
    dialect = data.draw(st.sampled_from(sorted(lora.DIALECTS)))
    experts = data.draw(st.sampled_from([(None,), ("high",), ("low",), ("high", "low")]))
    dtype = np.dtype(data.draw(st.sampled_from(["float32", "bfloat16", "float16"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    adapter = lora.Adapter()
    for expert in experts:
        pairs = adapter.modules.setdefault(expert, {})
        for module in modules:
            rank = data.draw(st.integers(1, 5))
            alpha = data.draw(st.floats(-8, 64, allow_nan=False, width=32))
            a = rng.standard_normal((rank, 6)).astype(dtype)
            pairs[module] = lora.LowRank(
                a, rng.standard_normal((7, rank)).astype(dtype), alpha / rank
            )
    combined = (
        len(experts) == 2 and dialect in ("diffusers", "comfyui") and data.draw(st.booleans())
    )
    folder = tmp_path_factory.mktemp("p")
    paths = lora.write(adapter, folder, dialect, combined=combined)
    got = lora.read(paths if len(paths) > 1 else paths[0])
    assert set(got.experts) == set(experts)
    for expert in experts:
        want = adapter.deltas(expert)
        assert set(got.deltas(expert)) == set(want)
        for name, change in got.deltas(expert).items():
            np.testing.assert_allclose(change, want[name], rtol=1e-5, atol=1e-6)
        for module, p in got.modules[expert].items():
            assert (
                p.a.dtype == dtype and p.a.tobytes() == adapter.modules[expert][module].a.tobytes()
            )


# ---- other tools, extraction, command ----


@pytest.mark.parametrize("dialect", ["comfyui", "kohya"])
def test_diffusers_reads_our_other_dialects_alike(tmp_path, dialect):
    blocks = {m.removesuffix("/kernel"): (4, 2.0) for m in BLOCK_MODULES}
    one = dataclasses.replace(CONFIG, experts=("high",))
    (path,) = lora.write(lora.of_trees(make_trees(one, modules=blocks)), tmp_path, dialect)
    state = diffusers.WanPipeline.lora_state_dict(str(tmp_path), weight_name=path.name)
    want = lora.read(path)
    for module, p in want.modules["high"].items():
        a, b = (state[f"transformer.{module}.lora_{s}.weight"].float().numpy() for s in "AB")
        np.testing.assert_allclose(b @ a, p.delta(), rtol=1e-4, atol=1e-5)
    assert len(state) == 2 * len(want.modules["high"])


BLOCK_MODULES = [
    *(f"blocks/attn{k}/to_{h}" for k in (1, 2) for h in ("q", "k", "v", "out.0")),
    "blocks/ffn.net.0.proj",
    "blocks/ffn.net.2",
]


def test_extraction_finds_a_planted_low_rank_change(tmp_path):
    base = weights.of_tree(tiny.params()["high"])
    name = "blocks.0.attn1.to_q"
    a, b = pair("m", 3).values()
    planted = lora.Adapter(modules={None: {name: lora.LowRank(a, b, 0.3)}})
    planted.dense = {None: {"blocks.1.norm2.bias": np.ones(32, np.float32)}}
    tuned, _ = export.merge(base, planted, None, 1.0, None, "transformer")
    pairs, dense, lost = lora.extract(base, tuned, 3)
    assert lost < 1e-5 and set(pairs) == {name} and set(dense) == {"blocks.1.norm2.bias"}
    np.testing.assert_allclose(
        pairs[name].delta(), planted.deltas(None)[f"{name}.weight"], atol=1e-5
    )
    with pytest.raises(ValueError, match="equal"):
        lora.extract(base, base, 3)
    _, _, lost = lora.extract(base, tuned, 1)
    change = planted.deltas(None)
    s = np.linalg.svd(change[f"{name}.weight"], compute_uv=False)
    total = np.sqrt((s**2).sum() + 32)
    assert lost == pytest.approx(np.sqrt((s[1:] ** 2).sum()) / total, rel=1e-3)


def test_command_converts_a_dual_file_and_prints_what_it_did(tmp_path, capsys):
    source = GOLDEN / "dual_aitoolkit_combined.safetensors"
    assert lora.main([str(source), "--to", "kohya", "--out", str(tmp_path), "--name", "x"]) == 0
    text = capsys.readouterr().out
    assert "40 low-rank" in text or "20 low-rank" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "x_high_noise.safetensors",
        "x_low_noise.safetensors",
    ]
    check(lora.read(tmp_path), expected("dual_aitoolkit_combined"), 1e-6)
    assert lora.main([str(tmp_path / "none"), "--to", "kohya", "--out", str(tmp_path)]) == 1
    assert "no such file" in capsys.readouterr().err
