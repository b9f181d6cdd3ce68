"""DMD2 losses, schedules and few-step samplers against golden values, whole training steps of the
reference included, hand-computed numbers, a numpy oracle and gradient identities.

How golden fields map where wanjax differs on purpose:
  phased cfg4_layer_norm, cfg4_scalar: guidance rescaled to a norm, which no config key chooses.
  gen_loss fv_*: one normaliser for the whole batch, reached by calling with the batch folded into
    one sample. fastgen_*, fdistill_*: normaliser plus 1e-6 instead of a floor, reached by weight_B.
    rcm_*: sum of squares without the ½. sf_*, fv_*: floor 0.
  gen_loss degenerate_inf, and the nan case's sf_fakecfg1 (whose fake score differs from the
    teacher): a zero normaliser without a floor gives ±float-max in the references; with the floor
    wanjax is finite, and equal to the reference that has one.
  cadence fastgen_*: a critic that rests where the student moves, which no config key chooses.
  ema_seed*: wanjax counts student updates, the golden trace has one per iteration.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import schedule, trees
from wanjax.losses import dmd2, flow

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "dmd2"
SHIFTS = [1, 3, 5, 8, 12]
NO_FLOOR = 0.0


def _golden(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def _names(pattern):
    return sorted(path.stem for path in GOLDEN.glob(f"{pattern}.npz"))


def _warp(steps, shift):
    levels = [step / 1000 for step in steps]
    return schedule.make_schedule("explicit", len(levels), shift, sigmas=levels).timesteps


def _table_sigma(t, shift):
    """Level of the table entry nearest to t, the first of equals (float64): what FastVideo and
    Self-Forcing use in place of t/1000."""
    table = flow.sigma_table(shift)
    distance = np.abs(1000 * table - np.asarray(t, np.float64)[..., None])
    return table[distance.argmin(-1)]


def _velocity_from_x0(x, x0, sigma):
    """v = (x_t − x0)/σ, for σ > 0."""
    x, x0 = flow.wide(x, x0)
    return (x - x0) / flow.level(sigma, x)


def _renoise(x, v, sigma, sigma_next, noise):
    """Step of the SDE few-step sampler: x0 = x − σ·v with fresh noise at σ'."""
    return flow.add_noise(flow.x0_from_velocity(x, v, sigma), noise, sigma_next)


def _guided(cond, uncond, weight):
    """u + w·(c − u)."""
    cond, uncond = flow.wide(cond, uncond)
    return uncond + weight * (cond - uncond)


def _standard_guidance(weight):
    """Guidance u + w·(c − u) equal to the form c + weight·(c − u) of DMD2, CausVid, Self-Forcing
    and FastVideo's older trainer."""
    return weight + 1


def _close(ours, golden):
    np.testing.assert_allclose(ours, golden, rtol=2e-5, atol=2e-6)


def _close_bf16(ours, golden):
    np.testing.assert_allclose(ours, golden, rtol=2e-2, atol=2e-2)


def _close_grad(ours, golden, rtol=2e-5):
    """Gradients hold 1/N, so the absolute tolerance is relative to the largest."""
    ours, golden = np.ravel(ours), np.ravel(golden)
    np.testing.assert_allclose(ours, golden, rtol=rtol, atol=rtol * np.abs(golden).max())


@pytest.mark.parametrize("shift", SHIFTS)
def test_tables_and_shifted_timesteps_equal_golden(shift):
    g = _golden(f"schedule_shift{shift}")
    table = flow.sigma_table(shift)
    for kind in ("fv", "sf"):
        np.testing.assert_allclose(table, g[f"{kind}_sigmas"], rtol=0, atol=2e-6)
        np.testing.assert_allclose(1000 * table, g[f"{kind}_timesteps"], rtol=0, atol=2e-3)
        for where, t in (("raw", g["raw_t"]), ("shifted", g["shifted_t_clamp_20_980"])):
            ours = _table_sigma(t, shift)
            np.testing.assert_allclose(ours, g[f"lookup_sigma_{kind}_at_{where}"], atol=2e-6)
    shifted = dmd2.score_timesteps(g["raw_t"], shift, t_lo=0.0, t_hi=1000.0)
    np.testing.assert_allclose(shifted, g["shifted_t"], rtol=0, atol=2e-3)
    clamped = dmd2.score_timesteps(g["raw_t"], shift, t_lo=20.0, t_hi=980.0)
    np.testing.assert_allclose(clamped, g["shifted_t_clamp_20_980"], rtol=0, atol=2e-3)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", "abcd")
