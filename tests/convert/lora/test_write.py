"""convert/lora/write.py: every dialect, read back here and by diffusers."""

import dataclasses
import json
from functools import partial

import diffusers
import hypothesis
import jax
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from convert import files, load, lora
from convert.lora import adapter, read, write
from tests.convert import published, tiny
from wanjax import trees
from wanjax.models import wan


@pytest.mark.parametrize("dialect", write.DIALECTS)
def test_golden_file_survives_export_to_every_dialect(golden, tmp_path, dialect):
    found, want = golden
    paths = write.write(found, tmp_path / "out", dialect)
    published.check(read.read(paths if len(paths) > 1 else paths[0]), want, 1e-6)


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui"])
def test_both_experts_in_one_file(tmp_path, dialect):
    found = read.read(published.ADAPTERS / "dual_single_file.safetensors")
    (path,) = write.write(found, tmp_path, dialect, combined=True)
    published.check(read.read(path), published.expected("dual_single_file"), 1e-6)


@pytest.mark.parametrize("dialect", write.DIALECTS)
def test_trees_come_back_from_every_dialect(tmp_path, dialect):
    want = tiny.make_trees()
    write.write(adapter.of_trees(want), tmp_path, dialect)
    got = lora.load(tmp_path, tiny.CONFIG)
    assert set(got) == {"high", "low"}
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_rank_alpha_expert_and_metadata_are_in_the_header(tmp_path):
    paths = write.write(
        adapter.of_trees(tiny.make_trees(), {"step": "7", "shift": "12.0"}), tmp_path, "diffusers"
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
    trees_by_expert = tiny.make_trees()
    paths = write.write(adapter.of_trees(trees_by_expert), tmp_path, "diffusers")
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
        shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), tiny.CONFIG.wan)))
        params = load.place(state, shapes, "transformer")
        denoise = jax.jit(partial(wan.denoise, config=tiny.CONFIG.wan))
        got = np.asarray(denoise(params, trees_by_expert[expert], x, t, ctx))
        base = np.asarray(denoise(params, None, x, t, ctx))
        want = want.numpy()
        np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()))
        assert np.abs(got - base).max() > 1e-2


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
    dialect = data.draw(st.sampled_from(sorted(write.DIALECTS)))
    experts = data.draw(st.sampled_from([(None,), ("high",), ("low",), ("high", "low")]))
    dtype = np.dtype(data.draw(st.sampled_from(["float32", "bfloat16", "float16"])))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    found = adapter.Adapter()
    for expert in experts:
        pairs = found.modules.setdefault(expert, {})
        for module in modules:
            rank = data.draw(st.integers(1, 5))
            alpha = data.draw(st.floats(-8, 64, allow_nan=False, width=32))
            a = rng.standard_normal((rank, 6)).astype(dtype)
            pairs[module] = adapter.LowRank(
                a, rng.standard_normal((7, rank)).astype(dtype), alpha / rank
            )
    combined = (
        len(experts) == 2 and dialect in ("diffusers", "comfyui") and data.draw(st.booleans())
    )
    folder = tmp_path_factory.mktemp("p")
    paths = write.write(found, folder, dialect, combined=combined)
    got = read.read(paths if len(paths) > 1 else paths[0])
    assert set(got.experts) == set(experts)
    for expert in experts:
        want = found.deltas(expert)
        assert set(got.deltas(expert)) == set(want)
        for name, change in got.deltas(expert).items():
            np.testing.assert_allclose(change, want[name], rtol=1e-5, atol=1e-6)
        for module, p in got.modules[expert].items():
            assert p.a.dtype == dtype and p.a.tobytes() == found.modules[expert][module].a.tobytes()


BLOCK_MODULES = [
    *(f"blocks/attn{k}/to_{h}" for k in (1, 2) for h in ("q", "k", "v", "out.0")),
    "blocks/ffn.net.0.proj",
    "blocks/ffn.net.2",
]


@pytest.mark.parametrize("dialect", ["comfyui", "kohya"])
def test_diffusers_reads_our_other_dialects_alike(tmp_path, dialect):
    blocks = {m.removesuffix("/kernel"): (4, 2.0) for m in BLOCK_MODULES}
    one = dataclasses.replace(tiny.CONFIG, experts=("high",))
    (path,) = write.write(adapter.of_trees(tiny.make_trees(one, modules=blocks)), tmp_path, dialect)
    state = diffusers.WanPipeline.lora_state_dict(str(tmp_path), weight_name=path.name)
    want = read.read(path)
    for module, p in want.modules["high"].items():
        a, b = (state[f"transformer.{module}.lora_{s}.weight"].float().numpy() for s in "AB")
        np.testing.assert_allclose(b @ a, p.delta(), rtol=1e-4, atol=1e-5)
    assert len(state) == 2 * len(want.modules["high"])
