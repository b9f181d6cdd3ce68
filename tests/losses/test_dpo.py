"""Flow-DPO against golden values, a numpy oracle, hand-computed numbers and gradient identities."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.losses import dpo, flow

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "nft"
ARRAYS = ("v_win", "v_lose", "vref_win", "vref_lose", "x_win", "x_lose", "noise")


def _random(rng, shape=(3, 2, 4)):
    v_win, v_lose, d_win, d_lose, x_win, x_lose, noise = rng.normal(size=(7, *shape))
    arrays = v_win, v_lose, v_win + 0.1 * d_win, v_lose + 0.1 * d_lose, x_win, x_lose, noise
    return [a.astype(np.float32) for a in arrays]


@pytest.mark.parametrize("beta", [100, 2000])
def test_loss_gradients_and_margins_equal_golden(beta):
    g = dict(np.load(GOLDEN / f"flow_dpo_beta{beta}.npz"))
    assert g["beta"] == beta
    args = [jnp.asarray(g[name]) for name in ARRAYS]
    loss = jax.jit(lambda *args: dpo.dpo_loss(*args, beta=float(beta)))
    (value, aux), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*args)
    np.testing.assert_allclose(value, g["loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(aux["margin"], g["inside"].mean(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(aux["accuracy"], (g["inside"] > 0).mean())
    for i, inside in enumerate(g["inside"]):
        _, one = loss(*(a[i : i + 1] for a in args))
        np.testing.assert_allclose(one["margin"], inside, rtol=0, atol=2e-5)
    for grad, field in zip(grads, ("grad_v_win", "grad_v_lose"), strict=True):
        worst = np.abs(g[field]).max()
        np.testing.assert_allclose(grad, g[field], rtol=0, atol=5e-6 * worst)


def test_hand_computed_loss():
    # v* = 0 for both: win 1 against reference 2 (d = −3), lose 2 against 1 (d = 3); β = ½
    full = lambda value: jnp.full((1, 2), float(value))
    loss, aux = dpo.dpo_loss(
        full(1), full(2), full(2), full(1), full(3), full(3), full(3), beta=0.5
    )
    np.testing.assert_allclose(loss, np.log1p(np.exp(-1.5)), rtol=1e-6)
    assert aux["margin"] == 1.5 and aux["accuracy"] == 1
    assert aux["error_change_win"] == -3 and aux["error_change_lose"] == 3


def test_loss_equals_a_numpy_oracle(rng):
    args = _random(rng)
    v_win, v_lose, r_win, r_lose, x_win, x_lose, noise = (a.astype(np.float64) for a in args)
    total = 0.0
    for i in range(3):
        error = lambda v, x, i=i: np.mean((v[i] - (noise[i] - x[i])) ** 2)
        gain = error(v_win, x_win) - error(r_win, x_win) - error(v_lose, x_lose)
        total += np.log1p(np.exp(20 / 2 * (gain + error(r_lose, x_lose)))) / 3
    np.testing.assert_allclose(dpo.dpo_loss(*args, beta=20.0)[0], total, rtol=1e-5)


def test_gradient_at_the_reference_is_a_quarter_beta_of_the_error_gradients(rng):
    v_win, v_lose, _, _, x_win, x_lose, noise = _random(rng)
    loss = lambda a, b: dpo.dpo_loss(a, b, v_win, v_lose, x_win, x_lose, noise, beta=8.0)[0]
    value, (win, lose) = jax.value_and_grad(loss, argnums=(0, 1))(v_win, v_lose)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    error = lambda v, x: jax.grad(lambda v: flow.flow_loss(v, x, noise)[0])(v)
    np.testing.assert_allclose(win, 2 * error(v_win, x_win), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(lose, -2 * error(v_lose, x_lose), rtol=1e-5, atol=1e-7)


def test_references_and_clips_get_no_gradient(rng):
    loss = lambda *args: dpo.dpo_loss(*args, beta=5.0)[0]
    win, lose, *rest = jax.grad(loss, argnums=range(7))(*_random(rng))
    assert np.all(win != 0) and np.all(lose != 0)
    for grad in rest:
        assert np.all(grad == 0)


def test_pairs_are_the_extremes_of_each_group():
    adv_PK = np.array([[0.0, 2.0, -1.0], [0.0, 0.0, 0.0], [1.0, -3.0, 2.0]])
    win, lose = dpo.pairs(adv_PK)
    assert win.tolist() == [1, 3, 8] and lose.tolist() == [2, 3, 7]


def test_shape_mismatch_is_an_error(rng):
    args = _random(rng)
    for i in range(len(args)):
        bad = [a[:, :1] if i == j else a for j, a in enumerate(args)]
        with pytest.raises(ValueError, match="shapes differ"):
            dpo.dpo_loss(*bad, beta=1.0)
    with pytest.raises(ValueError, match=r"adv_PK has shape \(6,\); expected \[P, K\]"):
        dpo.pairs(np.zeros(6))
