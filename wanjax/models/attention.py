"""One attention function over the mesh in use: a local kernel, and Ulysses, ring or both over
`context`. One module, because mesh forms, derivative and kernels share `_Plan` and the lse.

softmax(q kᵀ/√K) v without a mask, softmax in float32. A kernel is two functions that share the
log-sum-exp of each row: forward gives (out, lse), backward gives (dq, dk, dv) from them. So one
custom derivative serves them all, names out and lse of self-attention for remat policies (`NAMES`),
and a ring merges partial results exactly. Ulysses (arXiv 2309.14509) trades the token split for a
head split by all-to-all; a ring (arXiv 2310.01889) passes keys and values around, together with
their gradients.

Shapes: B batch, L query tokens, S key tokens, N heads, K head dim; lse_BNL.
"""

import functools
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from wanjax.parallel import sharding

FORMS = ("auto", "ulysses", "ring")
NAMES = ("attention_out", "attention_lse")
# Largest tiles of splash attention by kind of chip, forward and backward: query rows, key rows, key
# rows of one product. Those of v6 and 7x forward come from MaxDiffusion's search on such chips; the
# others are the largest of a few that XLA:TPU fits into VMEM with several samples per chip (2048
# query rows fit one sample only), and were never timed.
TILES = {
    "TPU v6": ((3328, 2816, 256), (2048, 2048, 256)),
    "TPU7": ((4864, 1024, 256), (2048, 2048, 256)),
    "": ((1024, 1024, 512), (1024, 1024, 512)),  # v4, v5e, v5p
}
_EMPTY = -1e30  # lse of no keys; finite, so that two of them merge without nan


@dataclass(frozen=True)
class _Plan:
    """Static facts about one call."""

    kernel: str
    ulysses: int  # devices of `context` that trade tokens for heads
    ring: int  # groups of such devices that pass keys and values around
    shared_keys: bool  # every device holds all keys (text)
    length: int  # real rows of k; later ones are padding
    last_count: int


def attend(q_BLNK, k_BSNK, v_BSNK, *, kernel="auto", form="auto", last_count=1, length=None):
    """Attention output [B, L, N, K] in the dtype of q.

    Args:
      kernel: "auto" (see `resolve`) or one of KERNELS.
      form: how `context` is used, see `context_form`; token counts it does not divide are padded
        and the padding is masked.
      last_count: how many times the last key/value row counts (it stands for that many equal rows).
      length: number of real rows of k; the rest are padding that nothing attends to.
    """
    kernel = resolve(kernel, q_BLNK.dtype, q_BLNK.shape[-1])
    mesh = sharding.mesh_shape()
    L, S, heads = q_BLNK.shape[1], k_BSNK.shape[1], q_BLNK.shape[2]
    shared_keys = S != L or last_count > 1
    ulysses, ring = context_form(heads, mesh, form)
    plan = _Plan(kernel, ulysses, ring, shared_keys, length or S, last_count)
    if rows := -L % mesh.get("context", 1):
        q_BLNK = _pad_rows(q_BLNK, L + rows)
        if not shared_keys:
            k_BSNK, v_BSNK = _pad_rows(k_BSNK, L + rows), _pad_rows(v_BSNK, L + rows)
    out: jax.Array = _attention(q_BLNK, k_BSNK, v_BSNK, plan)  # pyright: ignore
    return out[:, :L]


def resolve(kernel: str, dtype, head_dim: int) -> str:
    """The kernel that runs. "auto" takes splash on TPU; on GPU FlashAttention-3 when it is
    installed and fits (Hopper, head dim 128), else cudnn; xla on CPU and for float32.

    Raises ValueError for an unknown name, or for fa3 where it cannot run.
    """
    names = ("auto", *KERNELS)
    if kernel not in names:
        raise ValueError(f"attention kernel {kernel!r} is unknown; set model.attention to {names}")
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    fits = half and head_dim == 128
    installed = importlib.util.find_spec("flash_attn3_jax") is not None
    if kernel == "fa3" and not (fits and installed):
        raise ValueError(
            f"attention kernel 'fa3' needs bfloat16, head dim 128 and the extra wanjax[fa3]; found "
            f"{jnp.dtype(dtype).name}, head dim {head_dim}, flash_attn3_jax "
            f"{'installed' if installed else 'missing'}; set model.attention = 'auto'"
        )
    if kernel != "auto":
        return kernel
    backend = jax.default_backend()
    if not half or backend not in ("gpu", "tpu"):
        return "xla"
    if backend == "tpu":
        return "splash"
    hopper = str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")
    return "fa3" if fits and installed and hopper else "cudnn"


