"""Tiny Wan models and adapters for the converter tests: configs, random values, comparisons."""

import dataclasses

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from convert import files
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


def same(got, want):
    """Assert that lazy tensors have the same names, shapes, dtypes and bytes."""
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:5]
    for name, tensor in want.items():
        a, b = got[name].all(), tensor.all()
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.tobytes() == b.tobytes(), name


def edit(folder, change):
    """Rewrite transformer/ with its tensors changed by change(dict)."""
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors, _ = files.open_safetensors(path)
    data = {n: t.all() for n, t in tensors.items()}
    change(data)
    files.write_safetensors(path, {n: files.of_array(a) for n, a in data.items()})


# ---- adapters ----

Q = "diffusion_model.blocks.1.self_attn.q"
FULL = {"blocks/attn1/to_q": (4, 2.0), "blocks/ffn.net.2": (2, 5.0), "proj_out": (3, 3.0)}


def make_trees(config=CONFIG, modules=FULL):
    """Random adapter trees on both experts; {module: (rank, alpha)}."""
    rng = np.random.default_rng(0)
    shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), config.wan)))
    out = {}
    for expert in config.experts:
        flat = {}
        for module, (rank, alpha) in modules.items():
            *stack, fan_in, fan_out = shapes[f"{module}/kernel"].shape
            flat[f"{module}/a"] = rng.standard_normal((*stack, fan_in, rank), np.float32)
            flat[f"{module}/b"] = rng.standard_normal((*stack, rank, fan_out), np.float32)
            flat[f"{module}/scale"] = np.full(stack, alpha / rank, np.float32)
        out[expert] = trees.unflatten({k: jax.numpy.asarray(v) for k, v in flat.items()})
    return out


def save_adapter(path, tensors, metadata=None):
    """Write an adapter file; returns its path."""
    lazy = {n: files.of_array(np.asarray(a)) for n, a in tensors.items()}
    files.write_safetensors(path, lazy, metadata)
    return path


def pair(module, rank=2, fan_in=32):
    """{key: array} of a random low-rank pair of a module with 32 outputs."""
    rng = np.random.default_rng(len(module))
    a = rng.standard_normal((rank, fan_in), np.float32)
    return {
        f"{module}.lora_A.weight": a,
        f"{module}.lora_B.weight": rng.standard_normal((32, rank), np.float32),
    }
