"""convert/lora/adapter.py: summaries, what fits a model, trees."""

import warnings

import jax
import numpy as np
import pytest

from convert import lora, save, weights
from convert.lora import adapter, read
from tests.convert import tiny
from wanjax.models import wan


def test_a_missing_alpha_is_said(tmp_path):
    found = read.read(tiny.save_adapter(tmp_path / "x.safetensors", tiny.pair(tiny.Q)))
    assert adapter.summary(found).endswith("1 modules store no alpha: scale 1")


def test_an_adapter_that_changes_nothing_raises(tmp_path):
    tensors = {k: v * ("lora_A" in k) for k, v in tiny.pair(tiny.Q).items()}
    with pytest.raises(ValueError, match="changes nothing"):
        adapter.summary(read.read(tiny.save_adapter(tmp_path / "x.safetensors", tensors)))


def test_dense_parts_are_kept_apart_and_merged_exactly(tmp_path):
    tensors = tiny.pair(tiny.Q) | {
        f"{tiny.Q}.diff_b": np.full(32, 0.5, np.float32),
        "diffusion_model.blocks.0.norm3.diff": np.full(32, 0.25, np.float32),
        "diffusion_model.blocks.2.diff_m": np.full((1, 6, 32), 2.0, np.float32),
        "diffusion_model.patch_embedding.diff": np.ones((32, 16, 1, 2, 2), np.float32),
    }
    path = tiny.save_adapter(tmp_path / "x_high.safetensors", tensors)
    with pytest.raises(ValueError, match="mismatches|not low-rank"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora.load(path, tiny.CONFIG)
    found, skipped = adapter.fit(read.read(path), tiny.CONFIG)
    assert (
        "1 left out: patch embedding of (32, 16, 1, 2, 2), the model has (32, 4, 1, 2, 2)"
        in skipped
    )
    assert set(adapter.to_trees(found, tiny.CONFIG)["high"]["blocks"]) == {"attn1"}
    base = save.of_tree(tiny.params()["high"])
    merged, _ = weights.merge(base, found, "high", 2.0, None, "transformer")
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
        "blocks.1.attn1.to_q": adapter.LowRank(draw(2, 32), draw(32, 2), 0.5),
        "blocks.2.attn1.to_q": adapter.LowRank(draw(3, 32), draw(32, 3), 0.7),
    }
    found = adapter.Adapter(modules={"high": pairs})
    tree = adapter.to_trees(found, tiny.CONFIG)["high"]
    params = tiny.params()["high"]
    x, ctx = draw(1, 1, 4, 4, 4), draw(1, 8, 24)
    t = np.asarray([500.0], np.float32)
    loss = lambda tree: (wan.denoise(params, tree, x, t, ctx, config=tiny.CONFIG.wan) ** 2).sum()
    grad = jax.jit(jax.grad(loss))(tree)["blocks"]["attn1"]["to_q"]
    assert float(np.abs(grad["a"][0]).max()) == float(np.abs(grad["b"][0]).max()) == 0
    assert float(np.abs(grad["a"][1, :, 2:]).max()) == 0 == float(np.abs(grad["b"][1, 2:]).max())
    assert float(np.abs(grad["a"][2]).max()) > 0
    back = adapter.of_trees({"high": tree})
    assert set(back.modules["high"]) == set(pairs)
    for module, p in pairs.items():
        np.testing.assert_allclose(back.modules["high"][module].delta(), p.delta(), atol=1e-6)
