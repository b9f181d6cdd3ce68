"""Denoising transitions, solvers and the two-phase jitted rollout. Receives the model as functions.

x_t = (1 − σ)·x0 + σ·ε, v = ε − x0, h = σ_i − σ_{i+1} > 0. A stochastic transition is Gaussian:
  ode     mean = x − h·v, std = 0, log-prob defined as 0
  flow    g = eta·√(σ/(1 − σ*)), σ* = σ_1 where σ ≈ 1        Flow-GRPO (2505.05470)
  dance   g = eta                                            DanceGRPO (2505.07818)
  linear  g = σ_1·σ (no eta)                                 Flow-GRPO's Wan2.1 script
      mean = x·(1 − g²h/(2σ)) − v·(1 + g²(1 − σ)/(2σ))·h, std = g·√h
      log-prob = mean over elements of log N(x'; mean, std²)
  cps     std = σ'·sin(eta·π/2)                              Flow-CPS (2509.05952)
      mean = (1 − σ')·x0 + σ'·cos(eta·π/2)·x1 with x0 = x − σv, x1 = x + (1 − σ)v
      log-prob = −mean (x' − mean)²: all its users leave out the constants and 1/(2·std²)
Log-probs are float32 means, not sums, over all latent elements (float64 when the inputs are).

Solvers are one linear recurrence with coefficients made on the host in float64:
  x̂_i = c0·x_i + c1·x̂_{i−1} + c2·m_i + c3·m_{i−1} + c4·m_{i−2}
  x_{i+1} = c5·x̂_i + c6·m_i + c7·m_{i−1},   m_i = x_i − σ_i·v_i
The first line is UniPC's corrector (2302.04867) and the identity for the other solvers.

Dimensions: B batch, then latent axes of any number  I sampler steps  W stored transitions.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

STOCHASTIC = ("flow", "dance", "cps", "linear")
KINDS = ("ode", *STOCHASTIC)
GUIDANCE_MODES = ("batch", "sequential")

# 1 − σ below this counts as σ = 1, where `flow` has its singularity: covers diffusers UniPC
# (1e-6) and Wan UniPC (3e-4 at shift 3), but not the integer timestep 999. An exact comparison
# would miss both grids.
SIGMA_ONE = 9e-4

# ½·log 2π rounded to float32, as every reference has it; it cancels in ratios.
HALF_LOG_2PI = float(np.float32(0.5 * math.log(2 * math.pi)))

# Predictor order, and whether UniPC's corrector runs. DiffusionNFT's dpm2 is DPM++ 2M.
SOLVERS = {"euler": (1, False), "dpmpp_2m": (2, False), "dpm2": (2, False), "unipc": (2, True)}


@struct.dataclass
class Trajectory:
    """Stored SDE transitions: x, x_next [W, B, ...], logp [W, B], mean [W, B, ...] or None."""

    x: jax.Array
    x_next: jax.Array
    logp: jax.Array
    mean: jax.Array | None = None


def sde_step(x, v, sigma, sigma_next, *, kind, eta, noise, sigma_max):
    """Take one transition; returns (x_next, mean, std_B, logp_B).

    x, v, noise [B, ...]; sigma, sigma_next scalar or [B]; sigma_max is σ_1 of the schedule (the
    stand-in for σ = 1 in `flow`, the slope of `linear`). noise may be None for "ode". eta in [0,
    1] for "cps".
    """
    x, v = _match(x, v)
    mean, std_B = _transition(x, v, sigma, sigma_next, kind, eta, sigma_max)
    x_next = mean if kind == "ode" else mean + _expand(std_B, x) * noise.astype(x.dtype)
    return x_next, mean, std_B, _log_prob(x_next, mean, std_B, kind)


def sde_logp(x, x_next, v, sigma, sigma_next, *, kind, eta, sigma_max):
    """Score a stored transition under velocity v; returns (logp_B, mean, std_B).

    x_next is data: it receives no gradient.
    """
    x, v = _match(x, v)
    x, x_next = _match(x, x_next)
    mean, std_B = _transition(x, v, sigma, sigma_next, kind, eta, sigma_max)
    return _log_prob(x_next, mean, std_B, kind), mean, std_B


def initial_noise(key, sample_ids, shape):
    """Standard normal [B, *shape] float32, a function of (key, sample id) only."""
    return _noise(key, sample_ids, 0, shape)


def sample(denoise, x, schedule, *, solver="euler"):
    """Integrate the ODE over the schedule; returns x0 in float32. Arguments as in `rollout`."""
    return _run(denoise, x, schedule, np.full(schedule.steps, -1), solver, None, 0, False)[0]


def few_step(denoise, x, key, sample_ids, schedule, *, renoise, start=0, stop=None):
    """Take steps start … stop − 1 of a few-step sampler (all by default); returns x in float32.

    Every step predicts x0 = x − σ·v and goes to the next level with the noise that x and x0 imply,
    which is Euler's step, or with fresh noise (renoise). Arguments as in `rollout`; an expert may
    be missing when stop comes before its steps. start and stop may be traced: one program serves
    every exit step. Not differentiable.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    stop = schedule.steps if stop is None else stop
    sigma_I = jnp.asarray(schedule.sigmas, x.dtype)
    t_I = jnp.asarray(schedule.timesteps, jnp.float32)

    def step(i, x, velocity):
        v = velocity(x, jnp.full(x.shape[:1], t_I[i])).astype(x.dtype)
        if not renoise:
            return x + (sigma_I[i + 1] - sigma_I[i]) * v
        noise = _noise(key, sample_ids, i + 1, x.shape[1:]).astype(x.dtype)
        return (1 - sigma_I[i + 1]) * (x - sigma_I[i] * v) + sigma_I[i + 1] * noise

    for name, lo, hi in _phases(schedule):
        if name in denoise:
            first, last = (jnp.clip(edge, lo, hi) for edge in (start, stop))
            x = jax.lax.fori_loop(first, last, lambda i, x, run=denoise[name]: step(i, x, run), x)
    return x


