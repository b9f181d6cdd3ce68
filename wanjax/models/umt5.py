"""UMT5 text encoder, the prompt encoder of every Wan model.

A T5 encoder without biases and without attention scaling; unlike T5, each layer has its own
relative position bias:
    a = softmax(q·k + bias_layer[bucket(j − i)])        x ← x + o(a·v)
    x ← x + wo(gelu_tanh(wi_0·n) ⊙ wi_1·n)              n = rms_norm(x)

Papers: UniMax / umT5, https://arxiv.org/abs/2304.09151; T5, https://arxiv.org/abs/1910.10683.
Oracle: transformers.UMT5EncoderModel. Matmuls run in the dtype of the parameters; RMS norm and
softmax in float32.

B batch  S text tokens (Q: the same as queries)  E model width (the DiT's text_dim)
N heads  K head dim  F ffn
"""

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class UMT5Config:
    """Fields as in transformers' UMT5Config; the defaults are UMT5-XXL, used by all Wan models."""

    vocab_size: int = 256384
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6


def init(key, config: UMT5Config):
    """Return float32 parameters with T5's initial scales (unit embeddings, fan-in projections)."""
    k_embed, k_block = jax.random.split(key)
    x_BSE, mask_BS = jnp.zeros((1, 1, config.d_model)), jnp.ones((1, 1), bool)
    bucket_QS = relative_buckets(1, config)

    def init_layer(key):
        return Layer(config).init(key, x_BSE, mask_BS, bucket_QS)["params"]

    return {
        "shared": {"embedding": jax.random.normal(k_embed, (config.vocab_size, config.d_model))},
        "encoder": {
            "block": jax.vmap(init_layer)(jax.random.split(k_block, config.num_layers)),
            "final_layer_norm": {"scale": jnp.ones(config.d_model)},
        },
    }


def encode(params, ids_BS, mask_BS, *, config: UMT5Config):
    """Return the last hidden state ctx_BSE; rows with mask 0 are zero.

    An id outside the vocabulary gives NaN rows rather than another token's embedding. Masked
    positions do not affect the others, so any amount of right padding gives the same rows.
    """
    mask_BS = mask_BS.astype(bool)
    bucket_QS = relative_buckets(ids_BS.shape[1], config)
    x_BSE = jnp.take(params["shared"]["embedding"], ids_BS, axis=0, mode="fill")

    def layer(x_BSE, layer_params) -> tuple[Any, None]:
        return Layer(config).apply({"params": layer_params}, x_BSE, mask_BS, bucket_QS), None

    x_BSE, _ = jax.lax.scan(layer, x_BSE, params["encoder"]["block"])
    x_BSE = jnp.where(mask_BS[..., None], x_BSE, 0)  # a zero row is still zero after the norm
    norm = nn.RMSNorm(epsilon=config.layer_norm_epsilon)
    return norm.apply({"params": params["encoder"]["final_layer_norm"]}, x_BSE)


class Layer(nn.Module):
    """Self-attention with relative bias, then gated feed-forward; names as in transformers."""

    config: UMT5Config

    @nn.compact
    def __call__(self, x_BSE, mask_BS, bucket_QS):
        c = self.config
        E, N, K, F = c.d_model, c.num_heads, c.d_kv, c.d_ff

        def norm(name):
            return nn.RMSNorm(epsilon=c.layer_norm_epsilon, name=name)

        def dense(name, out, std):
            init = nn.initializers.normal(std)
            return nn.Dense(out, use_bias=False, kernel_init=init, name=name)

        def heads(y):
            return y.reshape(*y.shape[:2], N, K)

        n_BSE = norm("layer.0.layer_norm")(x_BSE)
        q_BQNK = heads(dense("layer.0.SelfAttention.q", N * K, (E * K) ** -0.5)(n_BSE))
        k_BSNK = heads(dense("layer.0.SelfAttention.k", N * K, E**-0.5)(n_BSE))
        v_BSNK = heads(dense("layer.0.SelfAttention.v", N * K, E**-0.5)(n_BSE))
        name = "layer.0.SelfAttention.relative_attention_bias"
        init = nn.initializers.normal(E**-0.5)
        bias = nn.Embed(c.relative_attention_num_buckets, N, embedding_init=init, name=name)
        bias_NQS = bias(bucket_QS).astype(jnp.float32).transpose(2, 0, 1)
        s_BNQS = jnp.einsum("BQNK,BSNK->BNQS", q_BQNK, k_BSNK, preferred_element_type=jnp.float32)
        s_BNQS = s_BNQS + bias_NQS[None]
        s_BNQS = jnp.where(mask_BS[:, None, None, :], s_BNQS, jnp.finfo(jnp.float32).min)
        a_BNQS = jax.nn.softmax(s_BNQS, axis=-1).astype(v_BSNK.dtype)
        y_BQNK = jnp.einsum("BNQS,BSNK->BQNK", a_BNQS, v_BSNK)
        joined = y_BQNK.reshape(*x_BSE.shape[:2], N * K)
        x_BSE = x_BSE + dense("layer.0.SelfAttention.o", E, (N * K) ** -0.5)(joined)

        n_BSE = norm("layer.1.layer_norm")(x_BSE)
        gate_BSF = dense("layer.1.DenseReluDense.wi_0", F, E**-0.5)(n_BSE)
        up_BSF = dense("layer.1.DenseReluDense.wi_1", F, E**-0.5)(n_BSE)
        h_BSF = nn.gelu(gate_BSF, approximate=True) * up_BSF
        return x_BSE + dense("layer.1.DenseReluDense.wo", E, F**-0.5)(h_BSF)


def relative_buckets(length: int, config: UMT5Config) -> np.ndarray:
    """Return the bucket of every offset j − i as int32 [Q,S]; the upper half is for j > i.

    Small distances have a bucket each, larger ones share logarithmic buckets up to the maximum
    distance. Powers of two are exactly on an edge: host float64 and a tolerance give the upper
    bucket on every platform, as the float32 reference does.
    """
    half = config.relative_attention_num_buckets // 2
    exact = half // 2
    offset_QS = np.arange(length)[None, :] - np.arange(length)[:, None]
    distance_QS = np.abs(offset_QS)
    span = math.log(config.relative_attention_max_distance / exact)
    log_QS = np.log(np.maximum(distance_QS, 1) / exact) / span * (half - exact)
    large_QS = np.minimum(exact + np.floor(log_QS + 1e-9), half - 1)
    bucket_QS = np.where(distance_QS < exact, distance_QS, large_QS)
    return (bucket_QS + np.where(offset_QS > 0, half, 0)).astype(np.int32)
