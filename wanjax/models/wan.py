"""The Wan video diffusion transformer: one module and one config for every variant (arXiv
2503.20314). One file, because init, denoise, storage and sharding share its parameter paths.

v = denoise(params, lora, x_t, t, text): patches -> blocks of {self-attention with 3D rotary
embedding, cross-attention to text (and CLIP image tokens), feed-forward}, each modulated by the
time embedding -> velocity v = noise − clean latent. Parameter paths are the diffusers names of
WanTransformer3DModel; blocks are stacked on a leading layer axis.

Shapes: B batch, T latent frames, H W latent height/width, C channels, L tokens, D model, N heads,
K head dim, F ffn, S text tokens, E text dim, M distinct times per sample.
"""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from wanjax import trees
from wanjax.models import attention, blocks, layers, pipeline, quant
from wanjax.parallel import sharding

STACK = "blocks"
STAGES = "stages"  # the same leaves in the layout of a pipeline, see `stage`
RUN_FIELDS = ("text_len", "dtype", "attention", "context", "remat", "interleave")  # of WanConfig
FLOAT32 = ("time_embedder", "time_proj", "scale_shift_table", "norm", "pos_embed")


@dataclass(frozen=True)
class WanConfig:
    """Fields of diffusers' transformer/config.json, then how wanjax runs the model."""

    num_attention_heads: int
    attention_head_dim: int
    num_layers: int
    ffn_dim: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    cross_attn_norm: bool = True
    qk_norm: str = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None  # width of CLIP image tokens (Wan2.1 I2V)
    added_kv_proj_dim: int | None = None  # key/value width of those tokens
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None  # learned positions of two images' tokens (FLF2V)
    text_len: int = 512  # text rows the model was trained with; the output depends on it
    dtype: str = "float32"  # matmul dtype; norms, modulation, rotary, time and softmax stay float32
    attention: str = "auto"  # kernel, see attention.resolve
    context: str = "auto"  # attention over that mesh axis, see attention.context_form
    remat: str = "none"  # see blocks.REMAT
    interleave: int = 1  # chunks of layers per pipeline stage, see pipeline

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def denoise(params, lora, x_BTHWC, t_B, ctx_BSE, cond=None, *, config: WanConfig):
    """Velocity v [B,T,H,W,C_out] float32 of the noisy latents x at times t in 0..1000.

    Args:
      params: tree of `init`; lora: adapter tree (module path -> a, b, scale) or None.
      t_B: [B], or [B, M] with cond["time_index"] [L] giving which of the M times each token has
        (TI2V-5B).
      ctx_BSE: text rows; missing rows up to config.text_len are zero rows by definition, and are
        accounted for exactly.
      cond: optional {"latents": extra input channels [B,T,H,W,C'], "image": CLIP tokens
        [B,S',E'], "time_index"}.
    Raises ValueError when channels, text length or patch division do not fit config.
    """
    h, side, block, leave = _enter(params, lora, x_BTHWC, t_B, ctx_BSE, cond, config)
    lora = lora or {}
    if sharding.mesh_shape().get("stage", 1) > 1:
        stack, lora_stack = (stage(tree, config).get(STAGES, {}) for tree in (params, lora))
        run = functools.partial(pipeline.run_blocks, layers=config.num_layers)
    else:
        stack, lora_stack, run = params[STACK], lora.get(STACK, {}), blocks.run_blocks
    return leave(run(block, stack, lora_stack, h, side, remat=config.remat))


