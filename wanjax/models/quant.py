"""Frozen matrices stored in one byte: kernel ≈ q · scale, one scale per output column.

"float8" is e4m3 (3 mantissa bits: a weight is off by 2.65 % of its value), "int8" is symmetric
(about 0.9 % of a column's spread). Adapters stay float32, and gradients pass to activations through
the stored weights; q and scale get none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from wanjax import trees

DTYPES = {"float8": jnp.float8_e4m3fn, "int8": jnp.int8}
_LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}


@functools.partial(jax.jit, static_argnames="name")
def quantise(kernel, name: str):
    """(q [..., in, out] in one byte, scale [..., out] float32) of a matrix or a stack of them."""
    dtype = jnp.dtype(DTYPES[name])
    scale = jnp.abs(kernel).max(-2, keepdims=True).astype(jnp.float32) / _LARGEST[dtype.name]
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return _round(kernel.astype(jnp.float32) / scale, dtype), scale.squeeze(-2)


def dequantise(params, dtype=jnp.bfloat16):
    """The tree with every quantised kernel written out again; other leaves stay as they are."""
    flat = trees.flatten(params)
    for path in [p for p, leaf in flat.items() if leaf.dtype.name in _LARGEST]:
        scale = flat.pop(path.removesuffix("kernel") + "scale")
        flat[path] = (flat[path].astype(jnp.float32) * scale[..., None, :]).astype(dtype)
    return trees.unflatten(flat)


def matmul(x, q, scale, *, direct: bool = False):
    """x @ (q · scale) in the dtype of x.

    On a GPU in bfloat16, activations are rounded like the weights, with one scale per token, so
    that the tensor cores multiply bytes at twice the rate: always for int8, for float8 where
    `direct` accepts another 2.65 % of error.
    """
    bytes_do = direct or q.dtype == jnp.int8
    if bytes_do and x.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        return byte_matmul(x, q, scale)
    return _scaled(x @ q.astype(x.dtype), scale)


@jax.custom_vjp
def byte_matmul(x, q, scale):
    """Both operands in one byte; the gradient is that of the unrounded activations."""
    token = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32) / _LARGEST[q.dtype.name]
    token = jnp.maximum(token, jnp.finfo(jnp.float32).tiny)
    rounded = _round(x.astype(jnp.float32) / token, q.dtype)
    rounded = jax.lax.optimization_barrier(rounded)  # so that whatever computed x writes bytes
    exact = jnp.int32 if q.dtype == jnp.int8 else x.dtype
    y = jnp.matmul(rounded, q, preferred_element_type=exact)
    # without the barrier XLA:GPU converts int32 to float32 in a separate pass (RESULTS.md)
    return _scaled(jax.lax.optimization_barrier(y), scale, token, x.dtype)


def _byte_bwd(saved, dy):
    q, scale = saved
    return _scaled(dy, scale) @ q.astype(dy.dtype).swapaxes(-1, -2), None, None


byte_matmul.defvjp(lambda x, q, scale: (byte_matmul(x, q, scale), (q, scale)), _byte_bwd)


def _round(x, dtype):
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype)


def _scaled(y, scale, token: Any = 1.0, dtype=None):
    row = scale.reshape((1,) * (y.ndim - 1) + scale.shape)
    return (y.astype(jnp.float32) * row * token).astype(dtype or y.dtype)
