"""Check a converted transformer: the source in diffusers (torch) against the result in wanjax.

Both run on the same input, block by block: block l runs in a one-layer model with the embeddings
and the head, so host memory holds one block at a time.
"""

import dataclasses
import typing
from functools import partial

import jax
import numpy as np

from convert import disk, files, load
from wanjax import trees
from wanjax.models import wan

Inputs = dict[str, np.ndarray | None]


def verify(source: disk.Checkpoint, converted: disk.Checkpoint) -> list[tuple[str, float]]:
    """Return [(expert block, relative error in float32)] of the converted checkpoint."""
    out = []
    for component in [c for c in disk.EXPERTS.values() if c in source.tensors]:
        config = disk.component_config(source, component)
        text = 512 if config.image_dim else config.text_len  # diffusers splits image and text there
        settings = {"num_layers": 1, "dtype": "float32", "remat": "none", "text_len": text}
        one = dataclasses.replace(config, **settings)
        model, given = _torch_model(one), _inputs(one)
        cond = None if given["image"] is None else {"image": given["image"]}
        shapes = trees.flatten(jax.eval_shape(partial(wan.init, config=one), jax.random.key(0)))
        denoise = jax.jit(partial(wan.denoise, config=one))
        for layer in range(config.num_layers):
            ours = _one_layer(converted.tensors[component], layer)
            want = _torch_output(model, _one_layer(source.tensors[component], layer), given, one)
            params = load.place(ours, shapes, component, dtype=np.float32)
            got = np.asarray(denoise(params, None, given["x"], given["t"], given["ctx"], cond))
            error = np.abs(got - want).max() / np.abs(want).max()
            out.append((f"{component} block {layer}", float(error)))
    return out


def _inputs(config: wan.WanConfig) -> Inputs:
    """Random latents [1,T,H,W,C], timestep, text and, for models that take one, an image."""
    rng = np.random.default_rng(0)
    frame = [2 * p for p in config.patch_size]
    size = (1, *frame[:2], 3 * config.patch_size[2], config.in_channels)
    x = rng.standard_normal(size, np.float32)
    ctx = rng.standard_normal((1, config.text_len, config.text_dim), np.float32)
    image = None
    if config.image_dim:
        tokens = config.pos_embed_seq_len or 257
        image = rng.standard_normal((1, tokens, config.image_dim), np.float32)
    return {"x": x, "t": np.asarray([700.0], np.float32), "ctx": ctx, "image": image}


def _torch_model(config: wan.WanConfig):
    """diffusers' transformer of this config."""
    from diffusers.models.transformers import transformer_wan

    fields = {f.name for f in dataclasses.fields(config)} - set(disk.RUN_FIELDS)
    return transformer_wan.WanTransformer3DModel(**{f: getattr(config, f) for f in fields}).eval()


def _torch_output(model, tensors: files.Tensors, given: Inputs, config: wan.WanConfig):
    """What diffusers' model computes with these weights, channel last."""
    import torch

    state = {n: torch.tensor(t.all().astype(np.float32)) for n, t in tensors.items()}
    model.load_state_dict(state)
    x, t, ctx = (torch.tensor(given[name]) for name in ("x", "t", "ctx"))
    image: typing.Any = None
    if given["image"] is not None:  # with position embeddings: first and last frame as a batch
        half = 2 if config.pos_embed_seq_len else 1
        image = torch.tensor(given["image"]).reshape(half, -1, given["image"].shape[-1])
    with torch.no_grad():
        out = model(x.permute(0, 4, 1, 2, 3), t, ctx, image).sample
    return out.permute(0, 2, 3, 4, 1).numpy()


def _one_layer(tensors: files.Tensors, layer: int) -> files.Tensors:
    """The tensors of one block, as block 0, and of everything outside the blocks."""
    mine = f"blocks.{layer}."
    rest = {n: t for n, t in tensors.items() if not n.startswith("blocks.")}
    block = {n.removeprefix(mine): t for n, t in tensors.items() if n.startswith(mine)}
    return rest | {f"blocks.0.{n}": t for n, t in block.items()}
