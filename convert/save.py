"""Parameter trees out again: as lazy tensors, and as the folders that diffusers loads."""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from convert import disk, files, names
from wanjax import paths, trees
from wanjax.models import presets, wan
from wanjax.parallel import sharding

_CLASSES = {
    "transformer": "WanTransformer3DModel",
    "transformer_2": "WanTransformer3DModel",
    "vae": "AutoencoderKLWan",
    "text_encoder": "UMT5EncoderModel",
    "image_encoder": "CLIPVisionModel",
}
_VERSION = "0.35.0"  # of diffusers, written into its configs


def save_diffusers(params, config: presets.ModelConfig, out, dtype=None) -> None:
    """Write the folder that diffusers' Wan pipelines load; it appears whole or not at all.

    dtype: stored dtype of floating tensors (norms and tables of the transformer keep theirs);
    None keeps each leaf's. Raises ValueError if `out` exists and is not an empty folder.
    """
    tensors: dict[str, files.Tensors] = {
        str(disk.EXPERTS.get(key, key)): of_tree(tree) for key, tree in params.items()
    }
    parts = {"vae": config.vae, "text_encoder": config.text, "image_encoder": config.image}
    with fresh_folder(out) as folder:
        for c, part in tensors.items():
            part = {n: stored(c, n, t, dtype) for n, t in part.items()}
            write_component(folder, c, part, component_json(parts.get(c, config.wan), c))
        if folder is not None:
            write_pipeline(config, tensors, folder)


def write_sampler(folder: pathlib.Path, said: dict) -> None:
    """Add to wanjax.json of a folder, in any layout, how a trained model samples.

    said: {"sampler": note of wanjax.sample, "few_step": settings of convert/few_step.py}, or less;
    the second also makes that file the scheduler of a diffusers folder.
    """
    if not said:
        return
    dump_json(folder / "wanjax.json", disk.read_json(folder / "wanjax.json") | said)
    if "few_step" not in said or not (folder / "model_index.json").is_file():
        return
    index = disk.read_json(folder / "model_index.json")
    index["scheduler"] = ["few_step", "FewStepScheduler"]
    index["boundary_ratio"] = said["sampler"]["boundary"]
    dump_json(folder / "model_index.json", index)
    dump_json(folder / "scheduler/scheduler_config.json", said["few_step"])
    shutil.copy(pathlib.Path(__file__).with_name("few_step.py"), folder / "scheduler")


def of_tree(tree) -> files.Tensors:
    """View a parameter tree as lazy tensors under diffusers names and torch layout.

    Arrays of several processes are gathered range by range, so all processes must read alike.
    """
    tensors = {}
    for path, leaf in trees.flatten(tree).items():
        for layer, (name, shape) in enumerate(names.torch_names(path, leaf.shape)):
            at = (layer,) if names.stack_root(path) else ()
            axes = names.permutation(path, len(leaf.shape) - len(at))
            read = partial(_gather, leaf, at, axes)
            core, ones = shape[: len(axes)], tuple(range(len(axes), len(shape)))
            tensor = files.Tensor(core, np.dtype(leaf.dtype), read, "memory")
            tensors[name] = files.unsqueeze(tensor, ones)  # those of the VAE's gamma
    return tensors


def _gather(leaf, layer: tuple, axes: tuple, index: files.Index) -> np.ndarray:
    """Read a range of one layer, given in torch axes, out of a leaf."""
    at = (*(slice(i, i + 1) for i in layer), *(index[a] for a in axes))
    small = leaf.nbytes <= files.CHUNK
    if not isinstance(leaf, jax.Array) or (leaf.is_fully_addressable and small):
        part = np.asarray(leaf)[at]
    else:
        starts, sizes = [s.start for s in at], tuple(s.stop - s.start for s in at)
        part = sharding.fetch(_range(leaf, starts, sizes=sizes))
    return part.reshape(part.shape[len(layer) :]).transpose(np.argsort(axes))


@partial(jax.jit, static_argnames="sizes")
def _range(leaf, starts, *, sizes):
    return jax.lax.dynamic_slice(leaf, starts, sizes)


