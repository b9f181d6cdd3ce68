"""Adapters: a fresh one changes nothing, merging equals applying, targets are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from wanjax import trees
from wanjax.models import lora, wan
from wanjax.parallel import sharding


def _inputs():
    keys = jax.random.split(jax.random.key(5), 2)
    x = jax.random.normal(keys[0], (2, 2, 2, 2, 4))
    return x, jnp.array([700.0, 20.0]), jax.random.normal(keys[1], (2, 5, 24))


def _stirred(params, **kwargs):
    adapter = lora.init(jax.random.key(0), params, rank=3, alpha=6.0, **kwargs)
    stir = lambda path, x: x if path.endswith("scale") else x + 0.2
    return trees.map_paths(stir, adapter)


def test_a_fresh_adapter_changes_nothing():
    params = tiny.parameters()["high"]
    adapter = lora.init(jax.random.key(0), params, rank=3, alpha=6.0)
    run = lambda adapter: wan.denoise(params, adapter, *_inputs(), config=tiny.WAN)
    np.testing.assert_array_equal(run(adapter), run(None))


@pytest.mark.parametrize("targets", [
    lora.TARGETS, (r"blocks/attn1/to_v",), (r"condition_embedder\..*", "proj_out"),
])  # fmt: skip
def test_merging_equals_applying(targets):
    params = tiny.parameters()["high"]
    adapter = _stirred(params, targets=targets)
    applied = wan.denoise(params, adapter, *_inputs(), config=tiny.WAN)
    merged = wan.denoise(lora.merge(params, adapter)[0], None, *_inputs(), config=tiny.WAN)
    plain = wan.denoise(params, None, *_inputs(), config=tiny.WAN)
    np.testing.assert_allclose(applied, merged, atol=1e-5 * float(jnp.abs(merged).max()))
    assert float(jnp.abs(applied - plain).max()) > 1e-3


def test_merge_by_hand():
    params = {"m": {"kernel": jnp.zeros((2, 2))}, "n": {"kernel": jnp.ones((2, 2))}}
    adapter = {"m": {"a": jnp.array([[1.0], [2.0]]), "b": jnp.array([[3.0, 4.0]]),
                     "scale": jnp.float32(0.5)}}  # fmt: skip
    merged, rounding = lora.merge(params, adapter)
    np.testing.assert_array_equal(merged["m"]["kernel"], [[1.5, 2.0], [3.0, 4.0]])
    assert merged["n"]["kernel"] is params["n"]["kernel"]
    sums = 2.25 + 4 + 9 + 16
    assert rounding == lora.Rounding(error=0, change=sums, along=sums, moved=4, total=4)


@pytest.mark.parametrize("dtype, size, low, high", [
    ("bfloat16", 1e-3, 0.5, 1.1), ("bfloat16", 1.0, 1e-4, 5e-3), ("float32", 1e-3, 1e-6, 1e-3),
])  # fmt: skip
def test_a_merge_reports_what_the_dtype_of_the_weights_lost(dtype, size, low, high):
    """Against float64, for |ΔW|/|W| of `size`; jitted and in host memory alike."""
    rng = np.random.default_rng(0)
    w = np.asarray(jnp.asarray(rng.normal(size=(3, 64, 48)), dtype), np.float64)
    a, b = (rng.normal(size=s).astype(np.float32) for s in ((3, 64, 4), (3, 4, 48)))
    scale = np.float32(size * np.linalg.norm(w) / np.linalg.norm(a @ b))
    wanted = np.einsum("lir,lro->lio", a.astype(np.float64), b) * float(scale)
    adapter = {"blocks": {"m": {"a": a, "b": b, "scale": np.full(3, scale)}}}
    params = {"blocks": {"m": {"kernel": jnp.asarray(w, dtype)}}}
    for given in (params, sharding.to_host(params)):
        merged, rounding = lora.merge(given, adapter)
        kernel = merged["blocks"]["m"]["kernel"]
        assert kernel.dtype == dtype
        assert kernel.sharding == given["blocks"]["m"]["kernel"].sharding
        moved = np.asarray(kernel, np.float64) - w
        error = np.linalg.norm(moved - wanted) / np.linalg.norm(wanted)
        assert rounding.relative == pytest.approx(error, rel=1e-2) and low < error < high
        along = (moved * wanted).sum() / np.square(wanted).sum()
        assert rounding.along / rounding.change == pytest.approx(along, rel=1e-3)
        assert (rounding.moved, rounding.total) == ((moved != 0).sum(), w.size)
        assert rounding.large == (error > 0.01)


def test_combined_adapters_change_the_base_by_the_sum_of_their_products(rng):
    """Against float64; layers of one of them alone, other ranks, scales and strengths."""

    def adapter(modules, rank):
        draw = lambda *shape: rng.normal(size=(2, *shape)).astype(np.float32)
        part = lambda: {"a": draw(6, rank), "b": draw(rank, 5), "scale": draw()}
        return {"blocks": {name: part() for name in modules}}

    given = [(adapter("xy", 3), 0.7), (adapter("yz", 2), -1.3), (adapter("y", 1), 0.1)]
    combined = lora.combine(given)["blocks"]
    for name, rank in (("x", 3), ("y", 6), ("z", 2)):
        want = sum(
            strength * np.einsum("lir,lro,l->lio", *(m[leaf].astype(np.float64) for leaf in m))
            for tree, strength in given if (m := tree["blocks"].get(name))
        )  # fmt: skip
        own = combined[name]
        assert own["a"].shape == (2, 6, rank) and own["b"].shape == (2, rank, 5)
        assert {x.dtype for x in own.values()} == {np.dtype(np.float32)}
        got = np.einsum("lir,lro,l->lio", *(np.asarray(own[k], np.float64) for k in own))
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    np.testing.assert_array_equal(combined["x"]["b"], given[0][0]["blocks"]["x"]["b"])


def test_the_model_runs_on_combined_adapters_of_different_layers():
    params = tiny.parameters()["high"]
    given = [(_stirred(params, targets=(r"blocks/attn1/.*",)), 0.5),
             (_stirred(params, targets=(r"blocks/attn[12]/to_v", "proj_out")), -2.0)]  # fmt: skip
    got = wan.denoise(params, lora.combine(given), *_inputs(), config=tiny.WAN)
    for tree, strength in given:
        scaled = lambda path, x, by=strength: x * by if path.endswith("scale") else x
        params, _ = lora.merge(params, trees.map_paths(scaled, tree))
    want = wan.denoise(params, None, *_inputs(), config=tiny.WAN)
    np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))


def test_default_targets_are_all_attention_and_ffn_matrices_of_every_block():
    params = tiny.parameters()["high"]
    flat = trees.flatten(lora.init(jax.random.key(0), params, rank=3, alpha=6.0))
    modules = {path.rsplit("/", 1)[0] for path in flat}
    assert len(modules) == 10 and all(m.startswith("blocks/") for m in modules)
    assert flat["blocks/ffn.net.0.proj/a"].shape == (2, 32, 3)
    assert float(flat["blocks/attn1/to_q/scale"][1]) == 2.0
    first = flat["blocks/attn1/to_q/a"]
    assert not np.array_equal(first[0], first[1])  # every layer draws its own
    assert not np.array_equal(first, flat["blocks/attn1/to_k/a"])


def test_targets_that_match_nothing_and_bad_ranks_are_refused():
    params = tiny.parameters()["high"]
    with pytest.raises(ValueError, match="'blocks/attn1/q' matches no layer"):
        lora.init(jax.random.key(0), params, rank=1, alpha=1.0, targets=("blocks/attn1/q",))
    with pytest.raises(ValueError, match="config.lora.rank"):
        lora.init(jax.random.key(0), params, rank=0, alpha=1.0)