def tiles() -> tuple:
    """Entry of `TILES` for the chips of the mesh in use, else of this machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return next(sizes for kind, sizes in TILES.items() if device.device_kind.startswith(kind))


def describe(kernel: str) -> str:
    """The kernel that `resolve` returned, with its tiles on this chip."""
    if kernel != "splash":
        return kernel
    words = (f"{q} x {k} by {product}" for q, k, product in tiles())
    return f"splash in tiles of {' and '.join(words)} (forward and backward)"


def context_form(heads: int, mesh: dict[str, int], form: str = "auto") -> tuple[int, int]:
    """(ulysses, ring), whose product is the `context` axis.

    "auto" gives Ulysses as many devices as divide the heads of one tensor shard and the ring the
    rest; "ulysses" and "ring" use that form alone. Raises ValueError if that is impossible.
    """
    if form not in FORMS:
        raise ValueError(f"context form {form!r} is unknown; set model.context to one of {FORMS}")
    tensor, context = mesh.get("tensor", 1), mesh.get("context", 1)
    if heads % tensor:
        raise ValueError(
            f"{heads} heads do not divide over mesh.tensor = {tensor}; "
            f"set config.mesh.tensor to one of {_divisors(heads)}"
        )
    local = heads // tensor
    if form == "ulysses" and local % context:
        raise ValueError(
            f"{local} heads do not divide over mesh.context = {context} with model.context = "
            f"'ulysses'; set it to 'auto', or config.mesh.context to one of {_divisors(local)}"
        )
    ulysses = 1 if form == "ring" else math.gcd(local, context)
    return ulysses, context // ulysses


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# ---- one derivative for every kernel and form ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q, k, v, plan: _Plan):
    return _over_mesh(_forward, plan, "qkk", "ql")(q, k, v)[0]


def _attention_fwd(q, k, v, plan: _Plan):
    out, lse = _over_mesh(_forward, plan, "qkk", "ql")(q, k, v)
    if not plan.shared_keys:  # attention to text is cheap to recompute and no smaller to keep
        out, lse = checkpoint_name(out, NAMES[0]), checkpoint_name(lse, NAMES[1])
    return out, (q, k, v, out, lse)


def _attention_bwd(plan: _Plan, saved, d_out):
    return _over_mesh(_backward, plan, "qkkqlq", "qkk")(*saved, d_out)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _over_mesh(fn, plan: _Plan, inputs: str, outputs: str) -> Callable:
    """fn(*arrays, plan) on the shards of every device; q and k name the layouts, l that of lse.

    Under a pipeline too, where only `stage` is manual: XLA cannot partition the GPU kernels there.
    """
    fn = functools.partial(fn, plan=plan)
    if math.prod(sharding.mesh_shape().values()) <= 1:
        return fn
    batch = ("data", "fsdp")
    layouts = {
        "q": P(batch, "context", "tensor", None),
        "k": P(batch, None if plan.shared_keys else "context", "tensor", None),
        "l": P(batch, ("tensor", "context"), None),  # as each device left it
    }
    here = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        fn,
        in_specs=tuple(layouts[name] for name in inputs),
        out_specs=tuple(layouts[name] for name in outputs),
        axis_names=set(here.axis_names) - set(here.manual_axes),
        check_vma=False,
    )


def _forward(q, k, v, *, plan: _Plan):
    """Per device before and after: its own tokens, all heads of its tensor shard. Inside: the
    tokens of its Ulysses group, heads/ulysses."""
    forward = functools.partial(KERNELS[plan.kernel][0], last_count=plan.last_count)
    if plan.shared_keys:  # few keys (text): every device holds them all, queries stay split
        return forward(q, k, v)
    # heads are traded in one piece: two or four cost 1 to 5 % on two H200 (RESULTS.md)
    q, k, v = (_to_heads(x, plan) for x in (q, k, v))
    if plan.ring == 1:
        out, lse = forward(q, k[:, : plan.length], v[:, : plan.length])
        return _to_tokens(out, plan), lse

    def hop(carry, i):
        k, v, out, lse = carry
        ahead = _rotate((k, v), plan)
        part, part_lse = _on_real_rows(forward, _no_keys, i, plan, q, k, v)
        merged = jnp.logaddexp(lse, part_lse)
        out = out * _per_row(lse - merged) + part.astype(jnp.float32) * _per_row(part_lse - merged)
        return (*ahead, out, merged), None

    out, lse = _no_keys(q)
    start = (k, v, out.astype(jnp.float32), lse)
    (_, _, out, lse), _ = jax.lax.scan(hop, start, jnp.arange(plan.ring))
    return _to_tokens(out.astype(q.dtype), plan), lse


def _backward(q, k, v, out, lse, d_out, *, plan: _Plan):
    """Gradients in the layout of q, k, v; the lse over all keys makes each hop's share exact."""
    backward = functools.partial(KERNELS[plan.kernel][1], last_count=plan.last_count)
    if plan.shared_keys:
        dq, dk, dv = backward(q, k, v, out, lse, d_out)
        if sharding.mesh_shape().get("context", 1) > 1:
            dk, dv = jax.lax.psum((dk, dv), "context")
        return dq, dk, dv
    q, k, v, out, d_out = (_to_heads(x, plan) for x in (q, k, v, out, d_out))

    def padded(q, k_real, v_real):
        dq, *dkv = backward(q, k_real, v_real, out, lse, d_out)
        return dq, *(_pad_rows(x, k.shape[1]) for x in dkv)

    if plan.ring == 1:
        parts = padded(q, k[:, : plan.length], v[:, : plan.length])
        return tuple(_to_tokens(x, plan) for x in parts)

    def nothing(q):
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)

    def hop(carry, i):  # dk and dv travel with the keys and are home after a full round
        k, v, dq, dk, dv = carry
        ahead = _rotate((k, v), plan)
        parts = _on_real_rows(padded, nothing, i, plan, q, k, v)
        pairs = zip((dq, dk, dv), parts, strict=True)
        dq, dk, dv = (x + part.astype(jnp.float32) for x, part in pairs)
        return (*ahead, dq, *_rotate((dk, dv), plan)), None

    zero = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    (_, _, *gradients), _ = jax.lax.scan(hop, (k, v, *zero), jnp.arange(plan.ring))
    return tuple(_to_tokens(g.astype(q.dtype), plan) for g in gradients)


