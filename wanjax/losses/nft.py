"""DiffusionNFT (2509.16117): reward-weighted contrast of two mirrored policies, on final latents.

v⁺ = v_old + β·(v_new − v_old), v⁻ = v_old − β·(v_new − v_old), e± = x_t − x0 − σ·v±
w± = max(mean |e±|, 1e-5) per sample, without gradient; ℓ± = mean (e±)² / w±
  loss = A_max · mean_B [r·ℓ⁺ + (1 − r)·ℓ⁻] / β + kl_beta · mean (v_new − v_ref)²
r in [0, 1] is the optimality probability of a sample, from its clipped advantage.

When v_new = v_old the value does not depend on r, only the gradient does: it is A_max·(2r − 1)
times that of the normalised flow-matching loss ℓ, whatever β. Never judge NFT by its loss curve.
The clips of a batch, and v_old, must come from one snapshot of the old policy.

Dimensions: B samples × timesteps, then latent axes  T timesteps of one sample.
"""

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.losses import flow

# mode -> advantages of the clipped ones
MODES = {
    "all": lambda adv_B: adv_B,
    "positive_only": lambda adv_B: jnp.maximum(adv_B, 0),
    "negative_only": lambda adv_B: jnp.minimum(adv_B, 0),
    "one_only": lambda adv_B: (adv_B > 0).astype(adv_B.dtype),
    "binary": jnp.sign,
}

# kind -> (flat, rate, cap). 0: old is the new policy after each epoch (on-policy); 1: the default;
# 2: on-policy for 75 steps, then nearly frozen.
OLD_DECAYS = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}

WEIGHT_FLOOR = 1e-5


def nft_loss(
    v_new, v_old, v_ref, x0, x_t, sigma_B, adv_B, *, nft_beta, kl_beta, adv_clip_max, mode="all"
):
    """DiffusionNFT loss; returns (loss, aux). Only v_new receives gradient.

    v_new, v_old, v_ref, x0, x_t [B, ...]: velocities of the trained, the sampling and the reference
      policy at x_t, and the clip that x_t was noised from. v_ref may be None where kl_beta is 0.
    sigma_B in [0, 1]; adv_B before clipping to ±adv_clip_max; mode: see `optimality`.
    """
    if v_ref is None and kl_beta:
        raise ValueError(f"nft.kl_beta is {kl_beta} but v_ref is None; give the reference velocity")
    flow.check_shapes(v_new=v_new, v_old=v_old, x0=x0, x_t=x_t)
    flow.check_per_sample(v_new, sigma=sigma_B, adv=adv_B)
    if not nft_beta > 0:
        raise ValueError(f"nft.nft_beta is {nft_beta}; expected a positive number")
    v_new, *fixed = flow.wide(v_new, v_old, x0, x_t)
    v_old, x0, x_t = jax.lax.stop_gradient(fixed)
    r_B = optimality(jax.lax.stop_gradient(adv_B), mode, adv_clip_max).astype(v_new.dtype)
    sigma = flow.level(sigma_B, v_new)
    error = (x_t - x0) - sigma * v_old  # in this order: x_t and x0 are large against it at small σ
    moved = nft_beta * sigma * (v_new - v_old)
    positive_B, weight_pos_B = _normalised(error - moved)
    negative_B, weight_neg_B = _normalised(error + moved)
    policy = adv_clip_max * (r_B * positive_B + (1 - r_B) * negative_B).mean() / nft_beta
    aux = {
        "policy_loss": policy,
        "positive_loss": positive_B.mean(),
        "negative_loss": negative_B.mean(),
        "weight_pos": weight_pos_B.mean(),
        "weight_neg": weight_neg_B.mean(),
        "r_mean": r_B.mean(),
        "r_std": r_B.std(),
        "old_deviate": ((v_new - v_old) ** 2).mean(),
    }
    if v_ref is None:
        return policy, {"loss": policy, **aux}
    flow.check_shapes(v_new=v_new, v_ref=v_ref)
    v_new, v_ref = flow.wide(v_new, jax.lax.stop_gradient(v_ref))
    aux["kl"] = ((v_new - v_ref) ** 2).mean()
    aux["old_kl"] = ((v_old - v_ref) ** 2).mean()
    aux["v_norm_ratio"] = flow.norm_ratio(v_new, v_ref)  # shows inflated velocities (2606.27771)
    loss = policy + kl_beta * aux["kl"]
    return loss, {"loss": loss, **aux}


def optimality(adv_B, mode, adv_clip_max):
    """r_B in [0, 1] from advantages: clip to ±adv_clip_max, apply the mode, map linearly."""
    if mode not in MODES:
        raise ValueError(f"nft.mode is {mode!r}; expected one of {', '.join(MODES)}")
    if not adv_clip_max > 0:
        raise ValueError(f"nft.adv_clip_max is {adv_clip_max}; expected a positive number")
    adv_B = MODES[mode](jnp.clip(jnp.asarray(adv_B), -adv_clip_max, adv_clip_max))
    return jnp.clip(adv_B / adv_clip_max / 2 + 0.5, 0, 1)


def old_decay(step, kind):
    """Decay d of the old policy (float64, on the host): 0 before `flat`, then rate·(step − flat) up
    to cap, with the numbers of OLD_DECAYS[kind].

    step: optimizer steps taken so far, including those of the current epoch. Once per epoch, after
    its last optimizer step: old = trees.lerp(default, old, d), which is exactly default for d = 0.
    """
    if kind not in OLD_DECAYS:
        raise ValueError(f"nft.old_decay is {kind!r}; expected 0, 1 or 2")
    flat, rate, cap = OLD_DECAYS[kind]
    return np.clip((np.asarray(step) - flat) * rate, 0.0, cap)[()]


def evaluation_decay(step, cap):
    """Decay of the evaluation EMA, updated after every optimizer step: min((1 + s)/(10 + s), cap),
    with s counted as in `old_decay`."""
    step = np.asarray(step, np.float64)
    return np.minimum((1 + step) / (10 + step), cap)[()]


def stratified_steps(key, sample_ids, count, lo, hi):
    """int step_BT of a schedule in [lo, hi), the steps of an expert, one in each of `count` equal
    parts; a function of (key, sample id) only."""
    if not 1 <= count <= hi - lo:
        raise ValueError(
            f"nft.timesteps is {count}; expected 1..{hi - lo} (schedule steps {lo}..{hi - 1})"
        )
    q_BT = (jnp.arange(count)[None] + flow.uniform(key, sample_ids, (count,))) / count
    step_BT = lo + jnp.floor(q_BT * (hi - lo)).astype(jnp.int32)
    return jnp.minimum(step_BT, hi - 1)  # q may round to 1


def _normalised(error):
    """Squared error over its own mean magnitude: (ℓ [B], w [B]). Both means run over whole samples
    before the division; averaging ratios over shards would be a different loss."""
    weight_B = jnp.maximum(flow.sample_mean(jnp.abs(jax.lax.stop_gradient(error))), WEIGHT_FLOOR)
    return flow.sample_mean(error**2) / weight_B, weight_B