def test_warped_steps_and_their_experts_equal_golden(shift, steps):
    g = _golden(f"schedule_shift{shift}")
    raw = g[f"steps_{steps}"]
    for boundary in (875, 900):
        made = schedule.make_schedule("explicit", len(raw), shift, boundary / 1000, raw / 1000)
        warped = made.timesteps
        for kind in ("fv", "sf"):
            np.testing.assert_allclose(warped, g[f"warp_{kind}_{steps}"], rtol=0, atol=2e-3)
            is_low = g[f"is_low_{kind}_{steps}_b{boundary}"]
            np.testing.assert_array_equal(made.expert, 1 - is_low)


@pytest.mark.parametrize("name", _names("noise_convert*"))
def test_noise_conversions_equal_golden(name):
    g = _golden(name)
    shift = float(g["shift"])
    bf16 = str(g["dtype"]) == "torch.bfloat16"
    close = _close_bf16 if bf16 else _close
    dtype = jnp.bfloat16 if bf16 else jnp.float32
    x0, noise, v = (jnp.asarray(g[k], dtype) for k in ("x0", "noise", "velocity"))
    boundary = _table_sigma(875.0, shift)
    for times in ("scalar", "perframe", "list4", "int"):
        sigma = _table_sigma(g[f"t_{times}"], shift)
        sigma = sigma[0] if times == "scalar" else sigma
        for kind in ("fv", "sf"):
            field = lambda name, end=f"{kind}_{times}": g[f"{name}_{end}"]
            # the references round each result to the dtype of the case before they go on
            x_t, x0_pred = (jnp.asarray(field(name), dtype) for name in ("xt", "x0pred"))
            close(flow.add_noise(x0, noise, sigma), field("xt"))
            close(flow.x0_from_velocity(x_t, v, sigma), field("x0pred"))
            close(flow.x0_from_velocity(x_t, v, sigma), field("x0pred_selfforcing"))
            close(flow.euler(x_t, v, sigma, boundary), field("xbound875"))
            close(_velocity_from_x0(x_t, x0_pred, sigma), field("flow_back"))
    assert flow.add_noise(x0, noise, sigma).dtype == jnp.float32


def _scores(g, fake_guidance=1.0, guidance=None):
    """(x0_fake, x0_real) as the references form them: guidance in x0 space."""
    dtype = jnp.bfloat16 if str(g["dtype"]) == "torch.bfloat16" else jnp.float32
    sigma = float(g["sigma_used"])
    x0 = lambda name: flow.x0_from_velocity(g["noisy"], g[name], sigma).astype(dtype)
    weight = float(g["guidance_standard"]) if guidance is None else guidance
    real = _guided(x0("v_real_cond"), x0("v_real_uncond"), weight)
    fake = _guided(x0("v_fake_cond"), x0("v_fake_uncond"), fake_guidance)
    return fake, real


def _generator(x0, fake, real, floor=NO_FLOOR, weight_B=None):
    loss = lambda x0: dmd2.generator_loss(x0, fake, real, floor=floor, weight_B=weight_B)
    return jax.value_and_grad(loss, has_aux=True)(x0)


GENERATOR = [name for name in _names("gen_loss*") if "degenerate" not in name]


@pytest.mark.parametrize("name", GENERATOR)
def test_generator_loss_and_gradient_equal_golden(name):
    g = _golden(name)
    bf16 = "bf16" in name
    x0 = jnp.asarray(g["student_x0"])
    fake, real = _scores(g)
    level = _table_sigma(g["timestep"].item(), float(g["shift"]))
    np.testing.assert_allclose(level, g["sigma_used"], rtol=0, atol=2e-6)
    noisy = flow.add_noise(x0, g["noise"], float(g["sigma_used"]))
    close = _close_bf16 if bf16 else _close
    close(noisy, g["noisy"])
    close(real, g["real_x0_cfg"])
    close(fake, g["fake_x0"])

    rtol = 2e-2 if bf16 else 2e-5

    def compare(result, loss, grad, n=1):
        (value, aux), gradient = result
        np.testing.assert_allclose(value * n, loss, rtol=rtol)
        _close_grad(gradient * n, grad, rtol)
        return aux

    whole = [a[None] for a in (x0, fake, real)]
    compare(_generator(*whole), g["fv_loss"], g["fv_grad"])
    aux = compare(_generator(x0, fake, real), g["sf_loss"], g["sf_grad"])
    np.testing.assert_allclose(aux["grad_abs"], g["sf_gradient_norm"], rtol=rtol)
    guided_fake, _ = _scores(g, fake_guidance=_standard_guidance(1.0))
    result = _generator(x0, guided_fake, real)
    compare(result, g["sf_fakecfg1_loss"], g["sf_fakecfg1_grad"])
    for text, floor in (("none", NO_FLOOR), ("0.0001", 1e-4), ("1", 1.0)):
        result = _generator(x0, fake, real, floor)
        fields = [g[f"lightx2v_clip_{text}_{k}"] for k in ("loss", "grad")]
        compare(result, *fields)
    norm_B = np.abs(x0 - real).mean((1, 2, 3, 4))
    added_B = norm_B / (norm_B + 1e-6)
    compare(_generator(x0, fake, real, weight_B=added_B), g["fastgen_loss"], g["fastgen_grad"])
    result = _generator(x0, fake, real, weight_B=added_B * g["fdistill_h"])
    compare(result, g["fdistill_loss"], g["fdistill_grad"])
    result = _generator(x0, fake, real, 1e-5)
    compare(result, np.mean(g["rcm_loss_per_sample"]), g["rcm_grad"] / len(x0), 2 * x0[0].size)
    for i, expected in enumerate(np.atleast_1d(g["rcm_loss_per_sample"])):
        (value, _), _ = _generator(*(a[i : i + 1] for a in (x0, fake, real)), 1e-5)
        np.testing.assert_allclose(value * 2 * x0[0].size, expected, rtol=rtol)


