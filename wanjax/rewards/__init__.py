"""Rewards: decoded videos and prompts in, one score per sample out.

A reward is reward(video_BTHWC uint8, prompts, meta) -> (scores [B], info {name: [B]}), higher is
better.
"""

import importlib
from collections.abc import Callable

import numpy as np

from wanjax import advantages, sharding

BUILT_IN = {"shapes": "wanjax.rewards.shapes:reward"}


def find(name: str) -> Callable:
    """The reward of a built-in name, or of an import path "package.module:function"."""
    path = BUILT_IN.get(name, name)
    module, _, function = path.partition(":")
    if not function:
        raise ValueError(
            f"config.reward names {name!r}; expected one of {tuple(BUILT_IN)} or an import path "
            "'package.module:function'"
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"config.reward names {name!r}, which cannot be imported: {error}"
        ) from None


def combine(names) -> Callable:
    """One function (video, prompts) -> ({name: scores [B]}, info) over several rewards.

    Info values are named "<reward>/<part>"; a part "strict" also appears as "success".
    """
    functions = {name: find(name) for name in names}

    def score(video_BTHWC, prompts):
        scores, info = {}, {}
        for name, function in functions.items():
            scores[name], parts = function(video_BTHWC, prompts, None)
            info |= {f"reward/{name}/{part}": values for part, values in parts.items()}
            if "strict" in parts:
                info["success"] = parts["strict"]
        return scores, info

    return score


def score(videos, texts, reward: Callable, weights: dict, *, group: int, step: int):
    """Score batches of videos in order; returns (scores_MPK, metrics).

    videos: device arrays [b, ...] whose lengths add up to len(texts); each is fetched when its turn
    comes, so that scoring overlaps with the sampling and decoding of the rest.
    reward: see `combine`; weights: reward name -> weight; group: samples per prompt K.
    Raises FloatingPointError with step and prompt for a score that is not finite.
    """
    results, first = [], 0
    for batch in videos:
        frames = sharding.fetch(batch)
        results.append(reward(frames, texts[first : first + len(frames)]))
        first += len(frames)
    scores_MB = np.stack([np.concatenate([r[0][name] for r in results]) for name in weights])
    info = {name: np.concatenate([r[1][name] for r in results]) for name in results[0][1]}
    if not np.isfinite(scores_MB).all():
        bad = int(np.argwhere(~np.isfinite(scores_MB))[0][1])
        raise FloatingPointError(
            f"step {step}, phase reward: sample {bad} ({texts[bad]!r}) got a reward that is not "
            "finite; the last good checkpoint is kept"
        )
    scores_MPK = scores_MB.reshape(len(weights), -1, group)
    total_PK = np.einsum("m,mpk->pk", list(weights.values()), scores_MPK)
    metrics = {
        "reward/mean": total_PK.mean(),
        "reward/std": total_PK.std(),
        "reward/zero_spread": advantages.zero_spread(total_PK).mean(),
        **{f"reward/{name}": row.mean() for name, row in zip(weights, scores_MB, strict=True)},
        **{name: values.mean() for name, values in info.items()},
    }
    return scores_MPK, metrics
