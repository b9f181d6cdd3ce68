"""Advantage weighted matching against golden values, a numpy oracle and gradient identities."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.losses import awm, flow, nft

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "nft"
WEIGHTING = {"Uniform": "uniform", "t": "t", "t2": "t2", "huber": "huber"}
CASES = ["Uniform", "t", "t2", "huber", "ghuber", "offpolicy_clip"]


def _awm_loss(*args, kl_beta=0.0, adv_clip_max=5.0, **changes):
    """awm_loss with the settings of most tests."""
    settings = dict(weighting="ghuber", power=0.25, clip=1.0, adv_max=1.0, ema_kl_beta=0.0)
    settings = awm.Settings(**settings | changes)
    return awm.awm_loss(*args, settings=settings, kl_beta=kl_beta, adv_clip_max=adv_clip_max)


def _random(rng, shape=(4, 3, 2, 5)):
    v, x0, noise, d = rng.normal(size=(4, *shape)).astype(np.float32)
    sigma_B = rng.uniform(0.1, 0.9, shape[0]).astype(np.float32)
    return v, v + 0.1 * d, x0, noise, sigma_B, rng.normal(size=shape[0]).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_log_probs_equal_golden(case):
    g = dict(np.load(GOLDEN / f"awm_loss_{case}.npz"))
    count = int(g["num_timesteps"])
    x0, adv = np.tile(g["x0"], (count, 1, 1, 1)), np.tile(g["advantages_raw"], count)
    weighting = WEIGHTING.get(case, "ghuber")
    rest = g["v_old"], g["v_ref"], g["v_ema"], x0, g["noise"], g["t"], adv
    loss = jax.jit(
        lambda v, *rest: _awm_loss(
            v,
            *rest,
            weighting=weighting,
            power=float(g["ghuber_power"]),
            clip=float(g["clip_range"]),
            adv_clip_max=float(g["adv_clip_max"]),
            adv_max=float(g["advantage_max"]),
            kl_beta=float(g["kl_beta"]),
            ema_kl_beta=float(g["ema_kl_beta"]),
        )
    )
    (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(g["v"], *rest)
    for ours, field in (
        (value, "total_loss"),
        (aux["loss"], "total_loss"),
        (aux["policy_loss"], "policy_loss"),
        (aux["kl"], "kl_loss"),
        (aux["ema_kl"], "ema_kl_loss"),
        (aux["ratio_mean"], "ratio"),
    ):
        np.testing.assert_allclose(ours, g[field].mean(), rtol=2e-6, err_msg=field)
    worst = np.abs(g["grad_v"]).max()
    np.testing.assert_allclose(grad, g["grad_v"], rtol=0, atol=5e-6 * worst)
    for v, field in (("v", "log_prob"), ("v_old", "old_log_prob")):
        logp = awm.log_prob(g[v], x0, g["noise"], g["t"], weighting=weighting, power=0.25)
        np.testing.assert_allclose(logp, g[field], rtol=2e-6, atol=1e-8)
    for ours, find in (("std", np.std), ("min", np.min), ("max", np.max)):
        np.testing.assert_allclose(aux[f"ratio_{ours}"], find(g["ratio"]), rtol=2e-6, atol=1e-6)
    rows = [a.reshape(len(x0) // len(g["ratio"]), -1, *a.shape[1:]) for a in (g["v"], *rest)]
    _, alone = jax.vmap(loss, in_axes=1)(*rows)  # each sample a batch of its own
    np.testing.assert_allclose(alone["ratio_mean"], g["ratio"], rtol=2e-6)


def test_hand_computed_loss():
    # v* = 0; m = 4 new, 1 old; σ = ½: l = −2, −½; A = 4 → clipped 2 → 1; ratio e^−1.5
    full = lambda value: jnp.full((1, 2), float(value))
    sigma, adv = jnp.array([0.5]), jnp.array([4.0])
    args = full(2), full(1), full(0), full(0), full(3), full(3), sigma, adv
    given = dict(weighting="t", clip=0.9, adv_clip_max=2.0)
    loss, aux = _awm_loss(*args, **given, kl_beta=0.5)
    np.testing.assert_allclose(loss, -np.exp(-1.5) + 0.5 * 4, rtol=1e-6)
    assert aux["kl"] == 4 and aux["logp"] == -2 and "ema_kl" not in aux
    # with v_ema = 5: KL(ema) = 3² = 9
    args, policy = (*args[:3], full(5), *args[4:]), -np.exp(-1.5)
    loss, aux = _awm_loss(*args, **given, ema_kl_beta=0.25)
    np.testing.assert_allclose([loss, aux["ema_kl"]], [policy + 0.25 * 9, 9], rtol=1e-6)
    assert "kl" not in aux


def test_loss_equals_a_numpy_oracle(rng):
    """Value by value: the ratio, clipped term and KL of each sample, then of the batch."""
    v, old, x0, noise, sigma_B, adv_B = _random(rng)
    want = {"ratio_mean": [], "policy_loss": [], "ema_kl": []}
    for i in range(len(adv_B)):
        m = [np.mean((a[i].astype(float) - noise[i] + x0[i]) ** 2) for a in (v, old)]
        l_new, l_old = (-sigma_B[i] * ((x + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25 for x in m)
        ratio, a = np.exp(l_new - l_old), np.clip(adv_B[i], -1, 1)
        want["ratio_mean"].append(ratio)
        want["policy_loss"].append(max(-a * ratio, -a * np.clip(ratio, 0.99, 1.01)))
        want["ema_kl"].append(np.mean((v[i].astype(float) - old[i]) ** 2))
    run = lambda *rows: _awm_loss(
        rows[0], rows[1], None, rows[1], *rows[2:], clip=0.01, adv_clip_max=1.0, ema_kl_beta=0.3
    )
    arrays = v, old, x0, noise, sigma_B, adv_B
    _, alone = jax.vmap(run)(*(a[:, None] for a in arrays))
    loss, whole = run(*arrays)
    for name, values in want.items():
        np.testing.assert_allclose(alone[name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(whole[name], np.mean(values), rtol=1e-5, err_msg=name)
    assert 0 < whole["clip_frac"] and np.std(want["ratio_mean"]) > 1e-3
    total = np.mean(want["policy_loss"]) + 0.3 * np.mean(want["ema_kl"])
    np.testing.assert_allclose(loss, total, rtol=1e-5)


def test_on_policy_gradient_is_the_advantage_weighted_flow_matching_gradient(rng):
    """With weighting t2 it is that of A·σ²·m; NFT's has the same direction in every sample."""
    v, _, x0, noise, sigma_B, adv_B = _random(rng)
    loss = lambda new: _awm_loss(
        new, v, None, None, x0, noise, sigma_B, adv_B, weighting="t2", adv_clip_max=9.0, adv_max=9.0
    )[0]
    grad = jax.grad(loss)(v)
    weight_B = adv_B * sigma_B**2
    expected = jax.grad(lambda v: flow.flow_loss(v, x0, noise, weight_B)[0])(v)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-9)
    x_t = flow.add_noise(x0, noise, sigma_B)
    other = jax.grad(
        lambda new: nft.nft_loss(
            new, v, None, x0, x_t, sigma_B, adv_B, nft_beta=0.1, kl_beta=0.0, adv_clip_max=9.0
        )[0]
    )(v)
    for a, b in zip(np.asarray(grad), np.asarray(other), strict=True):
        cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
        np.testing.assert_allclose(cosine, 1, atol=1e-5)


