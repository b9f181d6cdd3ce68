"""Add an adapter to the weights of a checkpoint, and say what rounding to the stored dtype lost.

merged = cast(float32(W) + strength · (alpha/rank · B A + dense change))
rounding of a merge: |merged − (W + ΔW)| / |ΔW|, over all touched weights; large when ΔW is below
the resolution of the stored dtype
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from convert import files, save
from convert.lora import adapter


@dataclass
class Rounding:
    """What storing merged weights lost, filled while they are written."""

    error: float = 0.0  # sum of squares of stored − exact
    change: float = 0.0  # sum of squares of the exact change
    moved: int = 0
    total: int = 0

    def __str__(self):
        relative = math.sqrt(self.error / self.change) if self.change else 0.0
        return (
            f"{self.moved / max(self.total, 1):.1%} of {self.total:,} touched weights moved; "
            f"rounding is {relative:.2e} of the change"
        )


def merge(
    tensors: files.Tensors, added: adapter.Adapter, expert, strength: float, dtype, component: str
):
    """Return (tensors with the adapter added in float32 when read, Rounding filled by reading)."""
    rounding = Rounding()
    out = dict(tensors)
    pairs, dense = added.modules.get(expert, {}), added.dense.get(expert, {})
    for name in {*(f"{m}.weight" for m in pairs), *dense}:
        base, pair = out[name], pairs.get(name.removesuffix(".weight"))
        final = save.stored(component, name, base, dtype)
        extra = dense[name].astype(np.float32).reshape(base.shape) if name in dense else None

        def read(index, base=base, pair=pair, extra=extra, final=final):
            w = base.read(index).astype(np.float32)
            change = np.zeros_like(w)
            if pair is not None:
                b, a = pair.b[index[0]].astype(np.float32), pair.a.astype(np.float32)
                rows = (pair.scale * strength) * (b @ a)
                change += rows.reshape(len(b), *base.shape[1:])[:, *index[1:]]
            if extra is not None:
                change += strength * extra[index]
            exact = w + change
            result = exact.astype(final.dtype)
            kept = result.astype(np.float32)
            rounding.error += float(np.square(kept - exact, dtype=np.float64).sum())
            rounding.change += float(np.square(change, dtype=np.float64).sum())
            rounding.moved += int((kept != w.astype(final.dtype).astype(np.float32)).sum())
            rounding.total += w.size
            return result

        out[name] = dataclasses.replace(base, dtype=final.dtype, read=read, compact=None)
    return out, rounding