def _trade(x, plan: _Plan, split: int, concat: int):
    if plan.ulysses == 1:
        return x
    group, groups = plan.ulysses, None
    if plan.ring > 1:
        groups = [list(range(g * group, (g + 1) * group)) for g in range(plan.ring)]
    return jax.lax.all_to_all(x, "context", split, concat, tiled=True, axis_index_groups=groups)


# [B, own tokens, N, K] -> [B, tokens of the group, N/ulysses, K], and back
_to_heads = functools.partial(_trade, split=2, concat=1)
_to_tokens = functools.partial(_trade, split=1, concat=2)


def _rotate(tree, plan: _Plan):
    """Send to the same place of the next group."""
    group, n = plan.ulysses, plan.ulysses * plan.ring
    return jax.lax.ppermute(tree, "context", [(i, (i + group) % n) for i in range(n)])


def _on_real_rows(fn, empty, hop, plan: _Plan, q, k, v):
    """fn(q, k, v) on the rows of the visiting chunk that are not padding, empty(q) if all are.

    One branch per number of real rows keeps masks out of the kernels.
    """
    rows = k.shape[1]
    counts = [min(max(plan.length - g * rows, 0), rows) for g in range(plan.ring)]
    kinds = sorted(set(counts))

    def branch(n):
        return lambda q, k, v: fn(q, k[:, :n], v[:, :n]) if n else empty(q)

    if len(kinds) == 1:
        return fn(q, k, v)
    group = (jax.lax.axis_index("context") // plan.ulysses - hop) % plan.ring
    kind = jnp.array([kinds.index(count) for count in counts])[group]
    return jax.lax.switch(kind, [branch(n) for n in kinds], q, k, v)


def _no_keys(q):
    B, L, N, _ = q.shape
    return jnp.zeros_like(q), jnp.full((B, N, L), _EMPTY, jnp.float32)


def _per_row(lse_BNL):
    return jnp.exp(lse_BNL).transpose(0, 2, 1)[..., None]


def _pad_rows(x, rows: int):
    return jnp.pad(x, ((0, 0), (0, rows - x.shape[1]), (0, 0), (0, 0)))


# ---- kernels: forward(q, k, v) -> out, lse; backward(q, k, v, out, lse, d_out) -> dq, dk, dv ----


def _xla(q, k, v, last_count: int):
    logits = _logits(q, k, last_count)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None]).astype(v.dtype)
    return jnp.einsum("BNLS,BSNK->BLNK", weights, v), lse


