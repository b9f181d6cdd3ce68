"""Advantage weighted matching (2509.25050): GRPO on weighted flow-matching errors.

m = mean (v − (ε − x0))² and log-prob l = −w(m, σ):
  uniform m · t σ·m · t2 σ²·m · huber σ·(√(m + 1e-10) − 1e-5)
  ghuber σ/p·((m + 1e-10)^p − 1e-10^p), p = power
  loss = clipped policy loss of exp(l_new − l_old) + kl_beta·KL(ref) + ema_kl_beta·KL(ema)
KL = mean (Δv)². On-policy the gradient is that of mean_B A·w(m, σ): the direction of NFT under
another normaliser.

Dimensions: B samples × timesteps, then latent axes.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Settings:
    """Config section `awm`."""

    weighting: str  # a key of WEIGHTINGS
    power: float  # p of ghuber
    clip: float  # half-width of the ratio's clip range
    adv_max: float  # clipped advantages are scaled to ±adv_max
    ema_kl_beta: float  # weight of KL(ema)


def awm_loss(
    v_new, v_old, v_ref, v_ema, x0, noise, sigma_B, adv_B, *, settings, kl_beta, adv_clip_max
):
    """AWM loss; returns (loss, aux). Only v_new receives gradient.

    v_new, v_old, v_ref, v_ema, x0, noise [B, ...]: v_old is v_new itself on-policy; v_ref and v_ema
      (the policy averaged over training) may be None where their weight is 0.
    settings: a Settings; adv_B: clipped to ±adv_clip_max, then scaled to ±adv_max.
    """
    flow.check_per_sample(v_new, sigma=sigma_B, adv=adv_B)
    shape = dict(weighting=settings.weighting, power=settings.power)
    logp_B = log_prob(v_new, x0, noise, sigma_B, **shape)
    logp_old_B = log_prob(jax.lax.stop_gradient(v_old), x0, noise, sigma_B, **shape)
    adv_max = settings.adv_max
    adv_B = jnp.clip(adv_B, -adv_clip_max, adv_clip_max) * (adv_max / adv_clip_max)
    clip = settings.clip
    loss, aux = grpo.grpo_loss(logp_B, logp_old_B, adv_B, clip=clip, adv_clip_max=adv_max)
    aux = {"policy_loss": loss, "logp": logp_B.mean(), **aux}
    terms = (("kl", "ref", kl_beta, v_ref), ("ema_kl", "ema", settings.ema_kl_beta, v_ema))
    for name, role, beta, other in terms:
        if beta and other is None:
            raise ValueError(f"awm.{name}_beta is {beta} but v_{role} is None; give the velocity")
        if beta:
            flow.check_shapes(v=v_new, other=other)
            new, fixed = flow.wide(v_new, jax.lax.stop_gradient(other))
            aux[name] = flow.sample_mean((new - fixed) ** 2).mean()
            loss = loss + beta * aux[name]
    return loss, {**aux, "loss": loss}


def log_prob(v, x0, noise, sigma_B, *, weighting, power):
    """−w(m, σ) [B]; x0 and noise receive no gradient."""
    if weighting not in WEIGHTINGS:
        raise ValueError(f"awm.weighting is {weighting!r}; expected one of {', '.join(WEIGHTINGS)}")
    flow.check_per_sample(v, sigma=sigma_B)
    return -WEIGHTINGS[weighting](flow.flow_error(v, x0, noise), jnp.asarray(sigma_B), power)