@pytest.mark.parametrize("name", [n for n in GENERATOR if "fv_legacy_w_loss" in _golden(n)])
def test_other_guidance_form_equals_golden_after_conversion(name):
    g = _golden(name)
    w, x0 = float(g["guidance_standard"]), jnp.asarray(g["student_x0"])
    for field, legacy in (("w_minus1", w - 1), ("w", w)):  # the second forgets the conversion
        fake, real = _scores(g, guidance=_standard_guidance(legacy))
        (value, _), grad = _generator(x0, fake, real)
        np.testing.assert_allclose(value, g[f"fv_legacy_{field}_loss"], rtol=2e-5)
        _close_grad(grad, g[f"fv_legacy_{field}_grad"])
        if field == "w_minus1":
            _close(real, g["fv_legacy_real_x0_cfg_w_minus1"])


@pytest.mark.parametrize("floor", [NO_FLOOR, 1e-4])
def test_student_that_equals_its_teacher_gets_no_gradient(floor):
    g = _golden("gen_loss_degenerate_nan_seed206")
    x0 = jnp.asarray(g["student_x0"])
    (value, _), grad = _generator(x0, g["fake_x0"], g["real_x0_cfg"], floor)
    plain = ("fv", "fv_legacy_w_minus1", "fv_legacy_w", "sf", "fastgen", "fdistill",
             "lightx2v_clip_none", "lightx2v_clip_0.0001", "lightx2v_clip_1")  # fmt: skip
    for field in plain:
        np.testing.assert_array_equal(value, g[f"{field}_loss"])
        np.testing.assert_array_equal(grad, g[f"{field}_grad"])
    assert g["sf_gradient_norm"] == 0 and g["rcm_loss_per_sample"] == 0
    np.testing.assert_array_equal(grad, g["rcm_grad"])


def test_floor_keeps_a_zero_normaliser_finite():
    g = _golden("gen_loss_degenerate_inf_seed207")
    x0, fake, real = (jnp.asarray(g[k]) for k in ("student_x0", "fake_x0", "real_x0_cfg"))
    assert np.isinf(g["fv_loss"]) and np.isinf(g["lightx2v_clip_none_loss"])
    for text, floor in (("0.0001", 1e-4), ("1", 1.0)):
        (value, _), grad = _generator(x0, fake, real, floor)
        np.testing.assert_allclose(value, g[f"lightx2v_clip_{text}_loss"], rtol=2e-5)
        _close_grad(grad, g[f"lightx2v_clip_{text}_grad"])
    for name, weight, n in (("fastgen", 1.0, 1), ("fdistill", g["fdistill_h"].item(), 1),
                            ("rcm", 0.1, 2 * x0.size)):  # fmt: skip
        # floors 1e-6 and 1e-5
        (value, _), grad = _generator(x0, fake, real, 1e-6, jnp.full(1, weight))
        loss = g["rcm_loss_per_sample" if name == "rcm" else f"{name}_loss"]
        np.testing.assert_allclose(value * n, loss.item(), rtol=2e-5)
        _close_grad(grad * n, g[f"{name}_grad"])
    (value, _), _ = _generator(x0, fake, real, NO_FLOOR)
    assert np.isinf(value)  # not hidden


