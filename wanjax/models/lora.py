"""Low-rank adapters as trees beside the base parameters: W + scale·A B, scale = alpha / rank
(arXiv 2106.09685).

An adapter tree holds {"a": [.., in, R], "b": [.., R, out], "scale": [..]} at the path of each
adapted layer, with the leading layer axis of the stack it belongs to. `a` and `b` are trained in
float32; `scale` is a constant that travels with them.
"""

import math
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import trees
from wanjax.models import quant
from wanjax.parallel import sharding

LOST = 0.01  # share of a change beyond which merging it is warned about
TARGETS = (r"blocks/attn[12]/to_(q|k|v|out\.0)", r"blocks/ffn\.net\.(0\.proj|2)")


def init(key, params, *, rank: int, alpha: float, targets=TARGETS):
    """Adapter tree for every matrix of params whose module path fully matches a target pattern.

    A is uniform with variance 1/(3·in) (as PEFT), B is zero, so a fresh adapter changes nothing.
    Raises ValueError when rank is not positive or a pattern matches no matrix.
    """
    if rank < 1:
        raise ValueError(f"lora rank is {rank}; set config.lora.rank to at least 1")
    kernels = {
        path.removesuffix("/kernel"): leaf
        for path, leaf in trees.flatten(params).items()
        if path.endswith("/kernel") and leaf.ndim == 2 + path.startswith("blocks/")
    }
    hits = {pattern: [m for m in kernels if re.fullmatch(pattern, m)] for pattern in targets}
    for pattern, modules in hits.items():
        if not modules:
            raise ValueError(
                f"lora target {pattern!r} matches no layer; config.lora.targets are patterns of "
                f"paths such as {', '.join(sorted(kernels)[:3])}"
            )
    flat = {}
    for module in sorted(set().union(*hits.values())):
        *stack, fan_in, fan_out = kernels[module].shape
        own, bound = jax.random.fold_in(key, _stable_hash(module)), 1 / math.sqrt(fan_in)
        shape = (*stack, fan_in, rank)
        flat[f"{module}/a"] = jax.random.uniform(own, shape, jnp.float32, -bound, bound)
        flat[f"{module}/b"] = jnp.zeros((*stack, rank, fan_out), jnp.float32)
        flat[f"{module}/scale"] = jnp.full(stack, alpha / rank, jnp.float32)
    return trees.unflatten(flat)


def combine(adapters):
    """One adapter tree that changes the base as all of [(adapter tree, strength)] together.

    The ranks of a module are laid side by side, [.., in, ΣR] and [.., ΣR, out], with strength·scale
    in b; a module that one adapter alone has keeps its own a and b. Everything is float32.
    """
    parts: dict[str, list] = {}
    for tree, strength in adapters:
        flat = {path: jnp.asarray(x, jnp.float32) for path, x in trees.flatten(tree).items()}
        for path in (p.removesuffix("/a") for p in flat if p.endswith("/a")):
            a, b, scale = (flat[f"{path}/{leaf}"] for leaf in ("a", "b", "scale"))
            parts.setdefault(path, []).append((a, b, strength * scale))
    out = {}
    for path, own in parts.items():
        a, b, scale = own[0]
        if len(own) > 1:
            a = jnp.concatenate([a for a, _, _ in own], -1)
            b = jnp.concatenate([scale[..., None, None] * b for _, b, scale in own], -2)
            scale = jnp.ones_like(scale)
        out |= {f"{path}/a": a, f"{path}/b": b, f"{path}/scale": scale}
    return trees.unflatten(out)


@dataclass
class Rounding:
    """What storing merged weights W' makes of a change ΔW of W: sums over all touched weights."""

    error: float = 0.0  # of (W' − W − ΔW)²
    change: float = 0.0  # of ΔW²
    along: float = 0.0  # of ΔW·(W' − W)
    moved: float = 0.0  # of W' ≠ W
    total: int = 0

    def add(self, error: float, change: float, along: float, moved: float, total: int) -> None:
        """Count the sums over some more weights."""
        self.error += error
        self.change += change
        self.along += along
        self.moved += moved
        self.total += total

    def __str__(self):
        along = self.along / self.change if self.change else 1.0
        return (
            f"{self.moved / max(self.total, 1):.1%} of {self.total:,} touched weights moved, "
            f"{along:.1%} of the wanted change along it; rounding is {self.relative:.2e} of it"
        )

    @property
    def relative(self) -> float:
        """|W' − W − ΔW| / |ΔW|."""
        return math.sqrt(self.error / self.change) if self.change else 0.0

    @property
    def large(self) -> bool:
        """Whether the stored change is another one than the wanted one by more than LOST."""
        return self.relative > LOST


def merge(params, adapter):
    """(params with the adapter folded in, Rounding): kernel + scale·A B in float32, then the
    kernel's dtype (bfloat16 for a quantised base).

    A kernel that the caller does not hold is freed as soon as its merged one is there.
    """
    flat, low_rank = trees.flatten(quant.dequantise(params)), trees.flatten(adapter)
    del params
    rounding = Rounding()
    for path in [p.removesuffix("/a") for p in low_rank if p.endswith("/a")]:
        kernel = flat.pop(f"{path}/kernel")
        stack = (kernel, *(low_rank[f"{path}/{leaf}"] for leaf in ("a", "b", "scale")))
        stack = sharding.to_device(stack if kernel.ndim == 3 else jax.tree.map(_one, stack))
        merged, sums = _fold(*stack)
        flat[f"{path}/kernel"] = jax.device_put(merged.reshape(kernel.shape), kernel.sharding)
        error, change, along, moved = np.asarray(sums, np.float64).sum((0, 2)).tolist()
        rounding.add(error, change, along, moved, kernel.size)
    return trees.unflatten(flat), rounding


@jax.jit
def _fold(kernel_LIO, a_LIR, b_LRO, scale_L):
    """(merged kernels, sums [L, 4, I] of a Rounding over the outputs), layer by layer: a float32
    copy of a whole stack would be twice as large as the stack."""

    def one(layer):
        kernel, a, b, scale = layer
        before = kernel.astype(jnp.float32)
        delta = scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        merged = (before + delta).astype(kernel.dtype)
        # behind the barrier, as XLA may leave out a rounding that is undone at once
        moved = jax.lax.optimization_barrier(merged).astype(jnp.float32) - before
        sums = (jnp.square(moved - delta), jnp.square(delta), delta * moved, moved != 0)
        return merged, jnp.stack([part.sum(-1, dtype=jnp.float32) for part in sums])

    return jax.lax.map(one, (kernel_LIO, a_LIR, b_LRO, scale_L))


def _one(x):
    return x[None]


def _stable_hash(text: str) -> int:
    """A hash that is the same in every process, so that each module draws its own A."""
    value = 0
    for char in text:
        value = (value * 131 + ord(char)) % (2**31)
    return value
