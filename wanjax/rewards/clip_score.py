"""CLIP rewards, frames against the prompt: PickScore, CLIPScore, HPSv2.1, averaged over frames.

With c = cos(image embedding, text embedding), in float32:
    pickscore  exp(logit_scale) · c / 26  PickScore_v1 (2305.01569), ViT-H/14; Flow-GRPO's scale
    clipscore  max(c, 0)                  clip-vit-large-patch14 (2104.08718 without its factor
                                          2.5; Flow-GRPO's logits / 30 are 100/30 times this)
    hpsv2      c                          HPS_v2.1 (2306.09341), ViT-H/14; its own code runs under
                                          float16 autocast, this does not

model: a folder with config.json and model.safetensors as transformers writes them, the name of such
a Hugging Face repository (yuvalkirstain/PickScore_v1), or one .safetensors file. HPS is published
as a pickle only; this makes the file, once (open_clip's names are understood, and ViT-H/14 is
assumed where there is no config.json):
    import torch, safetensors.torch
    weights = torch.load("HPS_v2.1_compressed.pt", weights_only=True)["state_dict"]
    safetensors.torch.save_file(weights, "HPS_v2.1.safetensors")
tokenizer: a folder with the tokenizer of any OpenAI or LAION CLIP; the model's if not given. Texts
end at 77 tokens.

Pixels of pickscore and clipscore equal transformers' CLIPImageProcessor bit for bit: Pillow's
bicubic to a shorter side of image_size, the centre, 1/255, colour statistics. HPS fits the whole
frame into the square instead, resizing in float, with black bars.

B videos or prompts  T frames  N images (B·T)  H W height, width  C colour  S tokens  D embedding
"""

import dataclasses
import html
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import ftfy
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import transformers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

from wanjax import paths, trees
from wanjax.models import clip
from wanjax.rewards.frames import picker

_FILES = ("config.json", "model.safetensors", "tokenizer*", "vocab.json", "merges.txt")
_VIT_L = clip.CLIPConfig(
    clip.CLIPVisionConfig(1024, 4096, 24, 16, hidden_act="quick_gelu"),
    clip.CLIPTextConfig(49408, 768, 3072, 12, 12, hidden_act="quick_gelu"),
    projection_dim=768,
)
_USUAL = {"pickscore": clip.CLIPConfig(), "clipscore": _VIT_L, "hpsv2": clip.CLIPConfig()}


def pickscore(model: str, frames: str = "all", batch: int = 16, tokenizer: str = "") -> Callable:
    """The PickScore reward of a model folder; frames as in rewards.frames.picker."""
    params, config = load(model)
    scale = float(np.exp(np.asarray(params["logit_scale"], np.float64))) / 26
    return _reward(params, config, tokenizer or model, frames, batch, score=lambda cos: scale * cos)


def clipscore(model: str, frames: str = "all", batch: int = 16, tokenizer: str = "") -> Callable:
    """The CLIPScore reward of a model folder; frames as in rewards.frames.picker."""
    params, config = load(model)
    return _reward(
        params, config, tokenizer or model, frames, batch, score=lambda cos: np.maximum(cos, 0)
    )


def hpsv2(model: str, tokenizer: str, frames: str = "first", batch: int = 16) -> Callable:
    """The HPSv2.1 reward of a weights file; frames as in rewards.frames.picker."""
    params, config = load(model)
    own = dict(score=lambda cos: cos, pixels=fitted_pixels, clean=_clean)
    return _reward(params, config, tokenizer, frames, batch, **own)


def load(path):
    """Read (params, clip.CLIPConfig) of a folder or file; ValueError if anything does not fit."""
    path = paths.local(paths.model(path, _FILES))
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no CLIP weights at {file}; model is a folder with model.safetensors")
    try:
        with safetensors.safe_open(file, "np") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error})") from None
    foreign = "visual.conv1.weight" in tensors
    config = clip.CLIPConfig()
    if (file.parent / "config.json").is_file():
        config = _config(file.parent)
    elif not foreign:
        raise ValueError(f"no config.json beside {file}; take it from the model's own folder")
    tensors = _from_open_clip(tensors) if foreign else tensors
    shapes = jax.eval_shape(lambda: clip.init_clip(jax.random.key(0), config))
    flat = {path: _leaf(tensors, path, x.shape, file) for path, x in trees.flatten(shapes).items()}
    return jax.device_put(trees.unflatten(flat), _own_devices()), config