@pytest.mark.parametrize("name", _names("critic_loss*"))
def test_critic_loss_and_gradient_equal_golden(name):
    g = _golden(name)
    bf16 = name.endswith("303")  # stored values of this case are bf16
    rtol = 2e-2 if bf16 else 2e-5
    x0, noise, v = (jnp.asarray(g[k]) for k in ("gen_x0", "noise", "v_critic"))
    sigma, t = g["sigma_used"].item(), g["timestep"].item() / 1000
    level = _table_sigma(g["timestep"].item(), float(g["shift"]))
    np.testing.assert_allclose(level, sigma, rtol=0, atol=2e-6)
    close = _close_bf16 if bf16 else _close
    close(flow.add_noise(x0, noise, sigma), g["noisy"])
    close(flow.add_noise(x0, noise, t), g["fastgen_noisy"])

    def through_x0(v):
        x_t = flow.add_noise(x0, noise, sigma)
        x0_pred = flow.x0_from_velocity(x_t, v, sigma)
        return dmd2.critic_loss(_velocity_from_x0(x_t, x0_pred, sigma), x0, noise)[0]

    plain = lambda v: dmd2.critic_loss(v, x0, noise)[0]
    x0_space = lambda v: flow.flow_loss(v, x0, noise, jnp.full(len(v), t**2))[0]
    for loss, field in (
        (plain, "fv"), (through_x0, "sf"), (plain, "fastgen_flow"), (x0_space, "fastgen_x0space"),
    ):  # fmt: skip
        value, grad = jax.value_and_grad(loss)(v)
        np.testing.assert_allclose(value, g[f"{field}_loss"], rtol=rtol)
        _close_grad(grad, g[f"{field}_grad_v"], rtol)


def _toy(p, x, t, c):
    """Network of the golden files: W·x over channels + b·t/1000 + tanh(U·c), x [B, F, C, H, W]."""
    wx = jnp.einsum("dc,bfchw->bfdhw", p["W"], x)
    shift = p["b"][None] * t / 1000 + jnp.tanh(c @ p["U"].T)
    return wx + shift[:, None, :, None, None]


@pytest.mark.parametrize("name", _names("dmd2_step*"))
def test_whole_training_step_equals_golden(name):
    g = _golden(name)
    shift, steps = float(g["shift"]), g["raw_steps"]
    nets = {
        r: {k: jnp.asarray(g[f"{r}_{k}"]) for k in "WbU"} for r in ("student", "teacher", "critic")
    }
    cond, uncond, data = (jnp.asarray(g[k]) for k in ("cond", "uncond", "data_latents"))
    noises = iter([jnp.asarray(g[f"randn_{i}"]) for i in range(int(g["n_randn"]))])
    integers = iter([int(g[f"randint_{i}"][0]) for i in range(int(g["n_randint"]))])
    times = _warp(steps, shift) if g["warp"] else np.asarray(steps, np.float64)
    np.testing.assert_allclose(times, g["step_list"], rtol=0, atol=2e-3)
    lo, hi = (float(t) for t in g["min_max_timestep"])
    simulate = str(g["mode"]) == "simulate"
    level = lambda t: float(_table_sigma(float(t), shift))

    def draws():
        """(exit step, noises of the rollout) of one student pass."""
        last = next(integers)
        return last, [next(noises) for _ in range(len(times) if simulate else 1)]

    def rollout(student, last, eps):
        if not simulate:
            x = flow.add_noise(data, eps[0], level(times[last]))
        else:
            x = eps[0]
            for i in range(last):
                v = jax.lax.stop_gradient(_toy(student, x, times[i], cond))
                x = _renoise(x, v, level(times[i]), level(times[i + 1]), eps[i + 1])
        return flow.x0_from_velocity(x, _toy(student, x, times[last], cond), level(times[last]))

    def score_time():
        return float(dmd2.score_timesteps(next(integers), shift, t_lo=lo, t_hi=hi))

    last, eps = draws()
    t, noise = score_time(), next(noises)

    def generator(student):
        x0 = rollout(student, last, eps)
        s = level(t)
        x_t = flow.add_noise(x0, noise, s)
        pred = lambda role, c: flow.x0_from_velocity(x_t, _toy(nets[role], x_t, t, c), s)
        real = _guided(pred("teacher", cond), pred("teacher", uncond), g["guidance_standard"])
        whole = (a[None] for a in (x0, pred("critic", cond), real))  # one normaliser a batch
        return dmd2.generator_loss(*whole, floor=1e-6)[0]

    value, grad = jax.jit(jax.value_and_grad(generator))(nets["student"])
    _close(value, g["generator_loss"])
    for k in "WbU":
        _close(grad[k], g[f"student_grad_{k}"])

    last, eps = draws()
    x0 = rollout(nets["student"], last, eps)
    t, noise = score_time(), next(noises)
    _close(x0, g["critic_pass_student_x0"])
    np.testing.assert_allclose(t, g["fake_score_timestep"][0], rtol=0, atol=2e-3)
    x_t = flow.add_noise(x0, noise, level(t))
    critic = lambda p: dmd2.critic_loss(_toy(p, x_t, t, cond), x0, noise)[0]
    value, grad = jax.jit(jax.value_and_grad(critic))(nets["critic"])
    _close(value, g["fake_score_loss"])
    for k in "WbU":
        _close(grad[k], g[f"critic_grad_{k}"])
    assert next(noises, None) is None and next(integers, None) is None


