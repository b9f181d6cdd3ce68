"""Group-relative advantages on the host, in float64.

A = (r − mean) / denominator, per prompt group of K samples or over the batch. The reference
implementations differ only in scope, ddof and epsilon, which matters for small groups (K = 2: ±1
against ±0.71):

  preset            mean   std    ddof  denominator           source
  flow_grpo         group  group  0     std + 1e-4            Flow-GRPO (2505.05470), per-prompt std
  flow_grpo_global  group  batch  0     std + 1e-4            Flow-GRPO, global_std
  miles             group  group  1     std + 1e-4            miles
  dance             group  group  1     std + 1e-8            DanceGRPO (2505.07818)
  unirl             group  group  0     sqrt(var + 1e-8)      UniRL
  gdpo              group  group  0     max(std, 1e-6)        Flow-Factory's GDPO:
                    each reward on its own, then the weighted sum, then the same over the batch

Dimensions: M rewards, P prompts, K samples of one prompt.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """One normalisation: scopes "group" or "batch" of mean and std, ddof and epsilon.

    eps_in says where eps enters: "std" adds it, "var" adds it under the root, "floor" is a lower
    bound of the std.
    """

    mean: str = "group"
    std: str = "group"
    ddof: int = 0
    eps: float = 1e-4
    eps_in: str = "std"


PRESETS = {
    "flow_grpo": Rule(),
    "flow_grpo_global": Rule(std="batch"),
    "miles": Rule(ddof=1),
    "dance": Rule(ddof=1, eps=1e-8),
    "unirl": Rule(eps=1e-8, eps_in="var"),
    "gdpo": Rule(eps=1e-6, eps_in="floor"),
}
_GDPO_TOTAL = Rule(mean="batch", std="batch", eps=1e-6, eps_in="floor")  # of its weighted sum


def group_advantages(rewards, preset: str, *, weights=None) -> np.ndarray:
    """Return adv_PK from rewards_PK, or from rewards_MPK and weights [M].

    Several rewards are summed with their weights first, except by "gdpo", which normalises each
    one in its group before the sum. Groups without spread get exactly 0 where the mean is taken
    per group.
    """
    if preset not in PRESETS:
        raise ValueError(f"advantage.preset is {preset!r}; expected one of {', '.join(PRESETS)}")
    rewards_MPK = np.asarray(rewards, np.float64)
    if rewards_MPK.ndim == 2:
        rewards_MPK = rewards_MPK[None]
    if rewards_MPK.ndim != 3:
        raise ValueError(f"rewards have shape {rewards_MPK.shape}; expected [P, K] or [M, P, K]")
    weights_M = np.ones(1) if weights is None else np.asarray(weights, np.float64)
    if weights_M.shape != rewards_MPK.shape[:1]:
        raise ValueError(
            f"reward weights have shape {weights_M.shape} for {len(rewards_MPK)} rewards; "
            f"set one reward.weight per reward"
        )
    if preset == "gdpo":
        each_MPK = np.stack([_normalise(r_PK, PRESETS[preset]) for r_PK in rewards_MPK])
        return _normalise(np.tensordot(weights_M, each_MPK, 1), _GDPO_TOTAL)
    return _normalise(np.tensordot(weights_M, rewards_MPK, 1), PRESETS[preset])


def zero_spread(rewards_PK) -> np.ndarray:
    """Return bool [P]: prompts whose samples all have the same reward and so carry no signal."""
    return np.ptp(np.asarray(rewards_PK, np.float64), axis=-1) == 0


def best_of_n(adv_PK, keep: int) -> np.ndarray:
    """Return index_PN, ascending, of the keep/2 best and keep/2 worst samples of each group.

    DanceGRPO trains on these N = keep of K only. Of equal samples the earlier counts as worse.
    """
    adv_PK = np.asarray(adv_PK)
    K = adv_PK.shape[1]
    if keep % 2 or not 2 <= keep <= K:
        raise ValueError(
            f"best_of_n keeps {keep} of {K} samples a group; expected an even number from 2 to {K}"
        )
    order_PK = np.argsort(adv_PK, axis=1, kind="stable")
    chosen_PN = np.concatenate([order_PK[:, : keep // 2], order_PK[:, K - keep // 2 :]], axis=1)
    return np.sort(chosen_PN, axis=1)


def _normalise(r_PK, rule):
    """Centre and scale rewards by one Rule."""
    axis = {"group": 1, "batch": None}
    adv_PK = r_PK - r_PK.mean(axis[rule.mean], keepdims=True)
    if rule.mean == "group":
        adv_PK = np.where(zero_spread(r_PK)[:, None], 0.0, adv_PK)
    count = r_PK.shape[1] if rule.std == "group" else r_PK.size
    if count <= rule.ddof:
        raise ValueError(
            f"a {rule.std} of {count} samples has no spread; set group_size to at least 2"
        )
    if rule.eps_in == "var":
        return adv_PK / np.sqrt(r_PK.var(axis[rule.std], ddof=rule.ddof, keepdims=True) + rule.eps)
    std = r_PK.std(axis[rule.std], ddof=rule.ddof, keepdims=True)
    return adv_PK / (np.maximum(std, rule.eps) if rule.eps_in == "floor" else std + rule.eps)
