"""DMD2 (2405.14867): a few-step student follows the difference of two scores.

Student clip x0, noised to x_t; x0_fake from the critic, x0_real from the guided teacher, at x_t:
  n = max(mean |x0 − x0_real|, floor) per sample, g = weight·(x0_fake − x0_real)/n, no gradient
  loss = ½·mean g², with gradient ∂/∂x0 = g/N: a step on the student's own clip
The critic learns the student's distribution by flow matching on its clips.

Two experts (Phased DMD, 2510.27684): the high expert's student ends at the boundary σ_s with x_s,
and its critic is trained on what is known there, for σ_t > σ_s:
  α = (1 − σ_t)/(1 − σ_s), β = √(σ_t² − α²σ_s²), x_t = α·x_s + β·ε
  v* = −x_s/(1 − σ_s) + [σ_t + (1 − σ_t)·σ_s²/(1 − σ_s)²]/β · ε
σ_s = 0 is ordinary flow matching. Guidance is always u + w·(c − u).

Dimensions: B batch, then latent axes  L discriminator logits  N timestep bins.
"""

import jax
import jax.numpy as jnp

from wanjax import schedule
from wanjax.losses import flow

# h(r) = r²·f''(r) for the divergence with generator f (f-distill, 2502.15681); rkl is plain DMD.
F_WEIGHTS = {
    "rkl": jnp.ones_like,
    "kl": lambda r: r,
    "js": lambda r: 1 - 1 / (1 + r),
    "jeffreys": lambda r: 1 + r,
    "hellinger": lambda r: jnp.sqrt(r) / 4,
}
LOGIT_LIMIT = 5.0  # logits are clamped to ± this before they become density ratios


def generator_loss(x0, x0_fake, x0_real, *, floor, weight_B=None):
    """DMD loss of the student; returns (loss, aux). Only x0 receives gradient.

    x0, x0_fake, x0_real [B, ...]. floor bounds the normaliser from below: use 1e-4; with 0 the loss
      is infinite where the student equals the teacher but not the critic.
    weight_B: factor on each sample's g, e.g. `f_weight`.
    """
    flow.check_shapes(x0=x0, x0_fake=x0_fake, x0_real=x0_real)
    if not floor >= 0:
        raise ValueError(f"dmd2.floor is {floor}; expected 0 or more, such as 1e-4")
    x0, *fixed = flow.wide(x0, x0_fake, x0_real)
    x0_fake, x0_real = jax.lax.stop_gradient(fixed)
    fixed_x0 = jax.lax.stop_gradient(x0)
    floor = max(floor, jnp.finfo(x0.dtype).tiny)  # 0/0 is 0
    norm_B = jnp.maximum(flow.sample_mean(jnp.abs(fixed_x0 - x0_real)), floor)
    g = (x0_fake - x0_real) / flow.level(norm_B, x0)
    if weight_B is not None:
        flow.check_per_sample(x0, weight=weight_B)
        g = g * flow.level(jax.lax.stop_gradient(weight_B), x0)
    loss = 0.5 * ((x0 - fixed_x0 + g) ** 2).mean()
    return loss, {"loss": loss, "grad_abs": jnp.abs(g).mean(), "norm": norm_B.mean()}


def critic_loss(v, x0, noise):
    """Flow-matching loss of the critic on student clips; returns (loss, aux)."""
    return flow.flow_loss(v, x0, noise)


def phased_critic_loss(v, v_target):
    """Critic loss of the high expert on a target of `phased_noise`; returns (loss, aux)."""
    return flow.flow_loss(v, jnp.zeros_like(v_target), v_target)


def phased_noise(x_s, noise, sigma_t, sigma_s):
    """Noise a clip at level σ_s up to σ_t > σ_s; returns (x_t, velocity target)."""
    flow.check_shapes(x_s=x_s, noise=noise)
    x_s, noise = flow.wide(x_s, noise)
    s_t, s_s = flow.level(sigma_t, x_s), flow.level(sigma_s, x_s)
    alpha = (1 - s_t) / (1 - s_s)
    # σ_t² − α²σ_s² as a product, which keeps its digits where σ_t is near σ_s
    beta = jnp.sqrt((s_t - s_s) / (1 - s_s) * (s_t + alpha * s_s))
    gain = (s_t + alpha * s_s**2 / (1 - s_s)) / beta
    return alpha * x_s + beta * noise, gain * noise - x_s / (1 - s_s)