@pytest.mark.parametrize("name", _names("fewstep_rollout*"))
def test_few_step_samplers_equal_golden(name):
    g = _golden(name)
    p = {k: jnp.asarray(g[k]) for k in "WbU"}
    levels = [float(t) for t in g["t_list"]]
    velocity = lambda x, s: _toy(p, x, 1000 * s, jnp.asarray(g["cond"]))
    start = jnp.asarray(g["latents0"])
    _close(start, levels[0] * g["noise"])
    ode = sde = start
    for i, (s, s_next) in enumerate(zip(levels[:-1], levels[1:], strict=True)):
        ode = flow.euler(ode, velocity(ode, s), s, s_next)
        noise = g[f"sde_noise_{i}"] if s_next else jnp.zeros_like(sde)
        sde = _renoise(sde, velocity(sde, s), s, s_next, noise)
    _close(ode, g["x_ode"])
    _close(sde, g["x_sde"])


@pytest.mark.parametrize("name", _names("phased*"))
def test_phased_targets_and_guidance_equal_golden(name):
    g = _golden(name)
    shift = float(g["shift"])
    sigma_s = _table_sigma(_warp([int(g["match_timestep"])], shift), shift)
    _close(sigma_s, g["sigma_s"][:1])
    _close(_warp([int(g["match_timestep"])], shift) / 1000, g["sigma_s"][:1])
    raw = dmd2.score_timesteps(g["raw_score_t"], shift, t_lo=0.0, t_hi=1000.0)
    _close(raw / 1000, g["sigma_t"])
    s_t, s_s = jnp.asarray(g["sigma_t"]), jnp.asarray(g["sigma_s"])
    x_s, noise, v, u = (jnp.asarray(g[k]) for k in ("x_s", "noise", "velocity", "v_uncond"))
    x_t, target = dmd2.phased_noise(x_s, noise, s_t, s_s)
    _close(x_t, g["x_t"])
    # two terms up to 64 cancel in places: the tolerance follows their size, not the result's
    terms = np.abs(x_s) / (1 - g["sigma_s"].max()) + np.abs(g["v_target"])
    assert np.all(np.abs(target - g["v_target"]) <= 2e-6 + 1e-6 * terms)
    # α and β, read off from clips of ones and zeros
    one, zero = jnp.ones((2, 1)), jnp.zeros((2, 1))
    _close(dmd2.phased_noise(one, zero, s_t, s_s)[0][:, 0], g["alpha"])
    _close(dmd2.phased_noise(zero, one, s_t, s_s)[0][:, 0], g["beta"])
    x_t, target = dmd2.phased_noise(x_s, noise, s_t, 0.0)
    _close(x_t, g["x_t_s0"])
    _close(target, g["v_target_s0"])
    _close(flow.euler(x_s, v, s_t, s_s), g["euler_t_to_s"])  # the golden clip starts from x_s
    _close(flow.euler(x_s, v, s_t, 0.0), g["euler_t_to_0"])
    _close(_guided(v, u, 4.0), g["cfg4_none"])
    levels = (_table_sigma(g[k], shift) for k in ("fv_high_t", "fv_high_boundary"))
    s_t, s_s = levels
    x_t, _ = dmd2.phased_noise(g["fv_high_x"], g["fv_high_noise"], s_t, s_s[0])
    _close(x_t, g["fv_high_xt"])