def features(params, lora, x_BTHWC, t_B, ctx_BSE, cond=None, *, config: WanConfig, layers):
    """Outputs [len(layers),B,L,D] of the blocks with these ascending numbers, in config.dtype; no
    block after the last of them runs. Arguments as in `denoise`; not under a pipeline."""
    if sharding.mesh_shape().get("stage", 1) > 1:
        raise ValueError(
            "features of single blocks cannot be read under a pipeline; set config.mesh.stage to 1"
        )
    h, side, block, _ = _enter(params, lora, x_BTHWC, t_B, ctx_BSE, cond, config)
    length = math.prod(n // p for n, p in zip(x_BTHWC.shape[1:4], config.patch_size, strict=True))
    found, first = [], 0
    for last in layers:
        part = functools.partial(jax.tree.map, operator.itemgetter(slice(first, last + 1)))
        stack, lora_stack = (part(tree.get(STACK, {})) for tree in (params, lora or {}))
        h = blocks.run_blocks(block, stack, lora_stack, h, side, remat=config.remat)
        found.append(h[:, :length])  # pyright: ignore
        first = last + 1
    return jnp.stack(found)


def _enter(params, lora, x, t_B, ctx_BSE, cond, config: WanConfig):
    """The part of `denoise` around its blocks: (tokens h [B,L,D], side inputs of every block,
    block, function h -> velocity)."""
    cond, lora = cond or {}, lora or {}
    if "latents" in cond:
        x = jnp.concatenate([x, cond["latents"].astype(x.dtype)], axis=-1)
    _check(config, x, ctx_BSE, cond, t_B)
    patches, grid = layers.patchify(x, config.patch_size)
    rope, time_index = layers.rope_table(grid, config.attention_head_dim), cond.get("time_index")
    L = patches.shape[1]
    rows = -L % sharding.mesh_shape().get("context", 1)  # padding tokens that nothing attends to
    if rows:
        patches = jnp.pad(patches, ((0, 0), (0, rows), (0, 0)))
        rope = tuple(np.pad(table, ((0, rows), (0, 0))) for table in rope)
        if time_index is not None:
            time_index = jnp.pad(jnp.atleast_2d(time_index), ((0, 0), (0, rows)))
    t_BM = t_B if t_B.ndim == 2 else t_B[:, None]

    rest = config.text_len - ctx_BSE.shape[1]
    if rest:  # the missing rows are equal, so one zero row stands for all of them
        ctx_BSE = jnp.pad(ctx_BSE, ((0, 0), (0, 1), (0, 0)))

    def outer(module, *args) -> Any:
        return module.apply({"params": params, "lora": lora}, *args)

    given = (patches, t_BM, ctx_BSE, cond.get("image"))
    h, e_BMD, e6_BM6D, ctx, image = outer(_Embeddings(config), *given)
    h = sharding.constrain(h, "batch", "tokens", None)
    layer = Block(config, max(rest, 1), L)
    if time_index is not None:
        time_index = jnp.broadcast_to(time_index, (len(h), L + rows))
    side = {"ctx": ctx, "image": image, "e6": e6_BM6D, "time_index": time_index}

    def block(layer_params, layer_lora, h, side):
        out = layer.apply({"params": layer_params, "lora": layer_lora}, h, **side, rope=rope)
        return sharding.constrain(out, "batch", "tokens", None)

    def leave(h):
        y_BLP = outer(_Head(config), h, e_BMD, time_index)[:, :L]
        return layers.unpatchify(y_BLP, grid, config.patch_size)

    return h, side, block, leave


def init(key, config: WanConfig):
    """Random parameters in float32 (jax.eval_shape gives their shapes without memory)."""
    keys = jax.random.split(key, 3)
    rope = layers.rope_table((1, 1, 1), config.attention_head_dim)
    token, time = jnp.zeros((1, 1, config.dim)), jnp.zeros((1, 1))
    patch = jnp.zeros((1, 1, math.prod(config.patch_size) * config.in_channels))
    text = jnp.zeros((1, 1, config.text_dim))
    image = None
    if config.image_dim is not None:
        image = jnp.zeros((1, config.pos_embed_seq_len or 1, config.image_dim))
    embeddings = _Embeddings(config).init(keys[0], patch, time, text, image)["params"]
    head = _Head(config).init(keys[1], token, token, None)["params"]

    def one(key):
        image = None if config.added_kv_proj_dim is None else token
        e6 = jnp.zeros((1, 1, 6, config.dim))
        return Block(config, 1).init(key, token, token, image, e6, None, rope)["params"]

    stack = jax.vmap(one)(jax.random.split(keys[2], config.num_layers))
    return {**embeddings, **head, STACK: stack}


def check_mesh(config: WanConfig, mesh: dict[str, int], batch: int, tokens: int) -> None:
    """Raise ValueError, naming the legal values, when the model cannot run like this on a mesh of
    these sizes. Any number of tokens >= mesh.context and of layers >= chunks is fine."""
    size = {axis: mesh.get(axis, 1) for axis in sharding.AXES}
    attention.resolve(config.attention, config.dtype, config.attention_head_dim)
    attention.context_form(config.num_attention_heads, size, config.context)
    shards = size["data"] * size["fsdp"]
    if batch % shards:
        legal = [n for n in range(1, batch + 1) if batch % n == 0]
        raise ValueError(
            f"a batch of {batch} samples does not divide over mesh.data*fsdp = {shards}; make the "
            f"batch a multiple of {shards}, or config.mesh.data*fsdp one of {legal}"
        )
    if tokens < size["context"]:
        raise ValueError(
            f"mesh.context = {size['context']} is more than the {tokens} tokens of a video; "
            f"set config.mesh.context to at most {tokens}"
        )
    chunks = size["stage"] * config.interleave
    if chunks > config.num_layers:
        raise ValueError(
            f"mesh.stage*model.interleave = {chunks} is more than the {config.num_layers} layers; "
            f"set config.mesh.stage to at most {config.num_layers // config.interleave}"
        )
    if config.interleave > 1 and size["stage"] == 1:
        raise ValueError(
            f"model.interleave = {config.interleave} needs a pipeline; set it to 1, or "
            f"config.mesh.stage to 2..{config.num_layers // config.interleave}"
        )


def describe(config: WanConfig, mesh: dict[str, int]) -> str:
    """One line for the start of a run: attention kernel, remat, use of context and stage."""
    kernel = attention.resolve(config.attention, config.dtype, config.attention_head_dim)
    ulysses, ring = attention.context_form(config.num_attention_heads, mesh, config.context)
    parts = [f"attention {attention.describe(kernel)}", f"remat {config.remat}"]
    if ulysses * ring > 1:
        parts.append(f"context = ulysses {ulysses} x ring {ring}")
    if mesh.get("stage", 1) > 1:
        per = pipeline.chunk_layers(config.num_layers, mesh["stage"], config.interleave)
        parts.append(f"stage = {mesh['stage']} x {config.interleave} chunks of {per} blocks")
    return ", ".join(parts)


def stage(tree, config: WanConfig):
    """A parameter or adapter tree with its blocks laid out for the pipeline of the mesh in use.

    `denoise` does this itself; a tree that does not change (the frozen base) is better staged once,
    because with interleaving, or layers that the stages do not divide, weights move between
    devices here.
    """
    if STACK not in tree:
        return tree
    stages = sharding.mesh_shape().get("stage", 1)
    rest = {name: leaf for name, leaf in tree.items() if name != STACK}
    stacked = pipeline.stack(tree[STACK], config.num_layers, stages, config.interleave)
    return {**rest, STAGES: stacked}


def store(params, dtype):
    """Cast matmul weights to dtype; norms, tables and the time embedding stay float32 (as in
    released files). With "float8" or "int8" the matrices of the blocks take one byte per weight
    (see quant), and the other matmul weights are bfloat16."""
    flat = trees.flatten(params)
    return trees.unflatten({k: x for path in flat for k, x in store_leaf(path, flat[path], dtype)})


def store_leaf(path: str, leaf, dtype) -> list[tuple[str, jax.Array]]:
    """The paths and leaves that one leaf becomes in `store`."""
    if any(name in path for name in FLOAT32):
        return [(path, leaf.astype(jnp.float32))]
    if dtype not in quant.DTYPES:
        return [(path, leaf.astype(dtype))]
    if path.split("/")[0] not in (STACK, STAGES) or not path.endswith("/kernel"):
        return [(path, leaf.astype(jnp.bfloat16))]
    scale = path.removesuffix("kernel") + "scale"
    return list(zip((path, scale), quant.quantise(leaf, dtype), strict=True))


def forward_flops(config: WanConfig, grid: tuple[int, int, int]) -> int:
    """Floating-point operations of one sample's forward pass on a token grid; a multiply-add is 2.

    Counts only the matmuls of the blocks (98 % of the weights and all of attention), the
    convention behind the figure of 1.678 PFLOP for the 14B model at 480x832x81.
    """
    L, S, D, F = math.prod(grid), config.text_len, config.dim, config.ffn_dim
    dense = 12 * D * D * L + 4 * D * F * L + 4 * D * D * S
    return config.num_layers * (dense + 4 * D * L * (L + S))


def logical_axes(path: str, leaf) -> tuple[str | None, ...]:
    """Logical axes of a parameter or adapter leaf, for `sharding.tree_shardings`."""
    stacks = {STACK: ("layers",), STAGES: ("stage", None, None)}
    stack: tuple[str | None, ...] = stacks.get(path.split("/")[0], ())
    module, name = ("", *path.split("/"))[-2:]
    column = module in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "ffn.net.0.proj")
    row = module in ("to_out.0", "ffn.net.2")
    wide = "mlp" if module.startswith("ffn") else "heads"
    inner: dict[str, tuple[str | None, str | None]] = {
        "kernel": ("embed", wide) if column else (wide, "embed") if row else (None, "embed"),
        "a": ("embed", None) if column else ("adapter", None) if row else (None, None),
        "b": (None, "adapter") if column else (None, "embed") if row else (None, None),
    }
    if name in inner and leaf.ndim - len(stack) == 2:
        return stack + inner[name]
    return stack + (None,) * (leaf.ndim - len(stack))