def forward(name: str, model: str, batch: int = 16, **_) -> tuple:
    """(jitted function, its abstract arguments, its static keywords) of the largest call that the
    reward of this name makes; the first argument is the towers, which each device holds whole.
    Their sizes are those of the config.json at `model`, else the usual ones of the reward."""
    path = pathlib.Path(model).expanduser()
    folder = path if path.is_dir() else path.parent
    known = path.exists() and (folder / "config.json").is_file()
    config = _config(folder) if known else _USUAL[name]
    side, key = config.vision.image_size, jax.random.key(0)
    towers = jax.eval_shape(lambda: clip.init_clip(key, config))
    pixels = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
    return _embed_images, (towers, pixels), {"config": config}


def cut_pixels(frames_NHWC: np.ndarray, size: int) -> np.ndarray:
    """uint8 frames to normalised square pixels, bitwise those of transformers' image processor."""
    H, W = frames_NHWC.shape[1:3]
    h, w = (size * H // min(H, W), size * W // min(H, W))
    top, left = (h - size) // 2, (w - size) // 2
    images = [Image.fromarray(frame) for frame in frames_NHWC]
    x_NHWC = np.stack([np.asarray(i.resize((w, h), Image.Resampling.BICUBIC)) for i in images])
    x_NHWC = x_NHWC[:, top : top + size, left : left + size]
    x_NHWC = (x_NHWC.astype(np.float64) * (1 / 255)).astype(np.float32)
    return (x_NHWC - np.array(clip.MEAN, np.float32)) / np.array(clip.STD, np.float32)


@partial(jax.jit, static_argnames="size")
def fitted_pixels(frames_NHWC, size: int):
    """uint8 frames to normalised square pixels with the whole frame inside, as HPSv2's transform.

    Oracle: torch's antialiased bicubic of floats, which may overshoot [0, 1]. Equal to rounding
    (2e-5), not bitwise as `cut_pixels`, whose oracle resizes bytes.
    """
    N, H, W, C = frames_NHWC.shape
    h, w = (round(side * (size / max(H, W))) for side in (H, W))
    x_NHWC = frames_NHWC.astype(jnp.float32) / 255
    x_NHWC = jax.image.resize(x_NHWC, (N, h, w, C), "cubic", antialias=True)
    bars = [((size - n) // 2, size - n - (size - n) // 2) for n in (h, w)]
    x_NHWC = jnp.pad(x_NHWC, [(0, 0), *bars, (0, 0)])
    return (x_NHWC - jnp.array(clip.MEAN)[None, None, None]) / jnp.array(clip.STD)[None, None, None]


def _reward(
    params, config, tokenizer, frames, batch, *, score, pixels=cut_pixels, clean: Callable = str
):
    """reward(video_BTHWC, prompts, meta) of loaded towers; score maps cosines to frame scores."""
    pick, tokenize = picker(frames), _tokenizer(tokenizer, config)
    size = config.vision.image_size

    def images(x_NHWC):
        return _embed_images(params, _split(pixels(x_NHWC, size)), config=config)

    def texts(ids_BS):
        return _embed_texts(params, _split(ids_BS), config=config)

    def reward(video_BTHWC, prompts, meta):
        del meta
        video_BTHWC = video_BTHWC[:, pick(video_BTHWC.shape[1])]
        B, T = video_BTHWC.shape[:2]
        image_ND = _batched(images, video_BTHWC.reshape(B * T, *video_BTHWC.shape[2:]), batch)
        different = list(dict.fromkeys(prompts))
        text_ND = _batched(texts, tokenize([clean(prompt) for prompt in different]), batch)
        text_BD = text_ND[[different.index(prompt) for prompt in prompts]]
        cos_BT = np.einsum("BTD,BD->BT", image_ND.reshape(B, T, -1), text_BD, dtype=np.float64)
        return score(cos_BT).mean(1), {}

    return reward


@partial(jax.jit, static_argnames="config")
def _embed_images(params, pixels_NHWC, *, config):
    with jax.default_matmul_precision("float32"):
        return _normalised(clip.embed_image(params, pixels_NHWC, config=config))


@partial(jax.jit, static_argnames="config")
def _embed_texts(params, ids_BS, *, config):
    with jax.default_matmul_precision("float32"):
        return _normalised(clip.embed_text(params, ids_BS, config=config))


def _normalised(x_ND):
    return x_ND / jnp.linalg.norm(x_ND, axis=1, keepdims=True)


def _own_devices(*axes: str | None) -> NamedSharding:
    """A layout on the devices of this process: split over ("rows",), whole on each without it."""
    return NamedSharding(Mesh(np.array(jax.local_devices()), ("rows",)), P(*axes))


def _split(rows):
    """Rows divided among the devices of this process, which all hold the tower."""
    return jax.device_put(rows, _own_devices("rows"))


def _batched(function, rows, batch: int) -> np.ndarray:
    """Apply function to rows, always `batch` at a time, made up to a multiple of the devices that
    share them: the last row repeats to fill up."""
    results, ways = [], jax.local_device_count()
    batch = -(-batch // ways) * ways
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        full = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
        results.append(np.asarray(function(full))[: len(part)])
    return np.concatenate(results)


def _clean(prompt: str) -> str:
    """What open_clip does to a text before tokenizing it."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split())


def _tokenizer(folder, config: clip.CLIPConfig) -> Callable:
    """tokenize(texts) -> ids_BS int32, by the tokenizer in a folder."""
    folder = paths.local(paths.model(folder, _FILES))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ValueError(f"no tokenizer.json in {folder}; set tokenizer to a CLIP model's folder")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    end, text = tokenizer.eos_token_id, config.text
    if len(tokenizer) > text.vocab_size or text.eos_token_id not in (2, end):
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens and ends texts with {end}; the "
            f"model knows {text.vocab_size} and {text.eos_token_id}; set tokenizer to its folder"
        )
    settings = dict(padding="max_length", max_length=text.max_position_embeddings, truncation=True)
    return lambda texts: np.array(tokenizer(texts, **settings)["input_ids"], np.int32)


def _config(folder: pathlib.Path) -> clip.CLIPConfig:
    """The config.json of a folder, with transformers' defaults for missing keys."""

    def tower(kind, read):
        return kind(**{field.name: getattr(read, field.name) for field in dataclasses.fields(kind)})

    read: Any = transformers.CLIPConfig.from_pretrained(folder)
    vision = tower(clip.CLIPVisionConfig, read.vision_config)
    text = tower(clip.CLIPTextConfig, read.text_config)
    return clip.CLIPConfig(vision, text, read.projection_dim)


def _leaf(tensors: dict, path: str, shape: tuple, file) -> np.ndarray:
    """One leaf of the parameter tree as float32 from tensors under transformers' names."""
    head, _, last = path.replace("/", ".").rpartition(".")
    name = f"{head}.weight" if last in ("kernel", "scale", "embedding") else f"{head}.{last}"
    root, layers, inner = name.lstrip(".").partition("encoder.layers.")
    wanted = [f"{root}{layers}{i}.{inner}" for i in range(shape[0])] if layers else [root]
    found, expected = [], shape[1:] if layers else shape
    for name in wanted:
        x = tensors.get(name)
        if x is not None and last == "kernel":  # Linear [O,I] -> [I,O], Conv2d -> [H,W,I,O]
            x = x.transpose(*range(2, x.ndim), 1, 0)
        if x is None or x.shape != expected:
            got = "missing" if x is None else f"{x.shape} (inputs first)"
            raise ValueError(
                f"{file}: {name} is {got}, expected {expected}; is it the model of the config.json?"
            )
        found.append(x)
    return (np.stack(found) if layers else found[0]).astype(np.float32)


_OPEN_CLIP = {  # name prefixes; the first match counts
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
}
_LAYER = {
    "ln_": "layer_norm",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.": "self_attn.",
}


def _from_open_clip(tensors: dict) -> dict:
    """The tensors of an open_clip model under transformers' names and layouts."""
    renamed = {}
    for name, x in tensors.items():
        start = next((start for start in _OPEN_CLIP if name.startswith(start)), "")
        rest = name[len(start) :]
        for old, new in _LAYER.items() if start.endswith("resblocks.") else ():
            rest = rest.replace(old, new)
        new = _OPEN_CLIP.get(start, "") + rest
        if "in_proj_" in new:
            for which, part in zip("qkv", np.split(x, 3), strict=True):
                renamed[new.replace("in_proj_", f"{which}_proj.")] = part
        else:
            renamed[new] = x.T if start in ("visual.proj", "text_projection") else x
    return renamed