def test_gan_losses_and_gradients_equal_golden():
    g = _golden("gan_seed700")
    fake, real = jnp.asarray(g["fake_logits"]), jnp.asarray(g["real_logits"])
    value, grad = jax.value_and_grad(lambda f: dmd2.gan_generator_loss(f)[0])(fake)
    _close(value, g["gen_loss"])
    _close(grad, g["gen_grad_fake"])
    loss = lambda *logits: dmd2.gan_critic_loss(*logits)
    (value, aux), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(fake, real)
    _close(value, g["disc_loss"])
    _close(grads[0], g["disc_grad_fake"])
    _close(grads[1], g["disc_grad_real"])
    _close(aux["accuracy"], np.mean([g["fake_logits"] < 0, g["real_logits"] > 0]))


def test_update_cadence_equals_golden():
    g = _golden("cadence")
    for i, step in enumerate(g["iteration"].tolist()):
        student = dmd2.turns(step, 5)
        assert (student, True) == (g["fv_new_student_update"][i], g["fv_new_critic_update"][i])
        assert student == g["fastgen_student_update"][i]


@pytest.mark.parametrize("name", _names("ema*"))
def test_student_average_equals_golden(name):
    g = _golden(name)
    start, decay = int(g["start_iter"]), float(g["decay"])
    shadow = {"w": jnp.asarray(g["params_per_iter"][0])}
    for i, live in enumerate(g["params_per_iter"]):
        live = {"w": jnp.asarray(live)}
        shadow = trees.lerp(live, shadow, dmd2.student_ema_decay(i + 1, decay, start))
        golden = g["shadow_per_iter"][i]
        if i + 1 <= start:  # golden holds NaN before the start; here it is the student itself
            np.testing.assert_array_equal(shadow["w"], live["w"])
            if i + 1 == start:
                _close(shadow["w"], golden)
            else:
                assert np.all(np.isnan(golden))
        else:
            _close(shadow["w"], golden)


def test_hand_computed_losses():
    # n = |4 − 2| = 2, g = (3 − 2)/2 = ½, loss = ½·¼; with weight 2: g = 1, loss = ½
    full = lambda value: jnp.full((1, 2), float(value))
    loss, aux = dmd2.generator_loss(full(4), full(3), full(2), floor=1e-4)
    assert loss == 0.125 and aux["grad_abs"] == 0.5 and aux["norm"] == 2
    loss, _ = dmd2.generator_loss(full(4), full(3), full(2), floor=1e-4, weight_B=jnp.full(1, 2.0))
    assert loss == 0.5
    loss, _ = dmd2.generator_loss(full(4), full(3), full(2), floor=8.0)
    assert loss == 0.5 * 0.125**2
    assert dmd2.critic_loss(full(5), full(1), full(3))[0] == 9
    # σ_s = ½, σ_t = ¾: α = ½, β = √(9/16 − 1/16) = 1/√2; v* = −2·x_s + (¾ + ¼)·√2·ε
    x_t, target = dmd2.phased_noise(full(2), full(1), 0.75, 0.5)
    np.testing.assert_allclose(x_t, full(1 + 0.5**0.5), rtol=1e-6)
    np.testing.assert_allclose(target, full(2**0.5 - 4), rtol=1e-6)
    assert dmd2.phased_critic_loss(full(3), full(1))[0] == 4
    np.testing.assert_allclose(dmd2.gan_generator_loss(jnp.zeros((2, 3)))[0], np.log(2), rtol=1e-6)
    assert dmd2.gan_penalty(full(3), full(1)) == 4


def test_generator_loss_equals_a_numpy_oracle_and_its_gradient_is_g_over_n(rng):
    x0, fake, real = rng.normal(size=(3, 4, 2, 3, 5)).astype(np.float32)
    weight_B = rng.uniform(size=4).astype(np.float32)
    g = []
    for i in range(4):
        norm = max(np.mean(np.abs(x0[i].astype(float) - real[i])), 1.2)
        g.append(weight_B[i] * (fake[i].astype(float) - real[i]) / norm)
    (value, _), grad = _generator(x0, fake, real, 1.2, weight_B)
    np.testing.assert_allclose(value, 0.5 * np.mean(np.square(g)), rtol=1e-6)
    np.testing.assert_allclose(grad, np.array(g) / x0.size, rtol=1e-5, atol=1e-9)


def test_only_the_student_gets_a_gradient(rng):
    x0, fake, real = rng.normal(size=(3, 2, 6)).astype(np.float32)
    loss = lambda *a: dmd2.generator_loss(*a[:3], floor=1e-4, weight_B=a[3])[0]
    grads = jax.grad(loss, argnums=range(4))(x0, fake, real, jnp.ones(2))
    assert np.all(grads[0] != 0)
    for grad in grads[1:]:
        assert np.all(grad == 0)
    critic = lambda *a: dmd2.critic_loss(*a)[0]
    v, clip, noise = jax.grad(critic, argnums=range(3))(x0, fake, real)
    assert np.all(v != 0) and np.all(clip == 0) and np.all(noise == 0)