def _xla_backward(q, k, v, out, lse, d_out, last_count: int):
    weights = jnp.exp(_logits(q, k, last_count) - lse[..., None])
    dots = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    inner = dots("BLNK,BLNK->BNL", out, d_out)
    d_weights = dots("BLNK,BSNK->BNLS", d_out, v)
    d_logits = weights * (d_weights - inner[..., None]) / math.sqrt(q.shape[-1])
    d_logits, weights = d_logits.astype(q.dtype), weights.astype(q.dtype)
    dq = jnp.einsum("BNLS,BSNK->BLNK", d_logits, k)
    dk = jnp.einsum("BNLS,BLNK->BSNK", d_logits, q)
    return dq, dk, jnp.einsum("BNLS,BLNK->BSNK", weights, d_out)


def _logits(q, k, last_count: int):
    logits = jnp.einsum("BLNK,BSNK->BNLS", q, k, preferred_element_type=jnp.float32)
    logits = logits / math.sqrt(q.shape[-1])
    return logits if last_count == 1 else logits.at[..., -1].add(math.log(last_count))


def _written_out(forward, backward):
    """Give a kernel pair that cannot weight rows the argument last_count: the row is repeated."""

    def repeated(x, count: int):
        tail = jnp.broadcast_to(x[:, -1:], (x.shape[0], count - 1, *x.shape[2:]))
        return jnp.concatenate([x, tail], axis=1) if count > 1 else x

    def folded(x, rows: int):
        last = x[:, rows - 1 :].astype(jnp.float32).sum(1, keepdims=True).astype(x.dtype)
        return jnp.concatenate([x[:, : rows - 1], last], axis=1) if x.shape[1] > rows else x

    def run(q, k, v, last_count: int):
        return forward(q, repeated(k, last_count), repeated(v, last_count))

    def run_backward(q, k, v, out, lse, d_out, last_count: int):
        rows = k.shape[1]
        k, v = repeated(k, last_count), repeated(v, last_count)
        dq, dk, dv = backward(q, k, v, out, lse, d_out)
        return dq, folded(dk, rows), folded(dv, rows)

    return run, run_backward


