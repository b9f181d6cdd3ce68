"""Prompts, text encoding and cached data sets; `Item` is what they give a training step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Item:
    """The data of one step: P prompts and, where an algorithm trains on clips, their latents."""

    texts: list[str]
    ctx_PSE: Any  # text rows, one context per prompt
    x0_PTHWC: Any = None  # normalised clean latents
    cond: Any = None  # extra inputs of the model (see models.condition), leading axis P