def rollout(
    denoise, x, key, sample_ids, schedule, slot_I, *, slots, kind, eta, solver, keep_mean=False
):
    """Sample with SDE transitions at chosen steps; returns (x0, Trajectory).

    denoise: {"high": fn, "low": fn}, fn(x [B, ...], t_B) -> v with guidance applied, t in 0..1000;
      each expert's steps form one scan (static split), an expert without steps may be missing.
    x: [B, ...] noise at σ_0; sample_ids: int [B]. The noise added at a step is a function of
      (key, sample id, step) only, so nothing depends on how the batch is split.
    slot_I: int32 [I] (schedule.slot_table), where the transition of a step is stored, −1 for a
      step of the ODE solver. It is data: another window of the same size does not recompile.
    slots: number W of stored transitions (static). keep_mean also stores the transition means.
    eta: Python number, > 0 (ignored by "linear"), and ≤ 1 for "cps".
    """
    check_kernel(kind, eta)
    if slots < 1:
        raise ValueError(
            f"rollout has {slots} SDE steps; set sde.window to at least 1 or use sample()"
        )

    static = dict(kind=kind, eta=eta, sigma_max=schedule.sigmas[1])

    def transition(x, v, step):
        noise = _noise(key, sample_ids, step["index"] + 1, x.shape[1:])
        return sde_step(x, v, step["sigma"], step["sigma_next"], noise=noise, **static)

    return _run(denoise, x, schedule, slot_I, solver, transition, slots, keep_mean)


def check_kernel(kind: str, eta: float) -> None:
    """Raise ValueError for a kernel that is not stochastic, or an eta out of its range."""
    if kind not in STOCHASTIC:
        raise ValueError(f"sde.kind is {kind!r}; training needs one of {', '.join(STOCHASTIC)}")
    if kind != "linear" and not (eta > 0 and (kind != "cps" or eta <= 1)):
        limit = "in (0, 1]" if kind == "cps" else "above 0"
        raise ValueError(f"sde.eta is {eta} for sde.kind {kind!r}; expected a number {limit}")


def cfg(denoise, guidance: float, cond, uncond, *, mode: str = "batch"):
    """Classifier-free guidance u + w·(c − u) as a function (x, t_B) -> v.

    denoise(x, t_B, cond) -> v, where cond and uncond are pytrees of arrays [B, ...] of equal
    shapes. mode "batch" runs both in one call of 2B, "sequential" in two. guidance == 1 runs the
    condition only.
    """
    if mode not in GUIDANCE_MODES:
        raise ValueError(f"guidance.mode is {mode!r}; expected one of {GUIDANCE_MODES}")
    if guidance == 1:
        return lambda x, t_B: denoise(x, t_B, cond)

    def interleave(c, u):  # both halves of a sample stay on the devices that hold the sample
        return jnp.stack([c, u], 1).reshape(-1, *c.shape[1:])

    def guided(x, t_B):
        if mode == "sequential":
            c, u = denoise(x, t_B, cond), denoise(x, t_B, uncond)
        else:
            pair = jax.tree.map(interleave, cond, uncond)
            v = denoise(jnp.repeat(x, 2, axis=0), jnp.repeat(t_B, 2, axis=0), pair)
            c, u = v[0::2], v[1::2]
        c, u = c.astype(jnp.float32), u.astype(jnp.float32)
        return u + guidance * (c - u)

    return guided


