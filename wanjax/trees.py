"""Pytrees named by path: nested dicts whose leaves are addressed as "blocks/attn1/to_q/kernel".

Parameter, adapter and optimizer trees are plain nested dicts, so a path is enough to select,
convert, shard or report a leaf.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]


def flatten(tree: Tree) -> dict[str, Any]:
    """Return {path: leaf} with path components joined by "/"; empty dicts disappear."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{sub}": leaf for sub, leaf in flatten(value).items()})
        else:
            flat[key] = value
    return flat


def unflatten(flat: dict[str, Any]) -> Tree:
    """Invert `flatten`."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def dotted(config, prefix: str = "") -> dict[str, Any]:
    """{"key.below": value} of a nested mapping; empty mappings stay, as values."""
    flat = {}
    for key, value in config.items():
        deeper = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if deeper else {f"{prefix}{key}": value}
    return flat


def map_paths(fn: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Apply fn(path, leaf) to every leaf and keep the structure."""
    return unflatten({path: fn(path, leaf) for path, leaf in flatten(tree).items()})


def cast(tree, dtype):
    """Cast every floating leaf to dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def count(tree) -> int:
    """Number of elements in all leaves (arrays or ShapeDtypeStructs)."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def lerp(a, b, weight):
    """Return a + weight·(b − a) leaf by leaf, in the dtype of a."""
    # optax.incremental_update, s·a + (1 − s)·b, changes equal values by rounding (1.5 becomes
    # 1.4999999 at s = 0.1), so averages would drift from constants such as adapter scales
    return jax.tree.map(lambda x, y: (x + weight * (y.astype(x.dtype) - x)).astype(x.dtype), a, b)
