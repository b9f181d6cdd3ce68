"""Leaf layers of the Wan DiT: dense with a low-rank adapter, norms, time features, rotary
embedding, patches.

Shapes: B batch, T latent frames, H W latent height/width, C channels, L tokens, D model, N heads,
K head dim, R rank. Parameters are created in float32 and may be stored in bfloat16; a layer casts
at the line where it computes.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from wanjax.models import quant

MATMUL = "matmul"  # name of every dense output for remat policies


class Dense(nn.Module):
    """y = x W + b, plus scale·(x A) B when the "lora" collection holds an adapter for this layer
    (arXiv 2106.09685). A parameter `scale` next to the kernel means that it is quantised."""

    features: int
    dtype: Any
    use_bias: bool = True
    precision: Any = None
    direct: bool = False  # may multiply in float8, see quant.matmul

    @nn.compact
    def __call__(self, x):
        dot = functools.partial(jnp.matmul, precision=self.precision)
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        x = x.astype(self.dtype)
        if self.has_variable("params", "scale"):
            scale = self.get_variable("params", "scale")
            y = quant.matmul(x, kernel, scale, direct=self.direct)
        else:
            y = dot(x, kernel.astype(self.dtype))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
            y = y + _row(bias.astype(self.dtype), y.ndim)
        if self.has_variable("lora", "a"):
            a = self.get_variable("lora", "a").astype(self.dtype)
            b = self.get_variable("lora", "b").astype(self.dtype)
            scale = jax.lax.stop_gradient(self.get_variable("lora", "scale"))
            down = checkpoint_name(dot(x, a), MATMUL)
            y = y + dot(down, b) * scale.astype(self.dtype)
        return checkpoint_name(y, MATMUL)


class LayerNorm(nn.Module):
    """Layer norm in float32; without scale and bias when affine is False. Returns float32."""

    eps: float
    affine: bool = False

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        var = jnp.square(x - mean).mean(-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(var + self.eps)
        if not self.affine:
            return y
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return y * _row(scale.astype(jnp.float32), y.ndim) + _row(bias.astype(jnp.float32), y.ndim)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32. Returns float32.

    With the tables of `rope_table` the result is also rotated: adjacent channel pairs (2j, 2j+1) of
    every head, x [B, L, N·K].
    """

    eps: float

    @nn.compact
    def __call__(self, x, rope=None):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        scale = _row(scale.astype(jnp.float32), x.ndim)
        square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        inverse = jax.lax.rsqrt(square + self.eps)
        if rope is None:
            return x.astype(jnp.float32) * inverse * scale
        cos, sin = (table[None, :, None, :, None] for table in rope)

        def pairs(x):
            return x.reshape(*x.shape[:-1], -1, cos.shape[-2], 2)

        sign = _row(np.array([-1, 1], np.float32), 5)
        # partners are taken from x in its own dtype, so that XLA writes no float32 copy of the norm
        own = pairs(x).astype(jnp.float32) * pairs(scale)
        partner = pairs(x)[..., ::-1].astype(jnp.float32) * pairs(scale)[..., ::-1] * sign
        return (own * cos + partner * sin).reshape(x.shape) * inverse


def time_features(t, dim: int):
    """[cos(t w), sin(t w)] with w_k = 10000^(-k/(dim/2)), cosine first, float32; t in 0..1000,
    any shape."""
    half = dim // 2
    w = np.power(10000.0, -np.arange(half, dtype=np.float64) / half).astype(np.float32)
    angle = t.astype(jnp.float32)[..., None] * w.reshape((1,) * t.ndim + (half,))
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


@functools.lru_cache(maxsize=32)
def rope_table(grid: tuple[int, int, int], head_dim: int):
    """cos and sin [L, K/2] in float32 for tokens of a (T, H, W) grid, W fastest; computed in
    float64.

    Channels split as time, height, width with height = width = 2·(K//6); every axis has its own
    base 10000.
    """
    side = 2 * (head_dim // 6)
    dims = (head_dim - 2 * side, side, side)
    places = np.indices(grid).reshape(3, -1, 1)
    bases = [np.power(10000.0, -np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in dims]
    angle = np.concatenate([p * b for p, b in zip(places, bases, strict=True)], axis=1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def patchify(x_BTHWC, patch: tuple[int, int, int]):
    """Split into patches: [B, L, pt·ph·pw·C] tokens (T, H, W order, W fastest) and the token
    grid."""
    B, T, H, W, C = x_BTHWC.shape
    pt, ph, pw = patch
    if T % pt or H % ph or W % pw:
        raise ValueError(
            f"latent size {T}x{H}x{W} does not divide into patches {pt}x{ph}x{pw}; "
            "change frames, height or width"
        )
    grid = (T // pt, H // ph, W // pw)
    x = x_BTHWC.reshape(B, grid[0], pt, grid[1], ph, grid[2], pw, C)
    x = x.transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return x.reshape(B, math.prod(grid), pt * ph * pw * C), grid


def unpatchify(x_BLP, grid: tuple[int, int, int], patch: tuple[int, int, int]):
    """Invert `patchify`; the last axis is ordered (pt, ph, pw, C) with C fastest."""
    B, (t, h, w), (pt, ph, pw) = x_BLP.shape[0], grid, patch
    x = x_BLP.reshape(B, t, h, w, pt, ph, pw, -1).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return x.reshape(B, t * pt, h * ph, w * pw, -1)


def _row(vector, ndim: int):
    return vector.reshape((1,) * (ndim - 1) + vector.shape)
