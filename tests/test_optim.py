"""AdamW per expert: hand-computed first step, clipping, warm-up, constants that stay constant."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wanjax import optim, settings


def _config(**changes):
    """The defaults of configs/default.py with these changes."""
    usual = dict(lr=1e-4, warmup=0, decay=0, b1=0.9, b2=0.999, eps=1e-8)
    usual |= dict(weight_decay=0.0, clip_norm=1.0)
    return settings.OptimConfig(**usual | changes)


def _step(config, tree, grad, opt=None):
    tx = optim.make(config)
    opt = tx.init(tree) if opt is None else opt
    updates, opt = tx.update(grad, opt, tree)
    return optax.apply_updates(tree, updates), opt


def test_first_step_moves_by_the_learning_rate():
    """Adam's first step is lr·g/(|g| + eps); 1 − 0.999 in float32 is good to 1e-5."""
    tree = {"q": {"a": jnp.array([1.0, 1.0]), "b": jnp.array([0.0]), "scale": jnp.array([2.0])}}
    grad = {"q": {"a": jnp.array([3.0, -5.0]), "b": jnp.array([1.0]), "scale": jnp.array([9.0])}}
    new, _ = _step(_config(lr=0.1, clip_norm=0), tree, grad)
    np.testing.assert_allclose(new["q"]["a"], [0.9, 1.1], rtol=1e-5)
    np.testing.assert_allclose(new["q"]["b"], [-0.1], rtol=1e-5)


def test_adapter_scales_never_move_but_norm_scales_do():
    config = _config(lr=0.1, weight_decay=0.5)
    adapter = {"q": {"a": jnp.ones(1), "b": jnp.ones(1), "scale": jnp.ones(1)}}
    new, _ = _step(config, adapter, adapter)
    assert float(new["q"]["scale"][0]) == 1.0 and float(new["q"]["a"][0]) < 1
    norm = {"norm": {"scale": jnp.ones(1)}}
    assert float(_step(config, norm, norm)[0]["norm"]["scale"][0]) < 1


def test_clipping_bounds_the_first_moment():
    """With clip_norm 1 a gradient of norm 5 enters Adam as norm 1: mu = (1 − b1)·g/5."""
    tree = {"w": jnp.zeros(2)}
    _, opt = _step(_config(clip_norm=1.0), tree, {"w": jnp.array([3.0, 4.0])})
    mu = optax.tree_utils.tree_get(opt, "mu")["w"]
    np.testing.assert_allclose(mu, [0.06, 0.08], rtol=1e-6)


@pytest.mark.parametrize("warmup, decay, rates", [
    (0, 0, [1.0, 1.0, 1.0]),
    (2, 0, [0.5, 1.0, 1.0]),
    (0, 2, [1.0, 0.5, 0.0, 0.0]),
    (2, 2, [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]),
])  # fmt: skip
def test_warm_up_and_decay_are_linear_and_zero_means_none(warmup, decay, rates):
    rate = optim.learning_rate(_config(lr=1.0, warmup=warmup, decay=decay))
    assert [float(rate(i)) for i in range(len(rates))] == rates


def test_a_compiled_rate_ends_at_exactly_zero():
    """XLA:CPU multiplies by 1/30 and fuses, which makes 1 − 30/30 negative."""
    rate = jax.jit(optim.learning_rate(_config(lr=2e-3, decay=30)))
    assert [float(rate(i)) for i in (30, 31, 99)] == [0.0] * 3
    assert float(rate(29)) > 0


def test_micro_batches_are_numpy_so_that_a_plan_needs_no_device():
    """Under a mesh of described TPUs, an array of jax would be a program that nothing can run."""
    for mix in (False, True):
        sets = optim.micro_batches(
            {"high": [0], "low": [1, 2]}, np.arange(4), micro_samples=2, micro_steps=1, mix=mix
        )
        leaves = jax.tree.leaves(sets)
        assert all(type(leaf) is np.ndarray and leaf.dtype == np.int32 for leaf in leaves)


def test_unequal_micro_batches_give_the_mean_over_rows():
    """By hand: gradients 1..5 of five rows have the mean 3, whatever the parts; the mean of the
    parts' means would be 3.33 for (1, 2), (3, 4), (5) and 3.25 for (1, 2, 3), (4, 5)."""
    config, tree = _config(clip_norm=0.0), {"w": jnp.zeros(())}

    def loss(_, tree, rows):
        return (tree["w"] * (rows[0] + 1)).mean(), {"row": rows[0].mean(), "rows": rows[0][:1]}

    for size in (1, 2, 3, 5, 9):
        index = {"low": optim.parts(np.arange(5), size)}
        opt = {"low": optim.make(config).init(tree)}
        _, opt, metrics = optim.step(loss, {"low": tree}, opt, index, {"low": config})
        (mu,) = optax.tree_utils.tree_get_all_with_path(opt["low"], "mu")
        np.testing.assert_allclose(jax.tree.leaves(mu[1]), 0.1 * 3, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm/low"], 3, rtol=1e-6)
        np.testing.assert_allclose(metrics["row/low"].mean(), 2, rtol=1e-6)
        assert metrics["rows/low"].shape == (-(-5 // size), 1)  # vectors: once a micro-batch


def test_micro_batches_hold_every_pair_once():
    slots = {"high": [0, 1, 2], "low": [3]}
    for mix in (False, True):
        sets = optim.micro_batches(slots, np.arange(5), micro_samples=2, micro_steps=2, mix=mix)
        assert len(sets) == (1 if mix else 2)
        for expert, numbers in slots.items():
            (blocks,) = (found[expert] for found in sets if expert in found)
            pairs = [p for a, b in blocks for p in zip(a.ravel(), b.ravel(), strict=True)]
            assert sorted(pairs) == sorted(itertools.product(numbers, range(5)))
        if mix:  # what is scanned together is as long for both experts
            assert [len(a) for a, _ in sets[0]["high"]] == [len(a) for a, _ in sets[0]["low"]]