class Block(nn.Module):
    """One transformer block; modulation order is shift, scale, gate of attention, then of the
    feed-forward."""

    config: WanConfig
    last_count: int  # multiplicity of the last text row
    length: int | None = None  # real tokens, when padding follows

    @nn.compact
    def __call__(self, h_BLD, ctx, image, e6, time_index, rope):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        table = self.param("scale_shift_table", _table_init, (1, 6, config.dim), jnp.float32)
        e6 = e6 + table.astype(jnp.float32)[None]
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            per_token(e6[:, :, i], time_index) for i in range(6)
        )
        u = layers.LayerNorm(config.eps, name="norm1")(h_BLD) * (1 + scale1) + shift1
        attend = Attention(config, name="attn1")
        attn = attend(u.astype(dtype), None, None, rope, length=self.length)
        h = (h_BLD.astype(jnp.float32) + attn.astype(jnp.float32) * gate1).astype(dtype)

        norm = layers.LayerNorm(config.eps, affine=True, name="norm2")
        u = norm(h).astype(dtype) if config.cross_attn_norm else h
        attn = Attention(config, name="attn2")(u, ctx, image, None, self.last_count)
        h = h + attn

        u = (layers.LayerNorm(config.eps, name="norm3")(h) * (1 + scale2) + shift2).astype(dtype)
        # direct: here only, as the projections of attention need more precision than float8
        dense = functools.partial(layers.Dense, dtype=dtype, direct=True)
        u = dense(config.ffn_dim, name="ffn.net.0.proj")(u)
        u = dense(config.dim, name="ffn.net.2")(nn.gelu(u, approximate=True))
        return (h.astype(jnp.float32) + u.astype(jnp.float32) * gate2).astype(dtype)


