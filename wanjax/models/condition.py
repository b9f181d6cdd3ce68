"""First-frame conditioning of the image-to-video variants: how it is built and how it is applied.

A model's channels determine the form it takes:
  I2V-A14B, Wan2.1 I2V   in = out + 4 + z: cond {"latents": [B,T,H,W,4+z]}, a mask (1 on the latent
                         frame that holds the given pixel frame) and the VAE latents of the video
                         (image, grey, grey, …); Wan2.1 adds {"image": CLIP tokens}
  TI2V-5B                in = out = 48: cond {"first": [B,1,H,W,C]}; the first latent frame of the
                         model's input is this clean one at time 0, the rest is noisy at time t
  T2V                    none
The arithmetic is that of diffusers' WanImageToVideoPipeline.

Shapes: B batch, T latent frames, H W latent height/width, C channels, z latent channels of the VAE.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.models import clip, presets, vae, wan
from wanjax.parallel import sharding

_MASK = vae.VAEConfig().scale_factor_temporal  # one mask channel per pixel frame of a latent frame
_TI2V_CHANNELS = 48  # the only variant of its width, and the only one that takes a clean frame


def kind(model: presets.ModelConfig) -> str:
    """How the model takes a first frame: "latents", "first" (optional), or "" for T2V."""
    if model.wan.in_channels == model.wan.out_channels + _MASK + model.vae.z_dim:
        return "latents"
    return "first" if model.wan.out_channels == _TI2V_CHANNELS else ""


def first_frame(params: dict, image_BHWC, frames: int, *, model: presets.ModelConfig) -> dict:
    """The cond of `denoise` from images in [-1, 1], for videos of `frames` pixel frames.

    params: those of the model's vae, and image_encoder where it has one. Raises ValueError for a
    model that takes no image.
    """
    form = kind(model)
    if not form:
        raise ValueError(
            f"model {model.name} makes videos from text only; an image needs an I2V or TI2V model"
        )
    image = image_BHWC[:, None].astype(jnp.float32)
    if form == "first":
        return {"first": vae.encode(params["vae"], image, config=model.vae)}
    clip_BTHWC = jnp.pad(image, ((0, 0), (0, frames - 1), (0, 0), (0, 0), (0, 0)))
    latents = vae.encode(params["vae"], clip_BTHWC, config=model.vae)
    tokens = None
    if model.image is not None:
        pixels = clip.preprocess(image_BHWC, config=model.image)
        tokens = clip.encode_image(params["image_encoder"], pixels, config=model.image)
    return of_latents(latents, tokens)


def first_frames(params: dict, images, frames: int, *, model: presets.ModelConfig) -> dict:
    """`first_frame` of images [H, W, 3] uint8 of one size, one after the other, for all hosts."""
    encode = jax.jit(functools.partial(first_frame, frames=frames, model=model))
    inputs = (image[None] / np.float32(127.5) - 1 for image in images)
    conds = [jax.tree.map(sharding.fetch, encode(params, x)) for x in inputs]
    return {name: np.concatenate([cond[name] for cond in conds]) for name in conds[0]}


def of_latents(first_BTHWC, image_BSE=None) -> dict:
    """The cond of an I2V model from the normalised latents of (image, grey, …) and CLIP tokens."""
    mask = jnp.zeros((*first_BTHWC.shape[:4], _MASK), jnp.float32).at[:, 0].set(1.0)
    cond = {"latents": jnp.concatenate([mask, first_BTHWC.astype(jnp.float32)], axis=-1)}
    return cond if image_BSE is None else cond | {"image": image_BSE}


def denoise(params, lora, x_BTHWC, t_B, ctx_BSE, cond=None, *, config: wan.WanConfig):
    """`wan.denoise` that also takes cond["first"]; the velocity of a given frame is meaningless."""
    inputs = _with_first(x_BTHWC, t_B, ctx_BSE, cond, config)
    return wan.denoise(params, lora, *inputs, config=config)


def features(params, lora, x_BTHWC, t_B, ctx_BSE, cond=None, *, config: wan.WanConfig, layers):
    """`wan.features` that also takes cond["first"]."""
    inputs = _with_first(x_BTHWC, t_B, ctx_BSE, cond, config)
    return wan.features(params, lora, *inputs, config=config, layers=layers)


def _with_first(x_BTHWC, t_B, ctx_BSE, cond, config: wan.WanConfig):
    """(x, t, ctx, cond) as the model takes them: a given first frame is clean, at time 0."""
    if not cond or "first" not in cond:
        return x_BTHWC, t_B, ctx_BSE, cond
    x = hold(x_BTHWC, cond)
    T, H, W = (n // p for n, p in zip(x.shape[1:4], config.patch_size, strict=True))
    time_index = (jnp.arange(T * H * W) >= H * W).astype(jnp.int32)
    t_BM = jnp.stack([jnp.zeros_like(t_B), t_B], axis=1)
    return x, t_BM, ctx_BSE, {"time_index": time_index}


def hold(x_BTHWC, cond):
    """Latents whose first frame is the given clean one, where cond has one."""
    if not cond or "first" not in cond:
        return x_BTHWC
    return jnp.concatenate([cond["first"].astype(x_BTHWC.dtype), x_BTHWC[:, 1:]], axis=1)
