"""Extract an adapter: what a tuned checkpoint changed in its base, as pairs of low rank.

Randomised SVD (arXiv 0909.4061, two power iterations): exact when the change has that rank.
"""

import math

import numpy as np

from convert import disk, files
from convert.lora import adapter


def extract(base_path, tuned_path, rank: int) -> adapter.Adapter:
    """Approximate what a tuned checkpoint changed in every transformer of its base."""
    base, tuned = disk.read(base_path), disk.read(tuned_path)
    sides = [e for e, c in disk.EXPERTS.items() if c in base.tensors and c in tuned.tensors]
    if not sides:
        raise ValueError(f"{base.where} and {tuned.where} have no transformer in common")
    out = adapter.Adapter(metadata={"wanjax.base": disk.fingerprint(base)})
    for side in sides:
        component, key = disk.EXPERTS[side], side if len(sides) > 1 else None
        part = approximate(base.tensors[component], tuned.tensors[component], rank)
        out.modules[key], out.dense[key], lost = part
        out.notes.append(f"{side}: rank {rank} leaves out {lost:.2e} of the change")
    return out


def approximate(base: files.Tensors, tuned: files.Tensors, rank: int) -> tuple[dict, dict, float]:
    """Approximate tuned − base of one transformer by pairs of one rank, and by dense vectors.

    Returns ({module: LowRank}, {parameter: change}, lost fraction |Δ − approximation| / |Δ|).
    """
    if {n: t.shape for n, t in base.items()} != {n: t.shape for n, t in tuned.items()}:
        raise ValueError(
            "base and tuned checkpoints have different tensors; give two of one variant"
        )
    if rank < 1:
        raise ValueError(f"rank is {rank}, expected at least 1")
    pairs, dense, lost, size = {}, {}, 0.0, 0.0
    for name in base:
        change = tuned[name].all().astype(np.float32) - base[name].all().astype(np.float32)
        if not change.any():
            continue
        size += float(np.square(change, dtype=np.float64).sum())
        if change.ndim == 2 and name.endswith(".weight"):
            pair = _low_rank(change, min(rank, *change.shape))
            pairs[name.removesuffix(".weight")] = pair
            lost += float(np.square(change - pair.delta(), dtype=np.float64).sum())
        else:
            dense[name] = change
    if not size:
        raise ValueError("base and tuned checkpoints are equal: there is nothing to extract")
    return pairs, dense, math.sqrt(lost / size)


def _low_rank(change: np.ndarray, rank: int) -> adapter.LowRank:
    size = (change.shape[1], min(rank + 8, *change.shape))
    sketch = np.random.default_rng(0).standard_normal(size)
    q = np.linalg.qr(change @ sketch.astype(np.float32))[0]
    for _ in range(2):
        q = np.linalg.qr(change @ np.linalg.qr(change.T @ q)[0])[0]
    u, s, vt = np.linalg.svd(q.T @ change, full_matrices=False)
    root = np.sqrt(s[:rank])
    return adapter.LowRank(root[:, None] * vt[:rank], (q @ u[:, :rank]) * root, 1.0)