class Attention(nn.Module):
    """Self-attention (ctx None), or cross-attention to text and, where given, to CLIP image
    tokens."""

    config: WanConfig

    @nn.compact
    def __call__(self, x_BLD, ctx_BSD, image_BSD, rope, last_count: int = 1, length=None):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        dense = functools.partial(layers.Dense, config.dim, dtype)

        def heads(x):
            return x.reshape(*x.shape[:2], -1, config.attention_head_dim)

        source = x_BLD if ctx_BSD is None else ctx_BSD
        q = layers.RMSNorm(config.eps, name="norm_q")(dense(name="to_q")(x_BLD), rope)
        k = layers.RMSNorm(config.eps, name="norm_k")(dense(name="to_k")(source), rope)
        q, k, v = heads(q.astype(dtype)), heads(k.astype(dtype)), heads(dense(name="to_v")(source))
        attend = functools.partial(attention.attend, kernel=config.attention, form=config.context)
        if self.is_initializing():  # one token does not divide over a mesh
            attend = _first
        out = attend(q, k, v, last_count=last_count, length=length)
        if image_BSD is not None:
            k_img = dense(name="add_k_proj")(image_BSD)
            k_img = heads(layers.RMSNorm(config.eps, name="norm_added_k")(k_img)).astype(dtype)
            v_img = heads(dense(name="add_v_proj")(image_BSD))
            out = out + attend(q, k_img, v_img)
        return dense(name="to_out.0")(out.reshape(x_BLD.shape))


def _first(q, *_, **__):
    return q


class _Embeddings(nn.Module):
    """Token embedding [B,L,D], e [B,M,D], e6 [B,M,6,D], text rows [B,S,D], image rows [B,S',D] or
    None."""

    config: WanConfig

    @nn.compact
    def __call__(self, patches_BLP, t_BM, ctx_BSE, image_BSE):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        dense = functools.partial(layers.Dense, config.dim, dtype)
        h = PatchEmbedding(config, name="patch_embedding")(patches_BLP)
        # tiny matmuls: full float32 costs nothing, and t up to 1000 needs it
        highest = jax.lax.Precision.HIGHEST
        exact = functools.partial(layers.Dense, dtype=jnp.float32, precision=highest)
        e = layers.time_features(t_BM, config.freq_dim)
        e = exact(config.dim, name="condition_embedder.time_embedder.linear_1")(e)
        e = exact(config.dim, name="condition_embedder.time_embedder.linear_2")(nn.silu(e))
        e6 = exact(6 * config.dim, name="condition_embedder.time_proj")(nn.silu(e))
        e6 = e6.reshape(*e6.shape[:2], 6, config.dim)
        ctx = dense(name="condition_embedder.text_embedder.linear_1")(ctx_BSE)
        ctx = nn.gelu(ctx, approximate=True)
        ctx = dense(name="condition_embedder.text_embedder.linear_2")(ctx)
        if image_BSE is None:
            return h, e, e6, ctx, None
        image = ImageEmbedder(config, name="condition_embedder.image_embedder")(image_BSE)
        return h, e, e6, ctx, image.astype(dtype)


