"""Causal video VAE of Wan 2.1 and 2.2 (diffusers' AutoencoderKLWan).

    z = (mean(encoder(x)) - latents_mean) / latents_std,    x = clip(decoder(z · std + mean), -1, 1)

Frame 0 is coded alone, then every latent frame stands for 4 pixel frames. Frame 0 runs as an image
network (its history is zero, so of each temporal kernel only the last tap counts); the rest is one
`lax.scan` whose carry holds the last 2 input frames of each temporal convolution, keyed by path.
Each scan step codes `step` latent frames: 1 takes the least memory, all of them (T - 1) is one
step without a loop, for training on short clips (the function is the same).
The network is a list of groups of layers (`_encoder`, `_decoder`), walked by init and by the
forward pass, hence one module. Everything runs in the dtype of the parameters except norms and
softmax (float32).

Wan 2.1: plain stages. Wan 2.2: 2x2 pixel patches and stages with an average-down or duplicate-up
shortcut (`is_residual`). Paper: Wan, arXiv:2503.20314, section 4.1.
Dimensions: B batch, T frames, H W height/width, C channels; z_BTHWC latents, x_BTHWC pixels.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from wanjax import trees

_MEAN_21 = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
_MEAN_21 += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
_STD_21 = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
_STD_21 += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)
_STRIDE_T = 4  # pixel frames per latent frame; every published Wan VAE


@dataclass(frozen=True)
class VAEConfig:
    """Shape of an AutoencoderKLWan; field names are those of its config.json, defaults Wan 2.1."""

    base_dim: int = 96
    decoder_base_dim: int | None = None  # None: base_dim
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: tuple[float, ...] = ()
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    dropout: float = 0.0
    latents_mean: tuple[float, ...] = _MEAN_21
    latents_std: tuple[float, ...] = _STD_21
    is_residual: bool = False
    in_channels: int = 3  # after the pixel patchify, as in config.json: 12 for Wan 2.2
    out_channels: int = 3
    patch_size: int | None = None
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8

    def __post_init__(self):
        down, z, space = len(self.dim_mult) - 1, self.z_dim, self.scale_factor_spatial
        side = 2**down * self.patch
        checks = (
            ("attn_scales", self.attn_scales == (), "()"),
            ("dropout", self.dropout == 0, "0.0"),
            ("scale_factor_temporal", self.scale_factor_temporal == _STRIDE_T, _STRIDE_T),
            ("scale_factor_spatial", space == side, side),
            ("temperal_downsample", len(self.temperal_downsample) == down, f"{down} entries"),
            ("latents_mean", len(self.latents_mean) == z, f"{z} entries"),
            ("latents_std", len(self.latents_std) == z, f"{z} entries"),
            ("temperal_downsample", sum(self.temperal_downsample) == 2, "two true entries"),
        )
        for name, fits, expected in checks:
            if not fits:
                got = getattr(self, name)
                raise ValueError(f"vae config: {name} is {got}, expected {expected}")
        if self.is_residual and self.dim_mult[-2] % self.dim_mult[-1]:
            raise ValueError(
                f"vae config: dim_mult is {self.dim_mult} with is_residual, expected a last entry "
                "that divides the one before it (the averaging shortcut keeps whole channel groups)"
            )

    @property
    def patch(self) -> int:
        """Side of a pixel patch; 1 without patchify."""
        return self.patch_size or 1


def init(key, config: VAEConfig):
    """Return random float32 parameters: LeCun-normal kernels, zero biases, unit norms."""
    flat = {}
    for number, (path, shape) in enumerate(sorted(_shapes(config).items())):
        leaf = path.rsplit("/", 1)[1]
        if leaf == "kernel":
            scale = math.prod(shape[:-1]) ** -0.5
            flat[path] = scale * jax.random.normal(jax.random.fold_in(key, number), shape)
        else:
            flat[path] = jnp.ones(shape) if leaf == "gamma" else jnp.zeros(shape)
    return trees.unflatten(flat)


def encode(params, x_BTHWC, *, config: VAEConfig, step=1):
    """Return the normalised posterior mean z_BTHWC (float32) of pixels in [-1, 1].

    T must be 4n+1 and gives n+1 latent frames; H and W must divide by scale_factor_spatial
    (otherwise ValueError).
    """
    z, _ = posterior(params, x_BTHWC, config=config, step=step)
    mean, std = jnp.asarray(config.latents_mean), jnp.asarray(config.latents_std)
    return (z - _wide(mean)) / _wide(std)


def posterior(params, x_BTHWC, *, config: VAEConfig, step=1):
    """Return mean and log-variance (clipped to [-30, 20]) of the unnormalised latents, float32."""
    channels, factor = config.in_channels // config.patch**2, config.scale_factor_spatial
    shape = x_BTHWC.shape
    if len(shape) != 5 or shape[-1] != channels:
        raise ValueError(f"vae.encode: x has shape {shape}, expected [B, T, H, W, {channels}]")
    T, H, W = shape[1:4]
    if T % _STRIDE_T != 1:
        raise ValueError(
            f"vae.encode: {T} frames, expected 4n+1 (1, 5, 9, ...); cut or repeat frames"
        )
    if H % factor or W % factor:
        raise ValueError(f"vae.encode: frames of {H}x{W}, sides must divide by {factor}; crop")
    flat = trees.flatten(params)
    x = _patchify(x_BTHWC, config.patch).astype(flat["quant_conv/kernel"].dtype)
    moments = _scan_chunks(_encoder(config), flat, x, _STRIDE_T * step)
    mean, logvar = jnp.split(_conv(flat, "quant_conv", moments).astype(jnp.float32), 2, -1)
    return mean, jnp.clip(logvar, -30.0, 20.0)


def decode(params, z_BTHWC, *, config: VAEConfig, step=1):
    """Return float32 pixels x_BTHWC clamped to [-1, 1]; T normalised latent frames give 4T-3."""
    _check_latents(z_BTHWC, config)
    x = _decode_frames(params, _denormalise(z_BTHWC, config), config, step)
    return jnp.clip(_unpatchify(x, config.patch), -1.0, 1.0)


def decode_tiled(params, z_BTHWC, *, config: VAEConfig, tile=256):
    """Decode big frames in spatial tiles that overlap by a quarter, blended linearly, as diffusers
    does; see `decode`. `tile` counts pixels: multiples of 4·scale_factor_spatial.
    """
    stride, z_unit, x_unit = tile * 3 // 4, config.scale_factor_spatial, config.patch
    _check_latents(z_BTHWC, config)
    if not 0 < stride <= tile or tile % z_unit or stride % z_unit:
        raise ValueError(
            f"vae tiling: tile {tile} and stride {stride}, expected 0 < stride <= tile, "
            f"both multiples of {z_unit}"
        )
    run = partial(_decode_frames, params, config=config)
    sizes_z, sizes_x = (tile // z_unit, stride // z_unit), (tile // x_unit, stride // x_unit)
    x = _tiled(run, _denormalise(z_BTHWC, config), sizes_z, sizes_x)
    return jnp.clip(_unpatchify(x, config.patch), -1.0, 1.0)


def _tiled(run, x, sizes_in, sizes_out):
    """Apply `run` to tiles of x and join them; sizes are (tile, stride) before and after `run`.

    Tiles of one shape run as one `lax.map`, so that each shape (whole, right edge, bottom edge,
    corner) is compiled once. A tile is blended with the one above, then with the one to its left.
    """
    tile, stride = sizes_in
    if max(x.shape[2:4]) <= tile:
        return run(x)
    rows, columns = (range(0, size, stride) for size in x.shape[2:4])
    cuts = {(i, j): x[:, :, i : i + tile, j : j + tile] for i in rows for j in columns}
    done = {}
    for shape in {cut.shape: None for cut in cuts.values()}:
        places = [place for place, cut in cuts.items() if cut.shape == shape]
        out = jax.lax.map(run, jnp.stack([cuts[place] for place in places]))
        done |= dict(zip(places, out, strict=True))
    tile, step = sizes_out
    for i, j in cuts:
        if i:
            done[i, j] = _blend(done[i - stride, j], done[i, j], tile - step, 2)
        if j:
            done[i, j] = _blend(done[i, j - stride], done[i, j], tile - step, 3)
    joined = [jnp.concatenate([done[i, j][:, :, :step, :step] for j in columns], 3) for i in rows]
    return jnp.concatenate(joined, 2)


def _blend(before, after, extent, axis):
    """Fade from the end of `before` to the start of `after` over `extent` rows or columns."""
    extent, cut = min(extent, before.shape[axis], after.shape[axis]), jax.lax.slice_in_dim
    old = cut(before, before.shape[axis] - extent, None, axis=axis)
    new, rest = cut(after, 0, extent, axis=axis), cut(after, extent, None, axis=axis)
    others = [a for a in range(5) if a != axis]
    weight = jnp.expand_dims(jnp.arange(extent) / max(extent, 1), others)
    return jnp.concatenate([old * (1 - weight) + new * weight, rest], axis)


# The network: groups of layers (kind, path, channels in, channels out), each group with an optional
# shortcut around it: (kind, channels out, time factor, space factor).


def _encoder(config):
    """Return [(layers, shortcut or None)] of the encoder."""
    dims = [config.base_dim * m for m in (1, *config.dim_mult)]
    conv_in = ("conv", "encoder/conv_in", config.in_channels, dims[0])
    groups: list[tuple[list, tuple | None]] = [([conv_in], None)]
    count = 0  # a plain encoder numbers all layers of all levels in one list
    for level, (c_in, c_out) in enumerate(zip(dims, dims[1:], strict=False)):
        down = level < len(config.dim_mult) - 1
        time = down and config.temperal_downsample[level]
        root = "encoder/down_blocks"
        if config.is_residual:
            names = [f"{root}/{level}/resnets/{i}" for i in range(config.num_res_blocks)]
            names += [f"{root}/{level}/downsampler"]
        else:
            names = [f"{root}/{count + i}" for i in range(config.num_res_blocks + 1)]
            count += config.num_res_blocks + down
        layers = [("res", n, c_out if i else c_in, c_out) for i, n in enumerate(names[:-1])]
        if down:
            layers.append(("down3d" if time else "down2d", names[-1], c_out, c_out))
        shortcut = ("average", c_out, 1 + time, 1 + down) if config.is_residual else None
        groups.append((layers, shortcut))
    groups.append((_mid("encoder", dims[-1]), None))
    return groups + [(_head("encoder", dims[-1], 2 * config.z_dim), None)]


def _decoder(config):
    """Return [(layers, shortcut or None)] of the decoder."""
    base = config.decoder_base_dim or config.base_dim
    dims = [base * m for m in (config.dim_mult[-1], *config.dim_mult[::-1])]
    groups: list[tuple[list, tuple | None]] = [
        ([("conv", "decoder/conv_in", config.z_dim, dims[0])], None),
        (_mid("decoder", dims[0]), None),
    ]
    for level, (c_in, c_out) in enumerate(zip(dims, dims[1:], strict=False)):
        up = level < len(config.dim_mult) - 1
        time = up and config.temperal_downsample[::-1][level]
        root = f"decoder/up_blocks/{level}"
        if level and not config.is_residual:
            c_in //= 2  # a plain upsampler halves the channels
        layers = [
            ("res", f"{root}/resnets/{i}", c_out if i else c_in, c_out)
            for i in range(config.num_res_blocks + 1)
        ]
        if up:
            name = f"{root}/upsampler" if config.is_residual else f"{root}/upsamplers/0"
            width = c_out if config.is_residual else c_out // 2
            layers.append(("up3d" if time else "up2d", name, c_out, width))
        shortcut = ("duplicate", c_out, 1 + time, 2) if config.is_residual and up else None
        groups.append((layers, shortcut))
    return groups + [(_head("decoder", dims[-1], config.out_channels), None)]


def _mid(root, dim):
    """Return the layers of a middle block."""
    kinds = {"resnets/0": "res", "attentions/0": "attn", "resnets/1": "res"}
    return [(kind, f"{root}/mid_block/{name}", dim, dim) for name, kind in kinds.items()]


def _head(root, c_in, c_out):
    """Return the output layers: norm, SiLU, convolution."""
    return [("norm", f"{root}/norm_out", c_in, c_in), ("conv", f"{root}/conv_out", c_in, c_out)]


def _shapes(config):
    """Return {path: shape} of every parameter."""
    z = config.z_dim
    kernels: dict[str, tuple[int, ...]] = {
        "quant_conv": (1, 1, 1, 2 * z, 2 * z),
        "post_quant_conv": (1, 1, 1, z, z),
    }
    gammas = {}
    for layers, _ in _encoder(config) + _decoder(config):
        for kind, name, c_in, c_out in layers:
            if kind == "conv":
                kernels[name] = (3, 3, 3, c_in, c_out)
            elif kind == "norm":
                gammas[name] = c_in
            elif kind == "res":
                gammas |= {f"{name}/norm1": c_in, f"{name}/norm2": c_out}
                kernels[f"{name}/conv1"] = (3, 3, 3, c_in, c_out)
                kernels[f"{name}/conv2"] = (3, 3, 3, c_out, c_out)
                if c_in != c_out:
                    kernels[f"{name}/conv_shortcut"] = (1, 1, 1, c_in, c_out)
            elif kind == "attn":
                gammas[f"{name}/norm"] = c_in
                kernels[f"{name}/to_qkv"] = (1, 1, c_in, 3 * c_in)
                kernels[f"{name}/proj"] = (1, 1, c_in, c_in)
            else:
                kernels[f"{name}/resample/1"] = (3, 3, c_in, c_out)
                if kind.endswith("3d"):
                    width = 2 * c_in if kind == "up3d" else c_in
                    kernels[f"{name}/time_conv"] = (3, 1, 1, c_in, width)
    shapes = {f"{name}/gamma": (dim,) for name, dim in gammas.items()}
    for name, shape in kernels.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
    return shapes


# Running it: `params` is flat from here on. `carry` maps the path of a temporal convolution to its
# history; it is empty before frame 0, and each layer replaces its own entry (one dict per chunk).


def _decode_frames(params, z_BTHWC, config, step=1):
    """Return decoder(post_quant_conv(z)), float32, still patchified and not clamped."""
    flat = trees.flatten(params)
    z = _conv(flat, "post_quant_conv", z_BTHWC.astype(flat["post_quant_conv/kernel"].dtype))
    return _scan_chunks(_decoder(config), flat, z, step).astype(jnp.float32)


def _scan_chunks(groups, params, x_BTHWC, size):
    """Run the groups on frame 0, then scan over chunks of `size` frames; join the output frames."""
    first, carry = _run(groups, params, {}, x_BTHWC[:, :1])
    rest = x_BTHWC[:, 1:]
    if not rest.shape[1]:
        return first
    if rest.shape[1] == size:  # no loop, in which XLA:CPU is slow at gradients of convolutions
        return jnp.concatenate([first, _run(groups, params, carry, rest)[0]], 1)
    if rest.shape[1] % size:
        raise ValueError(
            f"vae: {rest.shape[1]} frames after the first must be a multiple of {size}; change step"
        )
    chunks = jnp.moveaxis(rest.reshape(rest.shape[0], -1, size, *rest.shape[2:]), 1, 0)

    def body(carry, x):
        out, carry = _run(groups, params, carry, x)
        return carry, out

    _, out = jax.lax.scan(body, carry, chunks)
    out = jnp.moveaxis(out, 0, 1)
    return jnp.concatenate([first, out.reshape(first.shape[0], -1, *first.shape[2:])], 1)


def _run(groups, params, carry, x):
    """Run all groups on one chunk and return (output, new carry)."""
    carry = dict(carry)
    for layers, shortcut in groups:
        start = x
        for kind, name, _, _ in layers:
            x = _LAYERS[kind](params, carry, name, x)
        if shortcut is not None:
            x = x + _shortcut(start, x.shape[1], *shortcut)
    return x, carry


def _conv(params, name, x, *, stride=(1, 1), padding: str | tuple = "SAME"):
    """Convolve x_BTHWC with (time, space) strides; only space is padded.

    Frames under the temporal taps are stacked on channels, which makes it one 2D convolution.
    Frames missing before the first output are zeros: their taps are left out.
    """
    kernel = params[f"{name}/kernel"]
    kernel = kernel.reshape(-1, *kernel.shape[-4:])[-x.shape[1] :]
    taps, height, width, c_in, c_out = kernel.shape
    starts = range(0, x.shape[1] - taps + 1, stride[0])
    if taps > 1:
        x = jnp.concatenate([x[:, i : i + starts[-1] + 1 : stride[0]] for i in range(taps)], -1)
    frames = x.reshape(-1, *x.shape[2:])
    kernel = jnp.moveaxis(kernel, 0, 2).reshape(height, width, taps * c_in, c_out)
    conv = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = conv(frames, kernel, (stride[1], stride[1]), padding)
    return y.reshape(x.shape[0], len(starts), *y.shape[1:]) + _wide(params[f"{name}/bias"])


def _wide(v_C):
    """Give a channel vector the rank of a video."""
    return v_C.reshape(1, 1, 1, 1, -1)


def _causal_conv(params, carry, name, x):
    """3x3x3 convolution over the last 2 frames of history and x; frame 0 has zeros behind it."""
    history = carry.get(name)
    if history is None:
        carry[name] = jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
        return _conv(params, name, x)
    x = jnp.concatenate([history, x], 1)
    carry[name] = x[:, -2:]
    return _conv(params, name, x)


def _norm(params, name, x):
    """x / |x| · sqrt(C) · gamma over channels, in float32."""
    x32 = x.astype(jnp.float32)
    square = jnp.sum(x32 * x32, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.maximum(square, 1e-24)) * x.shape[-1] ** 0.5
    return (x32 * scale * _wide(params[f"{name}/gamma"]).astype(jnp.float32)).astype(x.dtype)


def _norm_silu(params, carry, name, x):
    """Norm, then SiLU."""
    return jax.nn.silu(_norm(params, name, x))


def _residual(params, carry, name, x):
    """Norm, SiLU, convolution, twice; a pointwise skip path where the channels change."""
    h = _causal_conv(params, carry, f"{name}/conv1", _norm_silu(params, carry, f"{name}/norm1", x))
    h = _causal_conv(params, carry, f"{name}/conv2", _norm_silu(params, carry, f"{name}/norm2", h))
    skip = f"{name}/conv_shortcut"
    return h + (_conv(params, skip, x) if f"{skip}/kernel" in params else x)


def _attention(params, carry, name, x):
    """Single-head attention among the pixels of each frame."""
    h = _norm(params, f"{name}/norm", x)
    q, k, v = jnp.split(_conv(params, f"{name}/to_qkv", h), 3, -1)
    q, k, v = (a.reshape(-1, a.shape[2] * a.shape[3], a.shape[4]) for a in (q, k, v))
    scores = jnp.einsum("BQC,BKC->BQK", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, -1).astype(x.dtype)
    out = jnp.einsum("BQK,BKC->BQC", weights, v)
    return x + _conv(params, f"{name}/proj", out.reshape(x.shape))


def _down2d(params, carry, name, x):
    """Halve height and width: 3x3 stride 2, zeros only below and to the right."""
    return _conv(params, f"{name}/resample/1", x, stride=(1, 2), padding=((0, 1), (0, 1)))


def _down3d(params, carry, name, x):
    """Halve space, then time; frame 0 skips the temporal convolution and becomes its history."""
    x = _down2d(params, carry, name, x)
    path = f"{name}/time_conv"
    history, carry[path] = carry.get(path), x[:, -1:]
    if history is None:
        return x
    return _conv(params, path, jnp.concatenate([history, x], 1), stride=(2, 1))


def _up2d(params, carry, name, x):
    """Double height and width: nearest neighbour, then 3x3."""
    return _conv(params, f"{name}/resample/1", jnp.repeat(jnp.repeat(x, 2, 2), 2, 3))


def _up3d(params, carry, name, x):
    """Double time, then space; frame 0 is not doubled and leaves a zero history behind."""
    path = f"{name}/time_conv"
    history = carry.get(path)
    if history is None:
        carry[path] = jnp.zeros((x.shape[0], 2, *x.shape[2:]), x.dtype)
        return _up2d(params, carry, name, x)
    x = jnp.concatenate([history, x], 1)
    carry[path] = x[:, -2:]
    pairs = _conv(params, path, x)  # channels hold two frames
    B, T, H, W, C = pairs.shape
    x = jnp.moveaxis(pairs.reshape(B, T, H, W, 2, C // 2), 4, 2).reshape(B, 2 * T, H, W, C // 2)
    return _up2d(params, carry, name, x)


_LAYERS = {
    "conv": _causal_conv,
    "norm": _norm_silu,
    "res": _residual,
    "attn": _attention,
    "down2d": _down2d,
    "down3d": _down3d,
    "up2d": _up2d,
    "up3d": _up3d,
}


def _shortcut(x, frames, kind, c_out, f_t, f_s):
    """Parameter-free skip path of a Wan 2.2 stage, `frames` long."""
    if kind == "average":
        front = -x.shape[1] % f_t  # frame 0 is averaged with zeros
        x = jnp.pad(x, ((0, 0), (front, 0), (0, 0), (0, 0), (0, 0)))
        B, T, H, W, C = x.shape
        x = x.reshape(B, T // f_t, f_t, H // f_s, f_s, W // f_s, f_s, C)
        x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
        return x.reshape(*x.shape[:4], c_out, -1).mean(-1)
    B, T, H, W, C = x.shape
    x = jnp.repeat(x, c_out * f_t * f_s * f_s // C, -1).reshape(B, T, H, W, c_out, f_t, f_s, f_s)
    x = x.transpose(0, 1, 5, 2, 6, 3, 7, 4).reshape(B, T * f_t, H * f_s, W * f_s, c_out)
    return x[:, -frames:]  # frame 0 keeps its last copy only


# Pixels and latents.


def _patchify(x, p):
    """Move p x p pixels to channels, ordered (channel, column, row)."""
    B, T, H, W, C = x.shape
    x = x.reshape(B, T, H // p, p, W // p, p, C).transpose(0, 1, 2, 4, 6, 5, 3)
    return x.reshape(B, T, H // p, W // p, C * p * p)


def _unpatchify(x, p):
    """Invert `_patchify`."""
    B, T, H, W, C = x.shape
    x = x.reshape(B, T, H, W, C // p**2, p, p).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(B, T, H * p, W * p, C // p**2)


def _denormalise(z_BTHWC, config):
    mean, std = jnp.asarray(config.latents_mean), jnp.asarray(config.latents_std)
    return z_BTHWC.astype(jnp.float32) * _wide(std) + _wide(mean)


def _check_latents(z, config):
    """Raise ValueError unless z is [B, T, H, W, z_dim]."""
    if z.ndim != 5 or z.shape[-1] != config.z_dim or not z.shape[1]:
        raise ValueError(
            f"vae.decode: z has shape {z.shape}, expected [B, T>0, H, W, {config.z_dim}]"
        )
