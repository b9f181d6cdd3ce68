"""convert/lora.py: every dialect in and out, against the dense changes of tests/golden/lora."""

import json
import pathlib
import shutil
from functools import partial

import diffusers
import jax
import numpy as np
import pytest
import torch

from convert import files, lora, names, weights
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
    paths = lora.to_diffusers(make_trees(), tmp_path, {"step": "7", "shift": "12.0"})
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
    paths = lora.to_diffusers(trees_by_expert, tmp_path)
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
