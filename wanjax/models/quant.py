"""Frozen matrices stored in one byte: kernel ≈ q · scale, one scale per output column.

"float8" is e4m3 (3 mantissa bits: a weight is off by 2.65 % of itself), "int8" is symmetric (about
0.9 % of a column's spread). Adapters stay float32, and gradients pass to activations through the
stored weights; q and scale get none.
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
    scaled = kernel.astype(jnp.float32) / scale
    q = (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)
    return q, scale.squeeze(-2)


def dequantise(params, dtype=jnp.bfloat16):
    """The tree with every quantised kernel written out again; other leaves stay as they are."""
    flat = trees.flatten(params)
    for path in [p for p, leaf in flat.items() if leaf.dtype.name in _LARGEST]:
        scale = flat.pop(path.removesuffix("kernel") + "scale")
        flat[path] = (flat[path].astype(jnp.float32) * scale[..., None, :]).astype(dtype)
    return trees.unflatten(flat)


def matmul(x, q, scale, *, direct: bool = False):
    """x @ (q · scale) in the dtype of x.

    direct: on a GPU in bfloat16, let float8 weights meet activations rounded to float8 with one
    scale per token, which the tensor cores multiply as they are.
    """
    half = q.dtype == jnp.float8_e4m3fn and x.dtype == jnp.bfloat16
    if direct and half and jax.default_backend() == "gpu":
        return float8_matmul(x, q, scale)
    return _scaled(x @ q.astype(x.dtype), scale)


@jax.custom_vjp
def float8_matmul(x, q, scale):
    """Both operands float8; the gradient is that of the unrounded activations."""
    token = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32) / _LARGEST["float8_e4m3fn"]
    token = jnp.maximum(token, jnp.finfo(jnp.float32).tiny)
    rounded = (x.astype(jnp.float32) / token).astype(q.dtype)
    y = jnp.matmul(rounded, q, preferred_element_type=x.dtype)
    return _scaled(y, scale, token)


def _float8_bwd(saved, dy):
    q, scale = saved
    return _scaled(dy, scale) @ q.astype(dy.dtype).swapaxes(-1, -2), None, None


float8_matmul.defvjp(lambda x, q, scale: (float8_matmul(x, q, scale), (q, scale)), _float8_bwd)


def _scaled(y, scale, token: Any = 1.0):
    row = scale.reshape((1,) * (y.ndim - 1) + scale.shape)
    return (y.astype(jnp.float32) * row * token).astype(y.dtype)
