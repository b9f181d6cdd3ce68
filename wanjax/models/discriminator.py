"""The GAN head of DMD2: it tells generated clips from real ones by the outputs of a model's blocks.

Every tapped block has its own small network per token, layer norm -> dense -> silu -> dense -> one
logit, so that a clip gets a logit for each position and depth. The taps follow FastGen's recipes
for Wan: halfway, three quarters, and the last block.

Shapes: N tapped blocks, B batch, L tokens, D model width.
"""

import jax
import jax.numpy as jnp

from wanjax.models import wan

_WIDTH, _EPS = 256, 1e-6


def taps(config: wan.WanConfig) -> tuple[int, ...]:
    """Numbers of the tapped blocks, at most three."""
    layers = config.num_layers
    return tuple(sorted({layers // 2, 3 * layers // 4, layers - 1}))


def init(key, config: wan.WanConfig) -> dict:
    """Parameters of the head, float32; its logits start at zero."""
    taps_N = len(taps(config))
    draw = jax.random.normal(key, (taps_N, config.dim, _WIDTH), jnp.float32)
    return {
        "hidden": {"kernel": draw / config.dim**0.5, "bias": jnp.zeros((taps_N, _WIDTH))},
        "out": {"kernel": jnp.zeros((taps_N, _WIDTH)), "bias": jnp.zeros(taps_N)},
    }


def logits(head: dict, features_NBLD):
    """Logits [B, N·L] float32 of clips with these features (see wan.features)."""
    x = features_NBLD.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + _EPS)
    hidden, out = head["hidden"], head["out"]
    x = jnp.einsum("NBLD,NDH->NBLH", x, hidden["kernel"]) + hidden["bias"][:, None, None]
    x = jnp.einsum("NBLH,NH->BNL", jax.nn.silu(x), out["kernel"]) + out["bias"][None, :, None]
    return x.reshape(len(x), -1)
