"""Tiny Wan models for the converter tests: configs, random parameters, diffusers' own modules."""

import dataclasses

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from wanjax import trees
from wanjax.models import presets, umt5, vae, wan

WAN = wan.WanConfig(
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=3,
    ffn_dim=48,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    freq_dim=32,
    text_len=8,
)
VAE = vae.VAEConfig(
    base_dim=4,
    z_dim=4,
    dim_mult=(1, 2, 2),
    num_res_blocks=1,
    temperal_downsample=(True, True),
    latents_mean=(0.1, 0.2, 0.3, 0.4),
    latents_std=(1.0, 2.0, 3.0, 4.0),
    scale_factor_spatial=4,
)
TEXT = umt5.UMT5Config(vocab_size=40, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
CONFIG = presets.ModelConfig(
    name="tiny",
    wan=WAN,
    sampling=presets.Sampling(
        shift=3.0,
        guidance=presets.Guidance(high=4.0, low=3.0),
        steps=4,
        frames=5,
        height=16,
        width=24,
    ),
    vae=VAE,
    text=TEXT,
    experts=("high", "low"),
    boundary=0.875,
)


def random_like(shapes, seed: int):
    """Normal values for every leaf, tables and norms included, so that no two leaves are equal."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32) * 0.2)
    return jax.tree.map(draw, shapes)


def params(config=CONFIG):
    """Random parameters of every component of a model config."""
    shape = lambda init, part: jax.eval_shape(lambda: init(jax.random.key(0), part))
    out = {e: random_like(shape(wan.init, config.wan), k) for k, e in enumerate(config.experts)}
    out["vae"] = random_like(shape(vae.init, config.vae), 7)
    out["text_encoder"] = random_like(shape(umt5.init, config.text), 8)
    return out


def torch_transformer(config=WAN, seed: int = 0):
    """diffusers' transformer with random weights in every tensor."""
    fields = {f.name for f in dataclasses.fields(config)}
    fields -= set(wan.RUN_FIELDS)
    torch.manual_seed(seed)
    model = diffusers.WanTransformer3DModel(**{f: getattr(config, f) for f in fields})
    return _randomise(model)


def torch_vae(config=VAE):
    torch.manual_seed(1)
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config).items()}
    return _randomise(diffusers.AutoencoderKLWan(**fields))


def torch_text(config=TEXT):
    torch.manual_seed(2)
    fields = dataclasses.asdict(config)
    return _randomise(transformers.UMT5EncoderModel(transformers.UMT5Config(**fields)))


def _randomise(model):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    return model.eval()


def equal(a, b) -> bool:
    """Same paths, shapes, dtypes and bytes."""
    a, b = trees.flatten(a), trees.flatten(b)
    same = lambda x, y: x.dtype == y.dtype and bool((x == y).all()) and x.shape == y.shape
    return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
