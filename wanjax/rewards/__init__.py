"""Rewards: decoded videos and prompts in, one score per sample out.

A reward is reward(video_BTHWC uint8, prompts, meta) -> (scores [B], info {name: [B]}), higher is
better.
"""

import importlib
from collections.abc import Callable

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