def _cudnn(q, k, v):
    """cuDNN through jax's own binding; jax.nn rounds its lse to the dtype of q, which is too
    coarse to differentiate with."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    scale = 1 / math.sqrt(q.shape[-1])
    return cudnn.dot_product_attention(q, k, v, scale=scale, return_residual=True)


def _cudnn_backward(q, k, v, out, lse, d_out):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = jnp.zeros(0, q.dtype)
    static = dict(
        scale=1 / math.sqrt(q.shape[-1]),
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:  # jax 0.12
        static["score_mod"] = None
    backward = cudnn._dot_product_attention_bwd_p_wrapper
    return backward.bind(q, k, v, *(unused,) * 7, lse, out, d_out, **static)


def _fa3(q, k, v):
    """FlashAttention-3 (arXiv 2407.08608) from the wheel flash-attn3-jax."""
    from flash_attn3_jax import flash_hlo  # pyright: ignore[reportMissingImports]

    return flash_hlo._flash_mha_fwd_hlo(q, k, v, 1 / math.sqrt(q.shape[-1]), False, (-1, -1))


def _fa3_backward(q, k, v, out, lse, d_out):
    """The wheel's own wrapper (0.2.3) gives the kernel two buffers padded to multiples of 128 rows,
    but its tiles of 80 rows write up to the next multiple of 80, past the end of both (gradients
    300 times too large at 1,024 rows). So we call the kernel ourselves, with buffers for both."""
    from flash_attn3_jax import flash_hlo  # pyright: ignore # noqa: F401 (registers the kernel)

    B, L, N, _ = q.shape
    rows = jax.ShapeDtypeStruct((B, N, -(-L // 640) * 640), jnp.float32)
    results = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), rows, rows]
    absent = jnp.zeros(0, jnp.int32)
    call = jax.ffi.ffi_call(
        "flash_mha_bwd", results, input_layouts=[None] * 10, output_layouts=[None] * 5
    )
    static = dict(
        max_seqlen_q_val=L,
        max_seqlen_q_has_value=True,
        max_seqlen_k_val=k.shape[1],
        max_seqlen_k_has_value=True,
        softmax_scale_val=1 / math.sqrt(q.shape[-1]),
        softmax_scale_has_value=True,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic="deterministic_ops=true" in os.environ.get("XLA_FLAGS", ""),
        sm_margin=0,
    )
    return call(d_out, q, k, v, out, lse, *[absent] * 4, **static)[:3]


def _splash(q, k, v):
    """TPU splash attention (jax Pallas) in the tiles of `TILES`; lengths are padded to whole tiles
    and the padding is masked by segment ids."""
    kernel, segments, (rows, columns) = _splash_kernel(q, k, tiles()[0])
    run = functools.partial(kernel, segment_ids=segments)
    out, (lse,) = jax.vmap(run)(_scaled(q, rows), *(_head_major(x, columns) for x in (k, v)))
    L = q.shape[1]
    return out.transpose(0, 2, 1, 3)[:, :L].astype(q.dtype), lse[..., :L]


def _splash_backward(q, k, v, out, lse, d_out):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel, segments, (rows, columns) = _splash_kernel(q, k, tiles()[1])
    masks = (kernel.dq_mask_info, kernel.dkv_mask_info)

    def run(q, k, v, out, lse, d_out):
        saved = (q, k, v, segments, None, out, lse, *masks)
        return splash._splash_attention_bwd(res=saved, do=d_out, **kernel.kwargs)[3:6]

    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, rows - q.shape[1])))
    keys, values = _head_major(k, columns), _head_major(v, columns)
    out, d_out = _head_major(out, rows), _head_major(d_out, rows)
    found = jax.vmap(run)(_scaled(q, rows), keys, values, out, lse, d_out)
    dq, dk, dv = (g.transpose(0, 2, 1, 3) for g in found)
    dq = dq[:, : q.shape[1]] * q.shape[-1] ** -0.5
    return dq.astype(q.dtype), dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _scaled(q, rows: int):
    """Queries scaled beforehand, because the kernel does not scale."""
    return _head_major((q * (q.shape[-1] ** -0.5)).astype(q.dtype), rows)


def _head_major(x_BLNK, rows: int):
    return _pad_rows(x_BLNK, rows).transpose(0, 2, 1, 3)


def _splash_kernel(q, k, largest: tuple[int, int, int]):
    """(kernel, segment ids, padded lengths of queries and keys)."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    L, S, heads = q.shape[1], k.shape[1], q.shape[2]
    tile_q, _ = _tile(L, largest[0], 128)
    tile_k, compute = _tile(S, *largest[1:])
    rows, columns = (-(-n // tile) * tile for n, tile in ((L, tile_q), (S, tile_k)))
    sizes = splash.BlockSizes(
        tile_q, tile_k, compute, tile_q, tile_k, compute, block_q_dq=tile_q, block_kv_dq=tile_k
    )
    mask = splash.MultiHeadMask([splash.FullMask((rows, columns))] * heads)
    kernel = splash.make_splash_mha(
        mask=mask, head_shards=1, q_seq_shards=1, save_residuals=True, block_sizes=sizes
    )
    segments = splash.SegmentIds(  # padded queries see the real keys, nothing sees padded keys
        q=jnp.zeros((rows,), jnp.int32), kv=(jnp.arange(columns) >= S).astype(jnp.int32)
    )
    return kernel, segments, (rows, columns)


def _tile(rows: int, most: int, unit: int) -> tuple[int, int]:
    """(rows of a tile, rows of a product in it): as few equal tiles as possible."""
    unit = min(unit, -(-rows // 128) * 128)
    share = math.ceil(rows / math.ceil(rows / most))
    return -(-share // unit) * unit, unit


KERNELS = {
    "xla": (_xla, _xla_backward),
    "cudnn": _written_out(_cudnn, _cudnn_backward),
    "fa3": _written_out(_fa3, _fa3_backward),
    "splash": _written_out(_splash, _splash_backward),
}