def ode_pair_loss(x, v, end, sigma, sigma_s, *, first: int = 0):
    """Warm start on pairs from the teacher's trajectory (Self-Forcing, 2506.08009): mean squared
    error of the student's single step from x at σ to σ_s against the pair's `end`, all [B, T, ...];
    the `first` frames are conditioning and do not count."""
    flow.check_shapes(x=x, end=end)
    step, end = flow.wide(flow.euler(x, v, sigma, sigma_s), end)
    return jnp.square(step - end)[:, first:].mean()


def gan_generator_loss(fake_BL):
    """mean softplus(−logit of student clips); returns (loss, aux)."""
    loss = jax.nn.softplus(-flow.wide(fake_BL)[0]).mean()
    return loss, {"loss": loss}


def gan_critic_loss(fake_BL, real_BL):
    """mean softplus(fake) + mean softplus(−real) on the critic's features; returns (loss, aux)."""
    flow.check_shapes(fake=fake_BL, real=real_BL)
    fake_BL, real_BL = flow.wide(fake_BL, real_BL)
    loss = jax.nn.softplus(fake_BL).mean() + jax.nn.softplus(-real_BL).mean()
    right = jnp.concatenate([fake_BL < 0, real_BL > 0]).mean()
    return loss, {"loss": loss, "accuracy": right}


def gan_penalty(real_BL, perturbed_BL):
    """Approximate R1 penalty: mean squared change of real logits when clips get 0.1·ε added."""
    flow.check_shapes(real=real_BL, perturbed=perturbed_BL)
    real_BL, perturbed_BL = flow.wide(real_BL, perturbed_BL)
    return ((real_BL - perturbed_BL) ** 2).mean()


def f_weight(kind, ratio_B):
    """h(r) [B] of an f-divergence for density ratios r = teacher/student; see `density_ratio`."""
    if kind not in F_WEIGHTS:
        raise ValueError(f"dmd2.divergence is {kind!r}; expected one of {', '.join(F_WEIGHTS)}")
    return F_WEIGHTS[kind](jax.lax.stop_gradient(flow.wide(ratio_B)[0]))


def density_ratio(logit_BL, t_B, mean_N):
    """Density ratio exp(logit) of student clips; returns (ratio_B, (sum_N, count_N)).

    Logits are averaged over L and clamped to ±LOGIT_LIMIT. E[r] = 1 at every level under the
    student, so ratios are divided by their running mean in N equal timestep bins (initially ones);
    `ratio_mean` updates it from the sums and counts.
    """
    flow.check_per_sample(logit_BL, t=t_B)
    logit_B = flow.sample_mean(flow.wide(logit_BL)[0])
    ratio_B = jnp.exp(jnp.clip(jax.lax.stop_gradient(logit_B), -LOGIT_LIMIT, LOGIT_LIMIT))
    bins = mean_N.shape[0]
    index_B = jnp.clip((t_B * bins / 1000).astype(jnp.int32), 0, bins - 1)
    sum_N, count_N = (jnp.zeros(bins).at[index_B].add(a) for a in (ratio_B, 1.0))
    return ratio_B / mean_N[index_B], (sum_N, count_N)


def ratio_mean(mean_N, sum_N, count_N, decay):
    """Running mean of density ratios after one more batch; an empty bin keeps its value."""
    seen_N = decay * mean_N + (1 - decay) * sum_N / jnp.maximum(count_N, 1)
    return jnp.where(count_N > 0, seen_N, mean_N)


def turns(step, interval):
    """Whether step `step` = 1, 2, … updates the student: every `interval`; the critic always is."""
    if interval < 1:
        raise ValueError(f"dmd2.student_every is {interval}; expected at least 1")
    return step % interval == 0


def student_ema_decay(updates, decay, start):
    """Decay of the student's EMA after its update number `updates` = 1, 2, …; 0, hence a copy of
    the student in trees.lerp(student, ema, decay), up to update `start`.

    Counting trainer steps instead would average in an unmoved student (effective decay^interval).
    """
    return decay if updates > start else 0.0


def score_timesteps(raw, shift, *, t_lo, t_hi):
    """Timesteps at which scores are compared, for raw draws in [0, 1000): shifted, then clamped."""
    return jnp.clip(1000 * schedule.shift_map(jnp.asarray(raw) / 1000, shift), t_lo, t_hi)
