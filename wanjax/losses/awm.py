"""Advantage weighted matching (2509.25050): GRPO on weighted flow-matching errors.

m = mean (v − (ε − x0))² and log-prob l = −w(m, σ):
  uniform m · t σ·m · t2 σ²·m · huber σ·(√(m + 1e-10) − 1e-5)
  ghuber σ/p·((m + 1e-10)^p − 1e-10^p), p = power
  loss = clipped policy loss of exp(l_new − l_old) + kl_beta·KL(ref) + ema_kl_beta·KL(ema)
KL = mean (Δv)², or mean (Δv)²/(2·s²) with s = 0.7·√(σ/(1 − min(σ, 0.99))) for elbo_kl.
On-policy the gradient is that of mean_B A·w(m, σ): the direction of NFT under another normaliser.

Dimensions: B samples × timesteps, then latent axes.
"""

import jax
import jax.numpy as jnp

from wanjax.losses import flow, grpo

_EPS = 1e-10

WEIGHTINGS = {
    "uniform": lambda m, s, p: m,
    "t": lambda m, s, p: s * m,
    "t2": lambda m, s, p: s**2 * m,
    "huber": lambda m, s, p: s * (jnp.sqrt(m + _EPS) - _EPS**0.5),
    "ghuber": lambda m, s, p: s * ((m + _EPS) ** p - _EPS**p) / p,
}


def awm_loss(
    v_new,
    v_old,
    v_ref,
    v_ema,
    x0,
    noise,
    sigma_B,
    adv_B,
    *,
    weighting="ghuber",
    power=0.25,
    clip=1.0,
    adv_clip_max=5.0,
    adv_max=1.0,
    kl_beta=0.0,
    ema_kl_beta=0.0,
    elbo_kl=False,
    steps=1,
):
    """AWM loss; returns (loss, aux). Only v_new receives gradient.

    v_new, v_old, v_ref, v_ema, x0, noise [B, ...]: v_old is v_new itself on-policy; v_ref and v_ema
      (the policy averaged over training) may be None where their weight is 0.
    adv_B: clipped to ±adv_clip_max, then scaled to ±adv_max.
    steps: average log-probs over this many timesteps of a sample before the ratio; rows are then
      timestep-major, [steps·samples].
    """
    flow.check_per_sample(v_new, sigma=sigma_B, adv=adv_B)
    if jnp.shape(adv_B)[0] % steps:
        raise ValueError(f"awm.steps is {steps}; expected a divisor of {jnp.shape(adv_B)[0]} rows")
    score = lambda v: log_prob(v, x0, noise, sigma_B, weighting=weighting, power=power)
    over_steps = lambda a_B: a_B.reshape(steps, -1).mean(0)
    logp_B, logp_old_B = over_steps(score(v_new)), over_steps(score(jax.lax.stop_gradient(v_old)))
    adv = over_steps(jnp.clip(adv_B, -adv_clip_max, adv_clip_max)) * (adv_max / adv_clip_max)
    policy, aux = grpo.grpo_loss(logp_B, logp_old_B, adv, clip=clip, adv_clip_max=adv_max)
    loss, aux = policy, {"policy_loss": policy, "logp": logp_B.mean(), **aux}
    terms = (("kl", "ref", kl_beta, v_ref), ("ema_kl", "ema", ema_kl_beta, v_ema))
    for name, role, beta, other in terms:
        if beta and other is None:
            raise ValueError(f"awm.{name}_beta is {beta} but v_{role} is None; give the velocity")
        if beta:
            aux[name] = _kl(v_new, other, sigma_B, elbo_kl)
            loss = loss + beta * aux[name]
    return loss, {**aux, "loss": loss}


def log_prob(v, x0, noise, sigma_B, *, weighting, power=0.25):
    """−w(m, σ) [B]; x0 and noise receive no gradient."""
    if weighting not in WEIGHTINGS:
        raise ValueError(f"awm.weighting is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}")
    flow.check_per_sample(v, sigma=sigma_B)
    return -WEIGHTINGS[weighting](flow.flow_error(v, x0, noise), jnp.asarray(sigma_B), power)


def _kl(v_new, other, sigma_B, elbo):
    flow.check_shapes(v=v_new, other=other)
    v_new, other = flow.wide(v_new, jax.lax.stop_gradient(other))
    kl_B = flow.sample_mean((v_new - other) ** 2)
    if elbo:
        sigma_B = jnp.asarray(sigma_B)
        kl_B = kl_B * (1 - jnp.minimum(sigma_B, 0.99)) / (2 * 0.7**2 * sigma_B)
    return kl_B.mean()
