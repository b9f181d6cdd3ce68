"""GRPO on denoising transitions: clipped policy loss, KL to the reference, GRPO-Guard.

Flow-GRPO (2505.05470): r = exp(logp − logp_old), A clamped to ±adv_clip_max,
  loss = mean max(−A·r, −A·clip(r, 1 − lo, 1 + hi)).
Log-probs are means over latent elements, so useful clip ranges are 1e-5 … 1e-3.
KL between two transitions with the same std is mean (Δmean)² / (2·std²); implementations differ
in whether std carries the step size (see `kl_loss`).
GRPO-Guard (2510.22319): r = exp(s·(Δlogp + mean (Δmean)²/(2·s²))), loss divided by the step size
  h, which centres the ratio at 1 and balances noisy against clean steps; s is the transition std.

Every loss is a plain mean over its leading axis: micro-batches of n_j add up with weights n_j/Σn.

Dimensions: B transitions (sample × step), then latent axes.
"""

import jax
import jax.numpy as jnp

from wanjax.losses import flow

KL_KINDS = ("g2", "g2h", "v_mse", "x_mse")


def grpo_loss(logp_B, logp_old_B, adv_B, *, clip, adv_clip_max: float = 5.0):
    """Clipped policy-gradient loss; returns (loss, aux of scalars).

    clip: half-width or (lo, hi), numbers or arrays like logp_B (per-expert ranges in one batch).
    adv_B is clamped to ±adv_clip_max. logp_old_B and adv_B receive no gradient.
    """
    flow.check_shapes(logp=logp_B, logp_old=logp_old_B, adv=adv_B)
    term_B, aux = _clipped(logp_B - jax.lax.stop_gradient(logp_old_B), adv_B, clip, adv_clip_max)
    loss = term_B.mean()
    return loss, {"loss": loss, **aux}


def guard_loss(logp_B, logp_old_B, adv_B, mean_B, mean_old_B, *, std_B, h_B, clip, adv_clip_max):
    """GRPO-Guard loss; returns (loss, aux).

    mean_B, mean_old_B: transition means [B, ...]; std_B: their common std; h_B: σ_i − σ_{i+1} > 0,
    or ones for the ratio normalisation without gradient reweighting (Flow-Factory).
    """
    flow.check_shapes(logp=logp_B, logp_old=logp_old_B, adv=adv_B, std=std_B, h=h_B)
    log_ratio_B = guard_log_ratio(logp_B, logp_old_B, mean_B, mean_old_B, std_B=std_B)
    term_B, aux = _clipped(log_ratio_B, adv_B, clip, adv_clip_max)
    loss = (term_B / h_B).mean()
    return loss, {"loss": loss, **aux}


def guard_log_ratio(logp_B, logp_old_B, mean_B, mean_old_B, *, std_B):
    """Normalised log-ratio of GRPO-Guard: s·Δlogp + mean (Δmean)²/(2·s)."""
    bias_B = _mean_square(mean_B, jax.lax.stop_gradient(mean_old_B)) / (2 * std_B)
    return (logp_B - jax.lax.stop_gradient(logp_old_B)) * std_B + bias_B


def kl_loss(kind: str, new_B, ref_B, *, std_B=None, h_B=None):
    """KL penalty to the reference policy, mean over B; ref_B receives no gradient.

    new_B, ref_B [B, ...] are transition means (g2, g2h, x_mse) or velocities (v_mse).
      g2     mean (Δmean)² / (2·g²), g = std/√h     Flow-GRPO on images, miles
      g2h    mean (Δmean)² / (2·std²)               the exact KL; Flow-GRPO on Wan, UniRL
      v_mse  mean (Δv)²                             Flow-Factory, velocity form
      x_mse  mean (Δmean)²                          Flow-Factory, latent form
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl.kind is {kind!r}; expected one of {', '.join(KL_KINDS)}")
    d_B = _mean_square(new_B, jax.lax.stop_gradient(ref_B))
    if kind in ("g2", "g2h"):
        flow.check_shapes(mean=d_B, std=std_B)
        d_B = d_B / (2 * jnp.square(jnp.asarray(std_B)))
    if kind == "g2":
        flow.check_shapes(mean=d_B, h=h_B)
        d_B = d_B * jnp.asarray(h_B)
    return d_B.mean()


def _clipped(log_ratio_B, adv_B, clip, adv_clip_max):
    """Per-element clipped loss and its scalar statistics."""
    lo, hi = clip if isinstance(clip, tuple | list) else (clip, clip)
    adv_B = jnp.clip(jax.lax.stop_gradient(adv_B), -adv_clip_max, adv_clip_max)
    ratio_B = jnp.exp(log_ratio_B)
    term_B = jnp.maximum(-adv_B * ratio_B, -adv_B * jnp.clip(ratio_B, 1 - lo, 1 + hi))
    ratio_B, log_ratio_B = jax.lax.stop_gradient((ratio_B, log_ratio_B))
    outside = (ratio_B > 1 + hi, ratio_B < 1 - lo)
    above, below = (where.astype(ratio_B.dtype).mean() for where in outside)
    aux = {
        "ratio_mean": ratio_B.mean(),
        "ratio_std": ratio_B.std(),
        "ratio_min": ratio_B.min(),
        "ratio_max": ratio_B.max(),
        "clip_frac": above + below,
        "clip_frac_hi": above,
        "clip_frac_lo": below,
        "approx_kl": 0.5 * (log_ratio_B**2).mean(),
    }
    return term_B, aux


def _mean_square(a_B, b_B):
    """Mean squared difference over everything but the leading axis."""
    flow.check_shapes(new=a_B, ref=b_B)
    return flow.sample_mean((a_B - b_B) ** 2)
