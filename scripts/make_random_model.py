"""Write checkpoints of a published size with random weights, to run the whole of a recipe without
downloads: Wan2.2-T2V-A14B as a diffusers folder, and a CLIP tower of PickScore's size.

    python scripts/make_random_model.py --model DIR                     A14B in fp8, 35 GB
    python scripts/make_random_model.py --model DIR --dtype bfloat16    as published, 69 GB
    python scripts/make_random_model.py --tower DIR                     ViT-H/14, 4 GB
    python scripts/make_random_model.py --model DIR --tower DIR --small for a laptop, 2 MB

Matrices are N(0, 1/inputs), tables N(0, 1/width), UMT5's embedding N(0, 1), norms 1, biases 0, so
activations, velocities and pixels are of order one. Every tensor is a view into one block of noise
that is drawn once, so the disk is what takes the time. With fp8 the matrices of the blocks and
UMT5's embedding are plain e4m3, as in ComfyUI's files without scales.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import zlib
from concurrent import futures

import jax
import ml_dtypes
import numpy as np
import tiny_tokenizer
import tokenizers
import transformers

from convert import disk, files, names, save
from wanjax import trees
from wanjax.models import clip, presets, umt5, vae, wan

A14B = presets.MODELS["wan2.2_t2v_a14b"]
SMALL = dataclasses.replace(
    A14B,
    wan=wan.WanConfig(2, 16, num_layers=2, ffn_dim=64, text_dim=32, freq_dim=32),
    text=umt5.UMT5Config(256, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    vae=vae.VAEConfig(
        base_dim=4, dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=(True, True),
        in_channels=12, out_channels=12, patch_size=2,
    ),
)  # fmt: skip
SMALL_TOWER = clip.CLIPConfig(
    clip.CLIPVisionConfig(32, 64, num_hidden_layers=2, num_attention_heads=2, image_size=28),
    clip.CLIPTextConfig(1024, 32, 64, num_hidden_layers=2, num_attention_heads=2),
    projection_dim=16,
)
WORDS = ["a", "the", "red", "green", "blue", "circle", "square", "moving", "left", "right", "on"]
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
LOGIT_SCALE = math.log(100)  # where CLIP training clips it
_PIECE = 64 << 20  # bytes that convert.files writes at a time
_SHIFTS = 1 << 20  # places where a tensor may start in the noise


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=pathlib.Path, help="folder of the video model; it must not exist")
    add("--tower", type=pathlib.Path, help="folder of the CLIP tower; it must not exist")
    add("--dtype", default="fp8", choices=("fp8", "bfloat16"), help="of the large matrices")
    add("--layers", type=int, help="fewer blocks per expert than the model has")
    add("--experts", type=int, default=2, choices=(1, 2))
    add("--small", action="store_true", help="a tiny model and tower of the same layout")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.model or args.tower):
        parser.error("nothing to write; give --model, --tower or both")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers is {args.layers}; expected at least 1")
    jax.config.update("jax_platforms", "cpu")  # only shapes are asked for
    try:
        if args.model:
            write_model(args.model, _config(args), args.dtype, args.seed)
        if args.tower:
            write_tower(args.tower, SMALL_TOWER if args.small else clip.CLIPConfig(), args.seed)
    except (ValueError, OSError) as error:
        sys.exit(f"make_random_model: {error}")


def _config(args) -> presets.ModelConfig:
    base = SMALL if args.small else A14B
    return dataclasses.replace(
        base,
        wan=dataclasses.replace(base.wan, num_layers=args.layers or base.wan.num_layers),
        experts=presets.EXPERTS[: args.experts],
        boundary=base.boundary if args.experts == 2 else None,
    )


def write_model(out: pathlib.Path, model: presets.ModelConfig, dtype: str, seed: int) -> None:
    """Write a diffusers folder that loads as `model`; ValueError if `out` is not empty."""
    parts = {disk.EXPERTS[expert]: model.wan for expert in model.experts}
    parts |= {"vae": model.vae, "text_encoder": model.text}
    tensors = {part: _random(part, config, dtype, seed) for part, config in parts.items()}
    with save.fresh_folder(out) as folder, futures.ThreadPoolExecutor(len(parts)) as pool:
        assert folder is not None, "one process writes"

        def write(part: str) -> None:
            config = save.component_json(parts[part], part)
            save.write_component(folder, part, tensors[part], config)

        list(pool.map(write, parts))
        tiny_tokenizer.build_tiny_tokenizer(WORDS, folder / "tokenizer")
        save.write_pipeline(model, tensors, folder)
    _report(out)


def write_tower(out: pathlib.Path, config: clip.CLIPConfig, seed: int) -> None:
    """Write a CLIP folder as transformers does, float32; ValueError if `out` is not empty."""
    ends = ("<|startoftext|>", "<|endoftext|>")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    listed = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    text = dataclasses.replace(config.text, eos_token_id=len(listed) - 1)
    config = dataclasses.replace(config, text=text)
    data = {"architectures": ["CLIPModel"], "model_type": "clip", **dataclasses.asdict(config)}
    data["vision_config"], data["text_config"] = data.pop("vision"), data.pop("text")
    data["text_config"]["bos_token_id"] = len(listed) - 2
    with save.fresh_folder(out) as folder:
        assert folder is not None, "one process writes"
        tensors = _random("clip", config, "float32", seed)
        files.write_safetensors(folder / "model.safetensors", tensors)
        save.dump_json(folder / "config.json", data)
        vocab = {token: number for number, token in enumerate(listed)}
        transformers.CLIPTokenizer(vocab=vocab, merges=[]).save_pretrained(folder)
    _report(out)


def _report(out: pathlib.Path) -> None:
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e9:.2f} GB of random weights", flush=True)


def _random(part: str, config, dtype: str, seed: int) -> files.Tensors:
    """Random tensors of a component under its published names."""
    init = clip.init_clip if part == "clip" else disk.MODELS[part][1]
    tree = trees.flatten(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    largest = max(math.prod(shape) for p, leaf in tree.items() for _, shape in _named(p, leaf))
    return {
        name: _tensor(f"{part} {name}", path, shape, _dtype(part, path, dtype), largest, seed)
        for path, leaf in tree.items()
        for name, shape in _named(path, leaf)
    }


def _named(path: str, leaf) -> list[tuple[str, tuple]]:
    """(published name, shape) of the tensors of a leaf; those of CLIP's towers have a prefix."""
    tower, _, rest = path.partition("/")
    if tower not in ("vision_model", "text_model"):
        return names.torch_names(path, leaf.shape)
    return [(f"{tower}.{name}", shape) for name, shape in names.torch_names(rest, leaf.shape)]


