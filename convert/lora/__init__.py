"""Adapters in and out: every naming of Wan LoRA files <-> adapter trees by expert.

A file is read (read.py) into an `adapter.Adapter`: per expert, low-rank pairs by diffusers module
name, W + alpha/rank · B A (arXiv 2106.09685), and dense changes by parameter name. LoHa and LoKr
are rewritten as exact pairs, so everything can be written in any dialect (write.py) and trained
further:
  LoHa  (W1a W1b) ∘ (W2a W2b) = [W1a ⊙rows W2a] [W1b ⊙cols W2b], rank r1·r2 (arXiv 2108.06098)
  LoKr  (A1 B1) ⊗ (A2 B2) = (A1 ⊗ A2)(B1 ⊗ B2)                    (arXiv 2309.14859)

    python -m convert.lora SRC --to diffusers|comfyui|kohya|diffsynth --out DST

Dimension legend: R rank, I inputs, O outputs, L layers.
"""

import math
import warnings

import numpy as np

from convert import disk, files
from convert.lora import adapter, read
from wanjax import paths
from wanjax.models import presets


def load(path, config: presets.ModelConfig, *, expert: str | None = None, dense_merged=False):
    """Load adapter trees by expert, {"high": tree, "low": tree}, to train or sample with.

    Args:
      path: adapter file, PEFT folder, folder or list of a high-noise and a low-noise file.
      expert: "high", "low" or "both" for files that do not say; checked against files that do.
      dense_merged: the base was loaded with the `dense_changes` of the file.
    Raises ValueError on unknown keys, unclear experts, modules the model lacks, and on dense parts
    (bias, norm, modulation changes) unless dense_merged.
    """
    found, skipped = adapter.fit(adapter.route(read.read(path), config.experts, expert), config)
    dense = {name for part in found.dense.values() for name in part}
    if dense and not dense_merged:
        raise ValueError(
            f"{path}: {len(dense)} changes are not low-rank ({files.some(sorted(dense))}); load "
            "the base with them (lora.dense_changes), or merge the file with convert.weights --lora"
        )
    if skipped:
        warnings.warn(f"{path}: {skipped}", stacklevel=2)
    if adapter.probe(found) == 0:
        warnings.warn(f"{path}: all its updates are zero, so it changes nothing", stacklevel=2)
    return adapter.to_trees(found, config)


def dense_changes(model_path, sources) -> dict[str, dict[str, np.ndarray]]:
    """What adapters change besides low-rank pairs, for `weights.load(dense=)`: {expert: {parameter
    name: float32 change}}, {} where there is none.

    sources: [(path, expert or None, strength)], as `parse_argument` returns them.
    """
    out: dict[str, dict[str, np.ndarray]] = {}
    for path, expert, strength in sources:
        found = read.read(path)
        if not found.dense:
            continue
        config = disk.model_config(disk.read(model_path))
        fitted, _ = adapter.fit(adapter.route(found, config.experts, expert), config)
        for side, part in fitted.dense.items():
            changes = out.setdefault(str(side), {})
            for name, change in part.items():
                change = strength * change.astype(np.float32)
                changes[name] = changes[name] + change if name in changes else change
    return out


def with_start(trained: adapter.Adapter, paths) -> adapter.Adapter:
    """A trained adapter completed from the files it started from: the pairs of experts that were
    not trained, and the dense changes."""
    if paths:
        start = read.read(list(paths))
        for expert, pairs in start.modules.items():
            trained.modules.setdefault(expert, pairs)
        trained.dense = start.dense
    return trained


def parse_argument(text: str) -> tuple[str, str | None, float]:
    """Split FILE[:high|low|both][@strength], a --lora argument: (path, expert or None, strength).

    The name of an existing file may contain "@".
    """
    path, expert = _side(text)
    head, at, tail = text.rpartition("@")
    if not at or paths.resolve(text).exists() or paths.resolve(path).exists():
        return path, expert, 1.0
    try:
        strength = float(tail)
    except ValueError:
        raise ValueError(f"--lora {text}: strength {tail!r} is not a number") from None
    if not math.isfinite(strength):
        raise ValueError(f"--lora {text}: strength {tail!r} is not finite")
    return *_side(head), strength


def _side(text: str) -> tuple[str, str | None]:
    head, _, side = text.rpartition(":")
    return (head, side) if side in ("high", "low", "both") else (text, None)