def solver_coefficients(sigmas, solver: str) -> np.ndarray:
    """Coefficients [I, 8] of the recurrence in the file docstring, float64.

    sigmas [I+1] are first rounded to float32, the levels that the compiled loop uses: log((1 −
    σ)/σ) at σ = 0.999999 would otherwise belong to a different level from the one applied.
    """
    if solver not in SOLVERS:
        raise ValueError(f"sampling.solver is {solver!r}; expected one of {', '.join(SOLVERS)}")
    order, corrector = SOLVERS[solver]
    s = np.asarray(sigmas, np.float32).astype(np.float64)
    steps = len(s) - 1
    orders = [min(order, i + 1, steps - i) for i in range(steps)]
    table = np.zeros((steps, 8))
    table[:, 0] = 1
    for i in range(steps):
        table[i, 5:] = _predictor(s, i, orders[i])
        if corrector and i > 0:
            table[i, :5] = _corrector(s, i, orders[i - 1])
    return table


def _match(x, v):
    """Convert both arrays to one floating dtype of at least float32; their shapes must agree."""
    if x.shape != v.shape:
        raise ValueError(
            f"latents have shape {x.shape} but {v.shape} was given with them; expected equal shapes"
        )
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, v.dtype), jnp.float32)
    return x.astype(dtype), v.astype(dtype)


def _expand(a_B, x):
    """Reshape [B] to broadcast against [B, ...]."""
    return a_B.reshape(a_B.shape + (1,) * (x.ndim - 1))


def _per_sample(sigma, x):
    """Broadcast a level to [B] in the dtype of x."""
    sigma = jnp.asarray(sigma, x.dtype)
    if sigma.shape not in ((), x.shape[:1]):
        raise ValueError(
            f"sigma has shape {sigma.shape}; expected a scalar or [{x.shape[0]}] like the batch"
        )
    return jnp.broadcast_to(sigma, x.shape[:1])


def _transition(x, v, sigma, sigma_next, kind, eta, sigma_max):
    """Mean [B, ...] and std [B] of a transition."""
    if kind not in KINDS:
        raise ValueError(f"sde.kind is {kind!r}; expected one of {', '.join(KINDS)}")
    s_B, next_B = _per_sample(sigma, x), _per_sample(sigma_next, x)
    h_B = s_B - next_B
    if kind == "ode":
        return x - _expand(h_B, x) * v, jnp.zeros_like(s_B)
    if kind == "cps":
        angle = jnp.asarray(eta, x.dtype) * (math.pi / 2)
        x0, x1 = x - _expand(s_B, x) * v, x + _expand(1 - s_B, x) * v
        mean = _expand(1 - next_B, x) * x0 + _expand(next_B * jnp.cos(angle), x) * x1
        return mean, next_B * jnp.sin(angle)
    if kind == "flow":
        guarded_B = jnp.where(1 - s_B < SIGMA_ONE, jnp.asarray(sigma_max, x.dtype), s_B)
        g_B = jnp.asarray(eta, x.dtype) * jnp.sqrt(s_B / (1 - guarded_B))
    elif kind == "dance":
        g_B = jnp.broadcast_to(jnp.asarray(eta, x.dtype), s_B.shape)
    else:
        g_B = jnp.asarray(sigma_max, x.dtype) * s_B
    drift_B = g_B**2 / (2 * s_B)
    mean = x * _expand(1 - drift_B * h_B, x) - v * _expand((1 + drift_B * (1 - s_B)) * h_B, x)
    return mean, g_B * jnp.sqrt(h_B)


def _log_prob(x_next, mean, std_B, kind):
    """Mean log-density per element [B]; see the file docstring for cps and ode."""
    if kind == "ode":
        return jnp.zeros_like(std_B)
    square_B = ((jax.lax.stop_gradient(x_next) - mean) ** 2).mean(tuple(range(1, mean.ndim)))
    if kind == "cps":
        return -square_B
    return -square_B / (2 * std_B**2) - jnp.log(std_B) - HALF_LOG_2PI


def _noise(key, sample_ids, index, shape):
    """Standard normal [B, *shape] float32; index: 0 for the initial noise, else step + 1."""

    def one(sample_id):
        own = jax.random.fold_in(jax.random.fold_in(key, sample_id), index)
        return jax.random.normal(own, shape, jnp.float32)

    return jax.vmap(one)(jnp.asarray(sample_ids))


