"""Flow-matching loss, timestep densities and conversions against closed forms and golden values.

sf_training_weight of golden/dmd2 (the bell-shaped SFT weight) is checked here; the other arrays of
that folder in test_dmd2.py.
"""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import schedule
from wanjax.losses import flow

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "dmd2"
DENSITIES = [
    flow.Density(),
    flow.Density("logit_normal"),
    flow.Density("logit_normal", mean=-0.5, std=1.3),
    flow.Density("mode"),
    flow.Density("mode", scale=-0.9),
]


def _sample(density, rng, n):
    """u drawn as the definitions in the paper say, without a quantile function."""
    if density.name == "uniform":
        return rng.uniform(size=n)
    if density.name == "logit_normal":
        return 1 / (1 + np.exp(-rng.normal(density.mean, density.std, n)))
    x = rng.uniform(size=n)
    return 1 - x - density.scale * (np.cos(np.pi * x / 2) ** 2 - 1 + x)


@pytest.mark.parametrize("density", DENSITIES, ids=str)
@pytest.mark.parametrize(
    ("shift", "t_lo", "t_hi"), [(1.0, 0, 1000), (5.0, 875, 1000), (12.0, 0, 900), (3.0, 200, 600)]
)
def test_draws_follow_the_shifted_density_inside_the_range(rng, density, shift, t_lo, t_hi):
    t = 1000 * schedule.shift_map(_sample(density, rng, 400_000), shift)
    t = np.sort(t[(t >= t_lo) & (t < t_hi)])
    assert len(t) > 10_000
    q = (np.arange(200) + 0.5) / 200
    ours = flow.quantile(jnp.asarray(q, jnp.float32), density, shift=shift, t_lo=t_lo, t_hi=t_hi)
    empirical = np.searchsorted(t, ours) / len(t)
    np.testing.assert_allclose(empirical, q, atol=5 / math.sqrt(len(t)))


@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_draws_stay_below_the_boundary_even_at_the_last_quantile(density):
    q = jnp.array([0.0, 0.5, 1 - 2**-24, 1.0])
    low = np.asarray(flow.quantile(q, density, shift=5.0, t_hi=875.0))
    assert np.all((low >= 0) & (low < 875)) and low[-1] > 874.9 and np.all(np.diff(low) >= 0)
    high = np.asarray(flow.quantile(q, density, shift=5.0, t_lo=875.0))
    assert np.all((high >= 875) & (high < 1000)) and high[0] < 875.01


@pytest.mark.parametrize("shift", [1, 3, 5, 8, 12])
def test_bell_weight_equals_golden(shift):
    g = np.load(GOLDEN / f"schedule_shift{shift}.npz")
    ours = flow.bell_weight(1000 * flow.sigma_table(shift), shift)
    np.testing.assert_allclose(ours, g["sf_training_weight"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose([ours.mean(), ours.min()], [1, 0], atol=1e-12)


def test_hand_computed_loss():
    # targets ε − x0 = 2; errors (3 − 2)² = 1 and (5 − 2)² = 9
    v = jnp.array([[3.0, 3.0], [5.0, 5.0]])
    x0, noise = jnp.full((2, 2), -1.0), jnp.ones((2, 2))
    loss, aux = flow.flow_loss(v, x0, noise)
    assert loss == 5 and aux["loss"] == 5
    loss, aux = flow.flow_loss(v, x0, noise, jnp.array([2.0, 0.5]))
    assert loss == (2 * 1 + 0.5 * 9) / 2 and aux["error"] == 5


def test_loss_equals_a_numpy_oracle_and_its_gradient_the_residual(rng):
    v, x0, noise = rng.normal(size=(3, 4, 3, 2, 5)).astype(np.float32)
    weight_B = rng.uniform(size=4).astype(np.float32)
    residual = v - (noise - x0)
    expected = np.mean([w * np.mean(r**2) for w, r in zip(weight_B, residual, strict=True)])
    loss, grad = jax.value_and_grad(lambda v: flow.flow_loss(v, x0, noise, weight_B)[0])(v)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    expected = 2 * weight_B[:, None, None, None] * residual / v.size
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-9)


def test_targets_get_no_gradient_and_bfloat16_is_computed_in_float32(rng):
    v, x0, noise = jnp.asarray(rng.normal(size=(3, 2, 6)), jnp.bfloat16)
    loss = lambda v, x0, noise: flow.flow_loss(v, x0, noise)[0]
    grad_v, grad_x0, grad_noise = jax.grad(loss, argnums=(0, 1, 2))(v, x0, noise)
    assert np.all(grad_x0 == 0) and np.all(grad_noise == 0) and np.any(grad_v != 0)
    wide = [a.astype(jnp.float32) for a in (v, x0, noise)]
    np.testing.assert_array_equal(loss(v, x0, noise), loss(*wide))


def test_conversions_invert_each_other(rng):
    x0, noise = rng.normal(size=(2, 3, 4, 2)).astype(np.float32)
    sigma_B = np.array([0.1, 0.5, 1.0], np.float32)
    x_t, v = flow.add_noise(x0, noise, sigma_B), noise - x0
    np.testing.assert_allclose(flow.x0_from_velocity(x_t, v, sigma_B), x0, atol=1e-6)
    moved = flow.euler(x_t, v, sigma_B, sigma_B / 2)
    np.testing.assert_allclose(moved, flow.add_noise(x0, noise, sigma_B / 2), atol=1e-6)
    np.testing.assert_array_equal(
        flow.add_noise(x0, noise, 0.5), flow.add_noise(x0, noise, np.full(3, 0.5))
    )


def test_wrong_arguments_are_errors():
    x, density = jnp.zeros((2, 3)), flow.Density
    with pytest.raises(ValueError, match="shapes differ"):
        flow.flow_loss(x, x[:, :1], x)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 1\); expected \[2\]"):
        flow.flow_loss(x, x, x, jnp.ones((2, 1)))
    with pytest.raises(ValueError, match=r"sigma has shape \(3,\); expected \[2\]"):
        flow.add_noise(x, x, jnp.ones(3))
    with pytest.raises(ValueError, match="timestep density is 'cosmap'"):
        flow.quantile(0.5, density("cosmap"), shift=1.0)
    with pytest.raises(ValueError, match="timestep range is"):
        flow.quantile(0.5, density(), shift=1.0, t_lo=900.0, t_hi=875.0)
    with pytest.raises(ValueError, match="scale of timestep density 'mode' is 2"):
        flow.quantile(0.5, density("mode", scale=2.0), shift=1.0)
