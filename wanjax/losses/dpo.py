"""Flow-DPO (2501.13918), online: the best clip of a group is preferred to its worst.

d = mean (v − v*)² − mean (v_ref − v*)², v* = ε − x0, with one x_t noise ε and level for both clips
  loss = −mean log sigmoid(−β/2·(d_win − d_lose))

Dimensions: B pairs, then latent axes  P prompts  K samples of one prompt.
"""

import jax
import numpy as np

from wanjax.losses import flow


def dpo_loss(v_win, v_lose, v_ref_win, v_ref_lose, x0_win, x0_lose, noise, *, beta):
    """Flow-DPO loss; returns (loss, aux). Only v_win and v_lose receive gradient.

    All arrays [B, ...]. beta: 100 (recipes) to 2000 (papers); errors are means over a clip.
    """
    gain_win = _error_change(v_win, v_ref_win, x0_win, noise)
    gain_lose = _error_change(v_lose, v_ref_lose, x0_lose, noise)
    flow.check_shapes(win=v_win, lose=v_lose)
    inside_B = -beta / 2 * (gain_win - gain_lose)
    loss = -jax.nn.log_sigmoid(inside_B).mean()
    return loss, {
        "loss": loss,
        "margin": inside_B.mean(),
        "accuracy": (inside_B > 0).astype(inside_B.dtype).mean(),
        "error_change_win": gain_win.mean(),
        "error_change_lose": gain_lose.mean(),
    }


def pairs(adv_PK):
    """(win_P, lose_P): flat indices into the P·K samples of the best and the worst of each group.

    A group whose samples are all equal pairs its first sample with itself: its loss is log 2 and
    its gradient zero.
    """
    adv_PK = np.asarray(adv_PK)
    if adv_PK.ndim != 2:
        raise ValueError(f"adv_PK has shape {adv_PK.shape}; expected [P, K]")
    first = np.arange(len(adv_PK)) * adv_PK.shape[1]
    return first + adv_PK.argmax(1), first + adv_PK.argmin(1)


def _error_change(v, v_ref, x0, noise):
    """d [B] as mean (v − v_ref)·(v + v_ref − 2·v*): two large errors are never subtracted."""
    flow.check_shapes(v=v, v_ref=v_ref, x0=x0, noise=noise)
    v, *fixed = flow.wide(v, v_ref, x0, noise)
    v_ref, x0, noise = jax.lax.stop_gradient(fixed)
    return flow.sample_mean((v - v_ref) * (v + v_ref - 2 * (noise - x0)))