class PatchEmbedding(nn.Module):
    """The strided patch convolution as one matmul; the kernel keeps its convolution shape
    [pt,ph,pw,C,D]."""

    config: WanConfig

    @nn.compact
    def __call__(self, patches_BLP):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        shape = (*config.patch_size, config.in_channels, config.dim)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (config.dim,), jnp.float32)
        kernel = kernel.reshape(-1, config.dim).astype(dtype)
        return patches_BLP.astype(dtype) @ kernel + bias.astype(dtype)[None, None]


class ImageEmbedder(nn.Module):
    """CLIP image tokens to model width: norm, dense, exact gelu, dense, norm (eps 1e-5)."""

    config: WanConfig

    @nn.compact
    def __call__(self, image_BSE):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        if config.pos_embed_seq_len is not None:
            shape = (1, config.pos_embed_seq_len, image_BSE.shape[-1])
            zeros = nn.initializers.zeros
            image_BSE = image_BSE + self.param("pos_embed", zeros, shape, jnp.float32)
        u = layers.LayerNorm(1e-5, affine=True, name="norm1")(image_BSE)
        u = layers.Dense(image_BSE.shape[-1], dtype, name="ff.net.0.proj")(u)
        u = layers.Dense(config.dim, dtype, name="ff.net.2")(nn.gelu(u, approximate=False))
        return layers.LayerNorm(1e-5, affine=True, name="norm2")(u)


class _Head(nn.Module):
    """Modulated norm by e (not e6) and the projection to patches, float32 out."""

    config: WanConfig

    @nn.compact
    def __call__(self, h_BLD, e_BMD, time_index):
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        table = self.param("scale_shift_table", _table_init, (1, 2, config.dim), jnp.float32)
        e = e_BMD[:, :, None] + table.astype(jnp.float32)[None]
        shift, scale = (per_token(e[:, :, i], time_index) for i in range(2))
        u = (layers.LayerNorm(config.eps)(h_BLD) * (1 + scale) + shift).astype(dtype)
        width = math.prod(config.patch_size) * config.out_channels
        return layers.Dense(width, dtype, name="proj_out")(u).astype(jnp.float32)


def per_token(e_BMD, time_index):
    """Pick each token's time embedding: [B,1,D] if there is one time, else [B,L,D] (index [L] or
    [B,L])."""
    if time_index is None:
        return e_BMD
    index = jnp.atleast_2d(time_index)[..., None]
    out = e_BMD[:, :1]
    for m in range(1, e_BMD.shape[1]):  # selects fuse; a gather would materialise [B,L,D]
        out = jnp.where(index == m, e_BMD[:, m : m + 1], out)
    return out


def _table_init(key, shape, dtype):
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[-1])


def _check(config: WanConfig, x, ctx, cond, t) -> None:
    if x.shape[-1] != config.in_channels:
        raise ValueError(
            f"the model takes {config.in_channels} input channels but latents with "
            f"cond['latents'] have {x.shape[-1]}; check that the variant fits "
            "the task (T2V 16, I2V 36, TI2V-5B 48)"
        )
    if ctx.shape[-1] != config.text_dim or ctx.shape[1] > config.text_len:
        raise ValueError(
            f"text context {ctx.shape} does not fit: expected [B, <={config.text_len}, "
            f"{config.text_dim}]; encode prompts with the model's own text encoder"
        )
    if ("image" in cond) != (config.image_dim is not None):
        raise ValueError(
            f"image tokens are {'given' if 'image' in cond else 'missing'} but the model has "
            f"image_dim {config.image_dim}; pass cond['image'] only to Wan2.1 I2V/FLF2V"
        )
    if (t.ndim == 2) != ("time_index" in cond):
        raise ValueError(
            "several times per sample need cond['time_index'], and the index needs them"
        )