def _dtype(part: str, path: str, dtype: str) -> np.dtype:
    """The dtype that a leaf is stored in."""
    transformer = part.startswith("transformer")
    if part in ("vae", "clip") or transformer and any(name in path for name in wan.FLOAT32):
        return F32
    matrix = names.stack_root(path) and path.endswith("/kernel") or path == "shared/embedding"
    return FP8 if matrix and dtype == "fp8" else BF16


def _tensor(key: str, path: str, shape: tuple, dtype, largest: int, seed: int) -> files.Tensor:
    """A lazy tensor: a constant, or a view into the noise that starts where `key` says."""
    last = path.rpartition("/")[2]
    constant = {"scale": 1.0, "gamma": 1.0, "bias": 0.0, "logit_scale": LOGIT_SCALE}.get(last)
    inputs = math.prod(shape[1:]) if last == "kernel" else shape[-1] if shape else 1
    std = 1.0 if path == "shared/embedding" else inputs**-0.5
    row = math.prod(shape[1:])

    def read(index):
        ends = [(s.start, s.stop) for s in index]
        part = tuple(stop - start for start, stop in ends)
        if constant is not None:
            return np.full(part, constant, dtype)
        # convert.files writes whole rows
        first, count = ends[0][0] * row, math.prod(part)
        noise = _noise(seed, max(min(largest, _PIECE), row), std, dtype)
        start = (zlib.crc32(key.encode()) + first) % _SHIFTS
        return noise[start : start + count].reshape(part)

    return files.Tensor(shape, dtype, read, "noise")


@functools.cache
def _normal(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count + _SHIFTS, np.float32)


@functools.cache
def _noise(seed: int, count: int, std: float, dtype: np.dtype) -> np.ndarray:
    """`count` elements of noise, and as many more as a tensor may start later."""
    return (_normal(seed, count) * np.float32(std)).astype(dtype)


if __name__ == "__main__":
    main()