def stored(component: str, name: str, tensor: files.Tensor, dtype) -> files.Tensor:
    """Cast a tensor for storing; float32 names of the transformer and integers stay as they are."""
    if dtype is None and tensor.compact is not None:
        return files.cast(tensor, tensor.compact)
    keep = component.startswith("transformer") and any(n in name for n in wan.FLOAT32)
    if dtype is None or keep or not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor
    return files.cast(tensor, dtype)


@contextmanager
def fresh_folder(out) -> Iterator[pathlib.Path | None]:
    """Yield a temporary folder beside `out` that takes its place at the end; None on processes > 0.

    The temporary folder is removed if anything fails, and `out` is untouched.
    """
    out = paths.local(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; choose another output or remove it")
    if jax.process_index() != 0:
        yield None
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        os.chmod(folder, 0o755)
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def dump_json(path: pathlib.Path, data: dict) -> None:
    """Write a JSON object, making its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_component(folder, component: str, tensors: files.Tensors, config: dict) -> None:
    """Write one component folder; folder None (processes > 0) only takes part in gathering."""
    if folder is None:
        for tensor in tensors.values():
            files.touch(tensor)
        return
    (folder / component).mkdir()
    stem = "model" if component.endswith("_encoder") else "diffusion_pytorch_model"
    files.write_sharded(folder / component, stem, tensors)
    dump_json(folder / component / "config.json", config)


def component_json(config, component: str) -> dict:
    """Return the config.json of a component's config dataclass."""
    data = {k: v for k, v in dataclasses.asdict(config).items() if k not in disk.RUN_FIELDS}
    if component == "text_encoder":
        return {
            "architectures": [_CLASSES[component]],
            "model_type": "umt5",
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": config.num_layers,
            **data,
        }
    if component == "image_encoder":
        return {"architectures": [_CLASSES[component]], "model_type": "clip_vision_model", **data}
    return {"_class_name": _CLASSES[component], "_diffusers_version": _VERSION, **data}


def extra_json(config: presets.ModelConfig) -> dict:
    """Return wanjax.json: what no other file of a folder says."""
    return {
        "name": config.name,
        "text_len": config.wan.text_len,
        "boundary": config.boundary,
        "sampling": dataclasses.asdict(config.sampling),
    }


def write_pipeline(config: presets.ModelConfig, tensors, folder: pathlib.Path) -> None:
    """Write what makes component folders a diffusers pipeline: index, scheduler, tokenizer and
    image processor."""
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "_diffusers_version": _VERSION,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": config.sampling.shift,
        "solver_order": 2,
        "solver_type": "bh2",
        "predict_x0": True,
    }
    dump_json(folder / "model_index.json", _index(config, tensors))
    dump_json(folder / "scheduler/scheduler_config.json", scheduler)
    dump_json(folder / "wanjax.json", extra_json(config))
    if config.tokenizer:
        paths.copy_folder(config.tokenizer, folder / "tokenizer")
    if "image_encoder" in tensors:
        size = config.image.image_size if config.image else 224
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": size, "width": size},
            "size": {"shortest_edge": size},
            "resample": 3,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        dump_json(folder / "image_processor/preprocessor_config.json", processor)


def _index(config: presets.ModelConfig, tensors) -> dict:
    """model_index.json: the pipeline, its parts by library and class, and the parts it lacks."""
    image = config.wan.in_channels != config.wan.out_channels
    index = {
        "_class_name": "WanImageToVideoPipeline" if image else "WanPipeline",
        "_diffusers_version": _VERSION,
        "boundary_ratio": config.boundary,
        "expand_timesteps": config.wan.out_channels == 48,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"] if config.tokenizer else [None, None],
    }
    for component in tensors:
        library = "transformers" if "encoder" in component else "diffusers"
        index[component] = [library, _CLASSES[component]]
    if "image_encoder" in tensors:
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    for absent in {"transformer_2"} | ({"image_encoder", "image_processor"} if image else set()):
        index.setdefault(absent, [None, None])
    return dict(sorted(index.items()))
