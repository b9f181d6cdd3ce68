"""Adapters: a fresh one changes nothing, merging equals applying, targets are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from wanjax import trees
from wanjax.models import lora, wan


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
    merged = wan.denoise(lora.merge(params, adapter), None, *_inputs(), config=tiny.WAN)
    plain = wan.denoise(params, None, *_inputs(), config=tiny.WAN)
    np.testing.assert_allclose(applied, merged, atol=1e-5 * float(jnp.abs(merged).max()))
    assert float(jnp.abs(applied - plain).max()) > 1e-3


def test_merge_by_hand():
    params = {"m": {"kernel": jnp.zeros((2, 2))}}
    adapter = {"m": {"a": jnp.array([[1.0], [2.0]]), "b": jnp.array([[3.0, 4.0]]),
                     "scale": jnp.float32(0.5)}}  # fmt: skip
    merged = lora.merge(params, adapter, strength=2.0)["m"]["kernel"]
    np.testing.assert_array_equal(merged, [[3.0, 4.0], [6.0, 8.0]])


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