def test_only_the_trained_velocity_gets_a_gradient(rng):
    v, other, x0, noise, sigma_B, adv_B = _random(rng)
    loss = lambda new, old, ref, ema, x0, noise, adv_B: _awm_loss(
        new, old, ref, ema, x0, noise, sigma_B, adv_B, kl_beta=0.1, ema_kl_beta=0.1
    )[0]
    new, *rest = jax.grad(loss, argnums=range(7))(v, other, other, other, x0, noise, adv_B)
    assert np.all(new != 0)
    for grad in rest:
        assert np.all(grad == 0)


def test_wrong_arguments_are_errors(rng):
    v, old, x0, noise, sigma_B, adv_B = _random(rng)
    call = lambda *args, **kw: _awm_loss(*args, noise, sigma_B, adv_B, **kw)
    with pytest.raises(ValueError, match="shapes differ"):
        call(v, old[:, :1], None, None, x0)
    with pytest.raises(ValueError, match="shapes differ"):
        call(v, old, old[:, :1], None, x0, kl_beta=1.0)
    with pytest.raises(ValueError, match="awm.kl_beta is 0.5 but v_ref is None"):
        call(v, old, None, None, x0, kl_beta=0.5)
    with pytest.raises(ValueError, match="awm.ema_kl_beta is 0.5 but v_ema is None"):
        call(v, old, None, None, x0, ema_kl_beta=0.5)
    with pytest.raises(ValueError, match=r"adv has shape \(1,\); expected \[4\]"):
        _awm_loss(v, old, None, None, x0, noise, sigma_B, adv_B[:1])
    with pytest.raises(ValueError, match="awm.weighting is 'l1'"):
        call(v, old, None, None, x0, weighting="l1")