def test_equal_scores_give_no_gradient(rng):
    x0, score = rng.normal(size=(2, 2, 6)).astype(np.float32)
    (value, _), grad = _generator(x0, score, score, 1e-4)
    assert value == 0 and np.all(grad == 0)


def test_normaliser_is_per_sample_so_samples_do_not_affect_each_other(rng):
    x0, fake, real = rng.normal(size=(3, 3, 6)).astype(np.float32)
    _, whole = _generator(x0, fake, real, 1e-4)
    _, other = _generator(x0.copy(), fake, real + np.array([[0.0], [0.0], [9.0]], np.float32), 1e-4)
    np.testing.assert_array_equal(whole[:2], other[:2])
    parts = [_generator(*(a[s] for a in (x0, fake, real)), 1e-4) for s in (slice(1), slice(1, 3))]
    value, _ = _generator(x0, fake, real, 1e-4)
    np.testing.assert_allclose(parts[0][0][0] / 3 + parts[1][0][0] * 2 / 3, value[0], rtol=1e-6)


def test_phased_critic_learns_the_velocity_of_plain_flow_matching(rng):
    """A critic that regresses the phased target at x_t learns the same function as one that noises
    x0 directly and regresses ε − x0: for Gaussian clips both fits are the same line."""
    n, s_s, s_t = 400_000, 0.6, 0.8
    x0 = 0.7 * rng.normal(size=n) + 0.3
    x_s = (1 - s_s) * x0 + s_s * rng.normal(size=n)
    with jax.enable_x64(True):
        x_t, target = dmd2.phased_noise(x_s[:, None], rng.normal(size=(n, 1)), s_t, s_s)
    x_t, target = np.asarray(x_t)[:, 0], np.asarray(target)[:, 0]
    ours = np.polyfit(x_t, target, 1)
    noise = rng.normal(size=n)
    plain = np.polyfit((1 - s_t) * x0 + s_t * noise, noise - x0, 1)
    np.testing.assert_allclose(ours, plain, atol=0.02)


def test_f_weights_are_r_squared_times_the_second_derivative_of_the_generator():
    log = jnp.log
    generators = {
        "rkl": lambda r: -log(r),
        "kl": lambda r: r * log(r),
        "js": lambda r: r * log(r) - (r + 1) * log((r + 1) / 2),
        "jeffreys": lambda r: (r - 1) * log(r),
        "hellinger": lambda r: 1 - jnp.sqrt(r),
    }
    assert set(generators) == set(dmd2.F_WEIGHTS)
    r = jnp.array([0.1, 0.5, 1.0, 3.0])
    for kind, f in generators.items():
        expected = r**2 * jax.vmap(jax.grad(jax.grad(f)))(r)
        np.testing.assert_allclose(dmd2.f_weight(kind, r), expected, rtol=1e-5)


def test_density_ratios_are_normalised_in_their_timestep_bin():
    logit = jnp.log(jnp.array([[2.0], [4.0], [9.0], [1e9]]))
    t_B = jnp.array([10.0, 20.0, 990.0, 1000.0])
    ratio_B, found = dmd2.density_ratio(logit, t_B, jnp.ones(3))
    np.testing.assert_allclose(ratio_B, [2, 4, 9, np.exp(5)], rtol=1e-5)
    mean_N = dmd2.ratio_mean(jnp.ones(3), *found, 0.5)
    last = 0.5 + 0.5 * (9 + np.exp(5)) / 2
    np.testing.assert_allclose(mean_N, [2, 1, last], rtol=1e-5)  # 0.5·1 + 0.5·3 = 2
    ratio_B, _ = dmd2.density_ratio(logit, t_B, mean_N)
    np.testing.assert_allclose(ratio_B, [1, 2, 9 / last, np.exp(5) / last], rtol=1e-5)


def test_warp_puts_raw_500_on_the_boundaries_of_the_14b_models():
    assert _warp([1000, 500], 7.0).tolist() == [1000, 875]
    assert _warp([1000, 500], 9.0).tolist() == [1000, 900]


def test_ode_step_keeps_the_noise_and_sde_step_replaces_it(rng):
    x0, eps, fresh = rng.normal(size=(3, 2, 8)).astype(np.float32)
    x, v = flow.add_noise(x0, eps, 0.9), eps - x0
    np.testing.assert_allclose(flow.euler(x, v, 0.9, 0.4), flow.add_noise(x0, eps, 0.4), atol=1e-6)
    np.testing.assert_allclose(
        _renoise(x, v, 0.9, 0.4, fresh), flow.add_noise(x0, fresh, 0.4), atol=1e-6
    )


