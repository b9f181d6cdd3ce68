"""One attention function: a local kernel inside a shard_map over the mesh in use.

softmax(q kᵀ/√K) v without a mask, softmax in float32. Over `context` it is Ulysses (arXiv
2309.14509): all-to-all trades the token split for a head split, the kernel sees whole sequences,
and a second all-to-all trades back.

Shapes: B batch, L query tokens, S key tokens, N heads, K head dim.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from wanjax import sharding

KERNELS = ("auto", "xla", "cudnn", "splash")


def attend(q_BLNK, k_BSNK, v_BSNK, *, kernel: str = "auto", last_count: int = 1):
    """Attention output [B, L, N, K] in the dtype of q.

    Args:
      kernel: one of KERNELS; "auto" takes xla on CPU or for float32, cudnn on GPU, splash on TPU.
      last_count: how many times the last key/value row counts (it stands for that many equal rows).
    """
    local = functools.partial(_local, kernel=resolve(kernel, q_BLNK.dtype), last_count=last_count)
    mesh = sharding.mesh_shape()
    if math.prod(mesh.values()) <= 1:
        return local(q_BLNK, k_BSNK, v_BSNK)
    heads, ways = q_BLNK.shape[2], mesh["tensor"] * mesh["context"]
    if heads % ways:
        raise ValueError(
            f"{heads} heads do not divide over tensor*context = {ways}; change config.mesh"
        )
    self_attention = q_BLNK.shape[1] == k_BSNK.shape[1] and last_count == 1
    split = P(("data", "fsdp"), "context", "tensor", None)
    whole = P(("data", "fsdp"), None, "tensor", None)
    return jax.shard_map(
        functools.partial(_ulysses, local=local, split_keys=self_attention),
        in_specs=(split, split if self_attention else whole, split if self_attention else whole),
        out_specs=split,
        check_vma=False,
    )(q_BLNK, k_BSNK, v_BSNK)


def resolve(kernel: str, dtype) -> str:
    """The kernel that "auto" means on this backend; raises ValueError for an unknown name."""
    if kernel not in KERNELS:
        raise ValueError(
            f"attention kernel {kernel!r} is unknown; set model.attention to {KERNELS}"
        )
    if kernel != "auto":
        return kernel
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    return {"gpu": "cudnn", "tpu": "splash"}.get(jax.default_backend(), "xla")


def _ulysses(q, k, v, *, local, split_keys: bool):
    """Per device before: its tokens, its tensor-heads. Inside: all tokens, heads/context. After:
    its tokens again."""
    if jax.lax.axis_size("context") == 1:
        return local(q, k, v)
    to_heads = functools.partial(
        jax.lax.all_to_all, axis_name="context", split_axis=2, concat_axis=1, tiled=True
    )
    if split_keys:
        out = local(to_heads(q), to_heads(k), to_heads(v))
        return jax.lax.all_to_all(out, "context", split_axis=1, concat_axis=2, tiled=True)
    return local(q, k, v)  # few keys (text): every device holds them all, queries stay split


def _local(q, k, v, *, kernel: str, last_count: int):
    if kernel == "splash":
        return _splash(q, *_repeat_last(k, v, last_count))
    if kernel == "cudnn":
        k, v = _repeat_last(k, v, last_count)
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    bias = None
    if last_count != 1:
        bias = jnp.zeros((1, 1, 1, k.shape[1]), jnp.float32).at[..., -1].set(math.log(last_count))
        bias = jnp.broadcast_to(bias, (1, 1, q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(q, k, v, bias=bias, implementation="xla")


def _repeat_last(k, v, count: int):
    """Write the last row out `count` times, for kernels that take no bias."""

    def repeat(x):
        tail = jnp.broadcast_to(x[:, -1:], (x.shape[0], count - 1, *x.shape[2:]))
        return jnp.concatenate([x, tail], axis=1) if count > 1 else x

    return repeat(k), repeat(v)


def _splash(q, k, v):
    """TPU splash attention (jax Pallas); lengths are padded to 128 and the padding is masked by
    segment ids."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    L, S = q.shape[1], k.shape[1]
    pad_q, pad_k = -L % 128, -S % 128
    q = jnp.pad(q, ((0, 0), (0, pad_q), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
    k = jnp.pad(k, ((0, 0), (0, pad_k), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
    v = jnp.pad(v, ((0, 0), (0, pad_k), (0, 0), (0, 0))).transpose(0, 2, 1, 3)
    mask = splash.MultiHeadMask([splash.FullMask((L + pad_q, S + pad_k))] * q.shape[1])
    attention = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
    segments = (
        splash.SegmentIds(  # padded queries see the real keys, padded keys are seen by nobody
            q=jnp.zeros((L + pad_q,), jnp.int32), kv=(jnp.arange(S + pad_k) >= S).astype(jnp.int32)
        )
    )
    scaled = (q * (q.shape[-1] ** -0.5)).astype(q.dtype)
    heads = jax.vmap(lambda q, k, v: attention(q, k, v, segment_ids=segments))
    out: jax.Array = heads(scaled, k, v)  # pyright: ignore[reportAssignmentType]
    return out.transpose(0, 2, 1, 3)[:, :L].astype(q.dtype)