def _run(denoise, x, schedule, slot_I, solver, transition, slots, keep_mean):
    """Scan each expert's steps. transition None (slots 0) is the pure ODE."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    slot_I = jnp.asarray(slot_I)
    if slot_I.shape != (schedule.steps,):
        raise ValueError(
            f"slot_I has shape {slot_I.shape}; expected [{schedule.steps}], one entry per step"
        )
    steps = {
        "index": jnp.arange(schedule.steps),
        "sigma": jnp.asarray(schedule.sigmas[:-1], x.dtype),
        "sigma_next": jnp.asarray(schedule.sigmas[1:], x.dtype),
        "t": jnp.asarray(schedule.timesteps, jnp.float32),
        "coef": jnp.asarray(solver_coefficients(schedule.sigmas, solver), x.dtype),
        "slot": slot_I,
        "after_sde": jnp.roll(slot_I, 1).at[0].set(-1) >= 0,
    }
    stack = jnp.zeros((slots, *x.shape), x.dtype)
    logp_WB = jnp.zeros((slots, x.shape[0]), x.dtype)
    store = Trajectory(stack, stack, logp_WB, stack if keep_mean else None)
    carry = (x, x, jnp.zeros_like(x), jnp.zeros_like(x), store)
    for name, lo, hi in _phases(schedule):
        if name not in denoise:
            raise ValueError(
                f"steps {lo}..{hi - 1} need expert {name!r}; got only {sorted(denoise)}"
            )
        body = _step_function(denoise[name], transition)
        carry, _ = jax.lax.scan(body, carry, jax.tree.map(lambda a, i=lo, j=hi: a[i:j], steps))
    return carry[0], carry[-1]


def _phases(schedule):
    """(expert, first step, end) of each expert that has steps; high comes first."""
    split, steps = schedule.high_steps, schedule.steps
    return [p for p in (("high", 0, split), ("low", split, steps)) if p[1] < p[2]]


def _step_function(velocity, transition):
    """One scan step: solver update, replaced by a stored transition where the step has a slot."""

    def body(carry, step):
        x, last, m1, m2, store = carry
        c = step["coef"]
        v = velocity(x, jnp.full(x.shape[:1], step["t"])).astype(x.dtype)
        m0 = x - step["sigma"] * v
        fixed = c[0] * x + c[1] * last + c[2] * m0 + c[3] * m1 + c[4] * m2
        if transition is None:
            return (c[5] * fixed + c[6] * m0 + c[7] * m1, fixed, m0, m1, store), None
        is_sde = step["slot"] >= 0
        # the corrector would redo the previous step without its noise
        fixed = jnp.where(is_sde | step["after_sde"], x, fixed)
        x_sde, mean, _, logp_B = transition(x, v, step)
        entry = Trajectory(x, x_sde, logp_B, None if store.mean is None else mean)
        store = jax.tree.map(lambda all_W, one: _write(all_W, one, step["slot"]), store, entry)
        x_next = jnp.where(is_sde, x_sde, c[5] * fixed + c[6] * m0 + c[7] * m1)
        return (x_next, fixed, m0, m1, store), None

    return body


def _write(all_W, one, slot):
    """Write one entry at a slot; slot −1 writes nothing."""
    at = jnp.maximum(slot, 0)
    kept = jax.lax.dynamic_index_in_dim(all_W, at, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(all_W, jnp.where(slot >= 0, one, kept), at, 0)


def _log_snr(s):
    """λ = log((1 − σ)/σ): −inf at σ = 1, +inf at σ = 0."""
    with np.errstate(divide="ignore"):
        return np.log(1 - s) - np.log(s)


def _predictor(s, i, order):
    """(x, m_i, m_{i−1}) weights of a DPM++ 2M / UniP step from s[i] to s[i+1]; order 1 is Euler."""
    ratio = s[i + 1] / s[i]
    if order == 1:
        return ratio, 1 - ratio, 0.0
    extra = -_slope(s, i) * 0.5 * (1 - ratio)  # half the change of m per step, extrapolated
    return ratio, 1 - ratio + extra, -extra


def _corrector(s, i, order):
    """(x_i, x̂_{i−1}, m_i, m_{i−1}, m_{i−2}) weights of UniC (B(h) = e^h − 1) at step i."""
    ratio = s[i] / s[i - 1]
    if order == 1:
        return 0.0, ratio, 0.5 * (1 - ratio), 0.5 * (1 - ratio), 0.0
    minus_h = _log_snr(s[i - 1]) - _log_snr(s[i])
    phi1 = np.expm1(minus_h)
    phi2 = phi1 / minus_h - 1
    b1, b2 = phi2 / phi1, 2 * (phi2 / minus_h - 0.5) / phi1
    inverse_r = _slope(s, i - 1)  # 1/r, r < 0
    rho1 = 0.0 if inverse_r == 0 else (b1 - b2) / (1 - 1 / inverse_r)
    rho2, past = b1 - rho1, rho1 * inverse_r
    gain = 1 - ratio
    return 0.0, ratio, gain * rho2, gain * (1 - rho2 - past), gain * past


def _slope(s, i):
    """1/r for r = (λ_{i−1} − λ_i)/(λ_{i+1} − λ_i); 0 where λ_{i−1} = −inf."""
    return (_log_snr(s[i + 1]) - _log_snr(s[i])) / (_log_snr(s[i - 1]) - _log_snr(s[i]))