def test_warm_start_by_hand_by_oracle_and_by_its_gradient(rng):
    one = lambda value: jnp.full((1, 2), value)
    # from 2 at σ 0.9 along 1 to σ 0.4: 1.5, one off 0.5
    np.testing.assert_allclose(dmd2.ode_pair_loss(one(2.0), one(1.0), one(0.5), 0.9, 0.4), 1.0)
    x, v, end = rng.normal(size=(3, 2, 4, 3)).astype(np.float32)
    step = np.float64(x) - 0.5 * np.float64(v)
    for first in (0, 1):
        loss = lambda v, first=first: dmd2.ode_pair_loss(x, v, end, 0.9, 0.4, first=first)
        error = (step - end)[:, first:]
        np.testing.assert_allclose(loss(v), (error**2).mean(), rtol=1e-6)
        gradient = jax.grad(loss)(v)
        want = np.zeros(v.shape)
        want[:, first:] = -0.5 * 2 * error / error.size
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-7)
    assert dmd2.ode_pair_loss(x, v, jnp.asarray(x - 0.5 * v), 0.9, 0.4) < 1e-12


def test_gan_losses_by_hand_by_oracle_and_by_their_gradients(rng):
    fake, real = rng.normal(size=(2, 3, 5)).astype(np.float32)
    soft = lambda x: np.log1p(np.exp(np.float64(x)))
    zero = jnp.zeros((1, 2))
    np.testing.assert_allclose(dmd2.gan_generator_loss(zero)[0], np.log(2), rtol=1e-6)
    np.testing.assert_allclose(dmd2.gan_critic_loss(zero, zero)[0], 2 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(dmd2.gan_generator_loss(fake)[0], soft(-fake).mean(), rtol=1e-6)
    value = lambda fake, real: dmd2.gan_critic_loss(fake, real)[0]
    np.testing.assert_allclose(value(fake, real), soft(fake).mean() + soft(-real).mean(), rtol=1e-6)
    sigmoid = lambda x: 1 / (1 + np.exp(-np.float64(x)))
    d_fake, d_real = jax.grad(value, (0, 1))(fake, real)
    np.testing.assert_allclose(d_fake, sigmoid(fake) / fake.size, rtol=1e-5)
    np.testing.assert_allclose(d_real, -sigmoid(-real) / real.size, rtol=1e-5)
    student = jax.grad(lambda fake: dmd2.gan_generator_loss(fake)[0])(fake)
    np.testing.assert_allclose(student, -sigmoid(-fake) / fake.size, rtol=1e-5)
    change = np.float64(real) - fake  # as if clips and shaken clips had these logits
    np.testing.assert_allclose(dmd2.gan_penalty(real, fake), (change**2).mean(), rtol=1e-6)
    pair = jax.grad(dmd2.gan_penalty, (0, 1))(real, fake)
    np.testing.assert_allclose(pair, [2 * change / real.size, -2 * change / real.size], rtol=1e-5)


def test_wrong_arguments_are_errors():
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="shapes differ"):
        dmd2.ode_pair_loss(x, x, x[:1], 0.9, 0.4)
    with pytest.raises(ValueError, match="shapes differ"):
        dmd2.generator_loss(x, x, x[:, :1], floor=1e-4)
    with pytest.raises(ValueError, match="dmd2.floor is -0.0001"):
        dmd2.generator_loss(x, x, x, floor=-1e-4)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\); expected \[2\]"):
        dmd2.generator_loss(x, x, x, floor=1e-4, weight_B=jnp.ones(3))
    for call in (dmd2.critic_loss, dmd2.phased_critic_loss, dmd2.gan_critic_loss, dmd2.gan_penalty):
        args = (x, x[:1], x) if call is dmd2.critic_loss else (x, x[:1])
        with pytest.raises(ValueError, match="shapes differ"):
            call(*args)
    with pytest.raises(ValueError, match="shapes differ"):
        dmd2.phased_noise(x, x[:1], 0.9, 0.5)
    with pytest.raises(ValueError, match=r"t has shape \(3,\)"):
        dmd2.density_ratio(x, jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="dmd2.divergence is 'tv'"):
        dmd2.f_weight("tv", jnp.ones(2))
    with pytest.raises(ValueError, match="dmd2.student_every is 0"):
        dmd2.turns(1, 0)
