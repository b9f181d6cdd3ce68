"""DiffusionNFT against golden values and full training loops, a numpy oracle and gradient laws.

Notes on the golden files:
  nft_loss policy_loss holds the KL term as well (it equals total_loss); the policy part is
  adv_clip_max·mean(per_sample_loss).
  ema_decay_schedules unirl_constant_0p001, awm_linear_cap0p3, ff_linear_* and ff_*cosine_* are
    schedules that no config key chooses.
  ode_rollout_* is a sampler matter: tests/test_sampler.py.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax import advantages, trees
from wanjax.losses import flow, nft
from wanjax.parallel import sharding

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "nft"
CASES = sorted(path.stem.removeprefix("nft_loss_") for path in GOLDEN.glob("nft_loss_*.npz"))
ARRAYS = ("v_new", "v_old", "v_ref", "x0", "xt", "t", "advantages")


def _golden(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def _settings(g, case=""):
    return dict(
        nft_beta=float(g["beta"]),
        kl_beta=float(g["kl_beta"]),
        adv_clip_max=float(g["adv_clip_max"]),
        mode=case if case in nft.MODES else "all",
    )


def _random(rng, shape=(4, 3, 4, 5)):
    """Arguments of nft_loss with a drifted policy."""
    v_old, x0, noise, d_new, d_ref = rng.normal(size=(5, *shape)).astype(np.float32)
    sigma_B = rng.uniform(0.1, 0.9, shape[0]).astype(np.float32)
    adv_B = rng.normal(size=shape[0]).astype(np.float32) * 2
    x_t = flow.add_noise(x0, noise, sigma_B)
    return v_old + 0.1 * d_new, v_old, v_old + 0.1 * d_ref, x0, x_t, sigma_B, adv_B


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_statistics_equal_golden(case):
    with jax.enable_x64(case.endswith("_f64")):
        g = _golden(f"nft_loss_{case}")
        kwargs = _settings(g, case)
        args = [jnp.asarray(g[name]) for name in ARRAYS]
        x_t = flow.add_noise(g["x0"], g["noise"], g["t"])
        np.testing.assert_allclose(x_t, g["xt"], rtol=1e-6, atol=1e-6)
        loss = jax.jit(functools.partial(nft.nft_loss, **kwargs))
        (value, aux), grad = jax.value_and_grad(loss, has_aux=True)(*args)
        assert value.dtype == g["v_new"].dtype
        close = lambda ours, golden: np.testing.assert_allclose(ours, golden, rtol=2e-6, atol=1e-12)
        close(value, g["total_loss"])
        close(value, g["policy_loss"])
        close(aux["loss"], g["total_loss"])
        close(aux["policy_loss"], g["adv_clip_max"] * g["per_sample_loss"].mean())
        for name in ("kl", "old_kl", "old_deviate"):
            np.testing.assert_allclose(aux[name], g[name], rtol=2e-6, atol=1e-8)
        np.testing.assert_allclose(
            grad, g["grad_v_new"], rtol=0, atol=5e-6 * np.abs(g["grad_v_new"]).max()
        )
        r_B = nft.optimality(g["advantages"], kwargs["mode"], kwargs["adv_clip_max"])
        np.testing.assert_allclose(r_B, g["r"], atol=1e-7)
        close(aux["r_mean"], g["r"].mean())
        close(aux["r_std"], g["r"].std())
        for i in range(len(r_B)):
            _, one = loss(*(a[i : i + 1] for a in args))
            for ours, golden in (
                (one["weight_pos"], g["weight_pos"][i]),
                (one["weight_neg"], g["weight_neg"][i]),
                (one["positive_loss"], g["positive_loss"][i]),
                (one["negative_loss"], g["negative_loss"][i]),
                (one["policy_loss"] / g["adv_clip_max"], g["per_sample_loss"][i]),
            ):
                close(ours, golden)


@pytest.mark.parametrize("case", ["clip1", "globalstd", "groupstd", "zero_std_group"])
def test_advantages_and_optimality_equal_golden(case):
    g = _golden(f"adv_r_{case}")
    order = np.argsort(g["prompt_id"], kind="stable")
    rewards_PK = g["rewards"][order].reshape(g["prompt_id"].max() + 1, -1)
    preset = "flow_grpo_global" if g["global_std"] else "flow_grpo"
    adv = advantages.group_advantages(rewards_PK, preset).ravel()
    np.testing.assert_allclose(adv, g["advantages"][order], rtol=1e-9, atol=1e-9)
    with jax.enable_x64(True):
        r_B = nft.optimality(g["advantages"], "all", float(g["adv_clip_max"]))
    np.testing.assert_allclose(r_B, g["r"], atol=1e-12)


def test_decays_equal_golden():
    g = _golden("ema_decay_schedules")
    step = g["step"]
    for field, ours in {
        "decay_type_0": nft.old_decay(step, 0),
        "decay_type_1": nft.old_decay(step, 1),
        "decay_type_2": nft.old_decay(step, 2),
        "eval_ema_power_0p9": nft.evaluation_decay(step, 0.9),
        "eval_ema_power_0p9999": nft.evaluation_decay(step, 0.9999),
        "unirl_warmup_flat0_up0p001_hold0p5": nft.old_decay(step, 1),
        "unirl_warmup_flat75_up0p0075_hold0p999": nft.old_decay(step, 2),
        "unirl_linear_up0p001_hold0p5": nft.old_decay(step, 1),
        "ff_piecewise_0_0p001_0p5": nft.old_decay(step, 1),
        "ff_power_0p995_w10": nft.evaluation_decay(step, 0.995),
    }.items():
        np.testing.assert_allclose(ours, g[field], rtol=0, atol=1e-12, err_msg=field)
    assert nft.old_decay(100, 2) == 0.1875 and nft.old_decay(jnp.int32(75), 1) == 0.075


@pytest.mark.parametrize("case", ["type0", "type1", "type1_late", "type2_cross75"])
def test_old_and_evaluation_averages_equal_golden(case):
    g = _golden(f"ema_update_{case}")
    old = ema = {"w": jnp.asarray(g["live"][0])}
    np.testing.assert_array_equal(g["ema"][0], g["live"][0])
    step, cap = int(g["start_step"]), float(g["ema_target_decay"])
    for i, live in enumerate(g["live"][1:], 1):
        step, live = step + 1, {"w": jnp.asarray(live)}
        ema = trees.lerp(live, ema, nft.evaluation_decay(step, cap))
        np.testing.assert_allclose(ema["w"], g["ema"][i], rtol=0, atol=1e-6)
        epoch, rest = divmod(i, int(g["grad_steps_per_epoch"]))
        if rest == 0:
            decay = nft.old_decay(step, int(g["decay_type"]))
            assert step == g["global_step_at_update"][epoch - 1]
            np.testing.assert_allclose(decay, g["old_decay"][epoch - 1], rtol=0, atol=1e-12)
            old = trees.lerp(live, old, decay)
            np.testing.assert_allclose(old["w"], g["old"][epoch], rtol=0, atol=1e-6)
            if decay == 0:
                np.testing.assert_array_equal(old["w"], live["w"])


@pytest.mark.parametrize("case", ["type0", "type1", "type2_start200"])
def test_training_loop_equals_golden(case):
    g = _golden(f"nft_loop_{case}")
    velocity = lambda p, x, t: x @ p["W"] + t[:, None] * p["u"][None] + p["b"][None]
    base = {k: jnp.asarray(g[f"base_{k}"]) for k in "Wub"}
    atol = 5e-5 if g["lr"] > 1e-3 else 5e-6
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(float(g["lr"]), weight_decay=1e-4))

    def loss(live, old, x0, noise, t, adv):
        def one(noise, t):
            x_t = flow.add_noise(x0, noise, t)
            v = [velocity(p, x_t, t) for p in (live, old, base)]
            return nft.nft_loss(*v, x0, x_t, t, adv, **_settings(g))[0]

        losses_T = jax.vmap(one)(noise, t)
        return losses_T.mean(), losses_T

    @jax.jit
    def update(live, opt, old, *data):
        (_, losses_T), grad = jax.value_and_grad(loss, has_aux=True)(live, old, *data)
        change, opt = tx.update(grad, opt, live)
        return optax.apply_updates(live, change), opt, losses_T, optax.tree.norm(grad)

    live = old = ema = base
    opt, step = tx.init(live), int(g["start_step"])
    epochs, grad_steps = g["x0"].shape[:2]
    for e in range(epochs):
        for k in range(grad_steps):
            data = [g[name][e, k] for name in ("x0", "noise", "t", "advantages")]
            live, opt, losses_T, norm = update(live, opt, old, *data)
            step += 1
            ema = trees.lerp(live, ema, nft.evaluation_decay(step, 0.9))
            row = e * grad_steps + k
            np.testing.assert_allclose(losses_T, g["losses"][row], rtol=5e-6)
            np.testing.assert_allclose(norm, g["grad_norms"][row], rtol=5e-5)
        decay = nft.old_decay(step, int(g["decay_type"]))
        np.testing.assert_allclose(decay, g["old_decay"][e], rtol=0, atol=1e-12)
        old = trees.lerp(live, old, decay)
        for name, tree in (("live", live), ("old", old), ("ema", ema)):
            for k in "Wub":
                np.testing.assert_allclose(tree[k], g[f"{name}_{k}"][e], rtol=0, atol=atol)


def test_hand_computed_loss():
    # one sample of two elements: x_t = 1, x0 = 0, σ = ½, v_old = 0, v_new = 2, β = ½
    # v⁺ = 1, v⁻ = −1: e⁺ = ½, e⁻ = 3/2; ℓ = e²/|e| = ½, 3/2; r = (1/2)/2 + ½ = ¾
    # policy = 2·(¾·½ + ¼·3/2)/½ = 3; kl = (2 − 1)² = 1
    full = lambda value: jnp.full((1, 2), float(value))
    args = full(2), full(0), full(1), full(0), full(1), jnp.array([0.5]), jnp.array([1.0])
    loss, aux = nft.nft_loss(*args, nft_beta=0.5, kl_beta=0.25, adv_clip_max=2.0)
    assert loss == 3.25 and aux["policy_loss"] == 3 and aux["kl"] == 1 and aux["r_mean"] == 0.75
    assert aux["v_norm_ratio"] == 2 and aux["old_deviate"] == 4


def test_loss_equals_a_numpy_oracle(rng):
    args = _random(rng)
    v, old, ref, x0, x_t, sigma_B, adv_B = (np.asarray(a, np.float64) for a in args)
    total = 0.0
    for i in range(len(adv_B)):
        r = 0.5 + min(max(adv_B[i], -1.5), 1.5) / 3
        for share, sign in ((r, 1), (1 - r, -1)):
            mixed = (1 - sign * 0.3) * old[i] + sign * 0.3 * v[i]
            e = x_t[i] - sigma_B[i] * mixed - x0[i]
            total += 1.5 / 0.3 * share * np.mean(e**2) / np.mean(abs(e)) / len(adv_B)
    total += 0.2 * np.mean((v - ref) ** 2)
    loss, _ = nft.nft_loss(*args, nft_beta=0.3, kl_beta=0.2, adv_clip_max=1.5)
    np.testing.assert_allclose(loss, total, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_on_policy_gradient_is_the_scaled_flow_matching_gradient_for_any_beta(rng, beta):
    _, v, _, x0, x_t, sigma_B, adv_B = _random(rng)
    v = jnp.asarray(v)

    def normalised_flow_matching(v):
        e = x_t - flow.level(sigma_B, v) * v - x0
        w_B = jax.lax.stop_gradient(flow.sample_mean(jnp.abs(e)))
        return (flow.sample_mean(e**2) / w_B).sum()

    kwargs = dict(nft_beta=beta, kl_beta=0.0, adv_clip_max=3.0)
    loss = lambda new, adv_B: nft.nft_loss(new, v, None, x0, x_t, sigma_B, adv_B, **kwargs)[0]
    grad = jax.grad(loss)(v, adv_B)
    law_B = 3.0 * (2 * nft.optimality(adv_B, "all", 3.0) - 1) / len(adv_B)
    expected = flow.level(law_B, v) * jax.grad(normalised_flow_matching)(v)
    np.testing.assert_allclose(grad, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(loss(v, adv_B), loss(v, -adv_B), rtol=1e-6)  # value ignores r


def test_constant_half_gives_no_policy_gradient_on_policy(rng):
    _, v, ref, x0, x_t, sigma_B, adv_B = _random(rng)
    kwargs = dict(nft_beta=0.1, adv_clip_max=5.0)
    loss = lambda new, kl_beta: nft.nft_loss(
        new, v, ref, x0, x_t, sigma_B, 0 * adv_B, kl_beta=kl_beta, **kwargs
    )[0]
    assert np.all(jax.grad(loss)(v, 0.0) == 0)
    expected = 2 * 0.5 * (v - ref) / v.size
    np.testing.assert_allclose(jax.grad(loss)(v, 0.5), expected, rtol=1e-5)


def test_only_the_trained_velocity_gets_a_gradient(rng):
    args = _random(rng)
    loss = lambda *args: nft.nft_loss(*args, nft_beta=0.1, kl_beta=0.1, adv_clip_max=5.0)[0]
    new, *rest = jax.grad(loss, argnums=(0, 1, 2, 3, 4, 6))(*args)
    assert np.all(new != 0)
    for grad in rest:
        assert np.all(grad == 0)


def test_no_noise_level_gives_no_policy_gradient_and_stays_finite(rng):
    v, old, _, x0, _, sigma_B, adv_B = _random(rng)
    loss = lambda v: nft.nft_loss(
        v, old, None, x0, x0, 0 * sigma_B, adv_B, nft_beta=0.1, kl_beta=0.0, adv_clip_max=5.0
    )[0]
    value, grad = jax.value_and_grad(loss)(v)
    assert value == 0 and np.all(grad == 0)


def test_micro_batches_add_up_with_their_sizes(rng):
    args = _random(rng, (6, 3, 2))
    loss = lambda *a: nft.nft_loss(*a, nft_beta=0.1, kl_beta=0.1, adv_clip_max=5.0)[0]
    parts = [loss(*(a[s] for a in args)) for s in (slice(0, 2), slice(2, 6))]
    np.testing.assert_allclose(parts[0] * 2 / 6 + parts[1] * 4 / 6, loss(*args), rtol=1e-6)


def test_sharded_latents_give_the_loss_and_gradient_of_one_device(rng):
    """The self-normalisation is a mean over the whole sample, also where tokens are sharded."""
    args = _random(rng, (4, 8, 2, 2))
    loss = lambda *a: nft.nft_loss(*a, nft_beta=0.1, kl_beta=0.1, adv_clip_max=5.0)[0]
    expected = jax.value_and_grad(loss)(*args)
    mesh = sharding.make_mesh({"data": 2, "context": 4})
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    sharded = [place(a, P("data", "context") if a.ndim > 1 else P("data")) for a in args]
    value, grad = jax.jit(jax.value_and_grad(loss))(*sharded)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-7)


def test_arithmetic_is_float32_for_bfloat16_velocities(rng):
    args = _random(rng)
    low = [jnp.asarray(a, jnp.bfloat16) for a in args[:3]]
    loss = lambda v, *rest: nft.nft_loss(
        v, *rest, *args[3:], nft_beta=0.1, kl_beta=0.1, adv_clip_max=5.0
    )[0]
    value = loss(*low)
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, loss(*(a.astype(jnp.float32) for a in low)))
    assert jax.grad(loss)(*low).dtype == jnp.bfloat16
    equations = jax.make_jaxpr(loss)(*low).jaxpr.eqns
    made = [str(v.aval) for eqn in equations for v in eqn.outvars]
    assert made and not any(aval.startswith("bf16") for aval in made)


def test_modes_map_signs_as_documented():
    adv = jnp.array([-9.0, -1.0, 0.0, 1.0, 9.0])
    for mode, expected in {
        "all": [0, 0.4, 0.5, 0.6, 1],
        "positive_only": [0.5, 0.5, 0.5, 0.6, 1],
        "negative_only": [0, 0.4, 0.5, 0.5, 0.5],
        "one_only": [0.5, 0.5, 0.5, 0.6, 0.6],
        "binary": [0.4, 0.4, 0.5, 0.6, 0.6],
    }.items():
        np.testing.assert_allclose(nft.optimality(adv, mode, 5.0), expected, rtol=1e-6)


def test_stratified_steps_cover_the_steps_of_the_expert():
    key, ids = jax.random.key(0), jnp.arange(200)
    steps = np.asarray(nft.stratified_steps(key, ids, 3, 4, 10))
    assert steps.shape == (200, 3)
    for k in range(3):
        assert set(steps[:, k]) == {4 + 2 * k, 5 + 2 * k}
    every = np.asarray(nft.stratified_steps(key, ids, 6, 4, 10))
    np.testing.assert_array_equal(every, np.tile(np.arange(4, 10), (200, 1)))
    with pytest.raises(ValueError, match="nft.timesteps is 7; expected 1..6"):
        nft.stratified_steps(key, ids, 7, 4, 10)


def test_wrong_arguments_are_errors(rng):
    v, old, ref, x0, x_t, sigma_B, adv_B = _random(rng)
    good = dict(nft_beta=0.1, kl_beta=0.1, adv_clip_max=5.0)
    call = lambda *args, **kw: nft.nft_loss(*args, **{**good, **kw})
    with pytest.raises(ValueError, match="shapes differ"):
        call(v, old[:, :1], ref, x0, x_t, sigma_B, adv_B)
    with pytest.raises(ValueError, match="shapes differ"):
        call(v, old, ref[:, :1], x0, x_t, sigma_B, adv_B)
    with pytest.raises(ValueError, match=r"sigma has shape \(1,\); expected \[4\]"):
        call(v, old, ref, x0, x_t, sigma_B[:1], adv_B)
    with pytest.raises(ValueError, match=r"adv has shape \(4, 1\)"):
        call(v, old, ref, x0, x_t, sigma_B, adv_B[:, None])
    with pytest.raises(ValueError, match="v_ref is None"):
        call(v, old, None, x0, x_t, sigma_B, adv_B)
    with pytest.raises(ValueError, match="nft.nft_beta is 0"):
        call(v, old, ref, x0, x_t, sigma_B, adv_B, nft_beta=0)
    with pytest.raises(ValueError, match="nft.adv_clip_max is 0"):
        call(v, old, ref, x0, x_t, sigma_B, adv_B, adv_clip_max=0)
    with pytest.raises(ValueError, match="nft.mode is 'best'"):
        call(v, old, ref, x0, x_t, sigma_B, adv_B, mode="best")
    with pytest.raises(ValueError, match="nft.old_decay is 3"):
        nft.old_decay(1, 3)
