"""Low-rank adapters as trees beside the base parameters: W + scale·A B, scale = alpha / rank
(arXiv 2106.09685).

An adapter tree holds {"a": [.., in, R], "b": [.., R, out], "scale": [..]} at the path of each
adapted layer, with the leading layer axis of the stack it belongs to. `a` and `b` are trained in
float32; `scale` is a constant that travels with them.
"""

import math
import re

import jax
import jax.numpy as jnp

from wanjax import trees
from wanjax.models import quant

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


def merge(params, adapter, strength: float = 1.0):
    """Fold the adapter into the base: kernel + strength·scale·A B in float32, then the kernel's
    dtype (bfloat16 for a quantised base)."""
    flat, low_rank = trees.flatten(quant.dequantise(params)), trees.flatten(adapter)
    for path in [p.removesuffix("/a") for p in low_rank if p.endswith("/a")]:
        a, b, scale = (low_rank[f"{path}/{leaf}"] for leaf in ("a", "b", "scale"))
        delta = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scale[..., None, None]
        kernel = flat[f"{path}/kernel"]
        merged = kernel.astype(jnp.float32) + strength * delta
        flat[f"{path}/kernel"] = merged.astype(kernel.dtype)
    return trees.unflatten(flat)


def _stable_hash(text: str) -> int:
    """A hash that is the same in every process, so that each module draws its own A."""
    value = 0
    for char in text:
        value = (value * 131 + ord(char)) % (2**31)
    return value
