"""Checkpoints in and out: any published Wan layout <-> parameter trees, every tensor accounted for.

A checkpoint is read as lazy tensors under diffusers names (files.py, names.py), so loading onto a
mesh reads only the byte ranges of each process's own shards, layer by layer into device buffers,
and converting between layouts never holds more than a piece of one tensor.

    python -m convert.weights SRC --to diffusers|original|comfyui|orbax --out DST
"""

import dataclasses
import importlib.resources
import json
import math
import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from convert import files, names
from wanjax import sharding, trees
from wanjax.models import clip, presets, umt5, vae, wan

EXPERTS = {"high": "transformer", "low": "transformer_2"}
COMPONENTS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")
_CHUNK = 256 << 20  # host bytes of one device transfer
_RUN_FIELDS = ("text_len", "dtype", "attention", "remat")  # of WanConfig, not in config.json
_FP8 = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
_INIT = {
    "transformer": (wan.init, wan.WanConfig),
    "transformer_2": (wan.init, wan.WanConfig),
    "vae": (vae.init, vae.VAEConfig),
    "text_encoder": (umt5.init, umt5.UMT5Config),
    "image_encoder": (clip.init, clip.CLIPVisionConfig),
}


@dataclass
class Checkpoint:
    """A checkpoint on disk: lazy tensors under diffusers names and config dicts, per component."""

    where: str
    tensors: dict[str, files.Tensors]
    configs: dict[str, dict]
    index: dict = field(default_factory=dict)  # model_index.json
    scheduler: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)  # wanjax.json: name, sampling, text_len
    tokenizer: pathlib.Path | None = None


def load(path, *, mesh=None, dtype=None):
    """Load a model: (params, presets.ModelConfig).

    Args:
      path: checkpoint folder or file, or "tinywan22" (ships with the package).
      mesh: place leaves on this mesh by their logical axes; None keeps them on the default device.
      dtype: matmul weights become this; norms, tables and time embedding of the transformer stay
        float32. None keeps the stored dtypes (fp8 becomes bfloat16).
    params has "high", "low" (two experts), "vae", "text_encoder", "image_encoder" as present.
    Raises ValueError naming missing, unexpected, misshapen or truncated tensors.
    """
    checkpoint = read(path)
    config = model_config(checkpoint)
    keys = {component: expert for expert, component in EXPERTS.items()}
    plans = {c: plan(checkpoint, c) for c in checkpoint.tensors}  # all checks before any reading
    params = {
        keys.get(c, c): place(checkpoint.tensors[c], shapes, c, mesh=mesh, dtype=dtype)
        for c, shapes in plans.items()
    }
    return params, config


def load_component(folder, component: str, *, mesh=None, dtype=None):
    """Load one component of a checkpoint: (tree, config of that component)."""
    checkpoint = read(folder)
    if component not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{folder}: no {component}, it has {has}; point to a folder that has one")
    shapes = plan(checkpoint, component)
    tree = place(checkpoint.tensors[component], shapes, component, mesh=mesh, dtype=dtype)
    return tree, component_config(checkpoint, component)


# ---- what is on disk ----


def read(path) -> Checkpoint:
    """Open a checkpoint without reading its tensors."""
    if str(path) == "tinywan22":
        path = str(importlib.resources.files("wanjax") / "assets" / "tinywan22")
    path = pathlib.Path(path)
    if not (path / "model_index.json").is_file():
        raise ValueError(
            f"{path}: no model_index.json, expected a diffusers folder; set model.path to the "
            "folder that holds transformer/, vae/ and text_encoder/"
        )
    checkpoint = Checkpoint(str(path), {}, {}, index=read_json(path / "model_index.json"))
    for component in COMPONENTS:
        if (path / component).is_dir():
            tensors, _ = files.open_folder(path / component)
            checkpoint.tensors[component] = _hub(tensors, component, f"{path}/{component}")
            checkpoint.configs[component] = read_json(path / component / "config.json")
    if (path / "scheduler/scheduler_config.json").is_file():
        checkpoint.scheduler = read_json(path / "scheduler/scheduler_config.json")
    if (path / "wanjax.json").is_file():
        checkpoint.extra = read_json(path / "wanjax.json")
    if (path / "tokenizer").is_dir():
        checkpoint.tokenizer = path / "tokenizer"
    if "transformer" not in checkpoint.tensors:
        raise ValueError(f"{path}: no transformer/ folder; download the checkpoint again")
    return checkpoint


def read_json(path: pathlib.Path) -> dict:
    """Read a JSON object; ValueError naming the file if it is none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds {type(data).__name__}, expected a JSON object")
    return data


def _hub(tensors: files.Tensors, component: str, where: str) -> files.Tensors:
    """Drop what carries no information of its own: tied copies and derived tables."""
    out = {names.unwrap(n): t for n, t in tensors.items()}
    if len(out) != len(tensors):
        raise ValueError(f"{where}: two names differ only in wrapper prefixes")
    if component == "text_encoder":
        tied = out.pop("encoder.embed_tokens.weight", None)
        if tied is not None:
            out.setdefault("shared.weight", tied)
    if component == "image_encoder":
        out = {n.removeprefix("vision_model."): t for n, t in out.items()}
    ignored = [n for n in out if ".norm_added_q." in n or n == "embeddings.position_ids"]
    return {n: t for n, t in out.items() if n not in ignored}


# ---- configs ----


def component_config(checkpoint: Checkpoint, component: str):
    """Return the config dataclass of one component from its config.json."""
    _, cls = _INIT[component]
    data = checkpoint.configs[component]
    where = f"{checkpoint.where}/{component}/config.json"
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(k for k in data if k not in fields and not k.startswith("_"))
    if unknown and component in ("transformer", "transformer_2", "vae"):
        warnings.warn(f"{where}: ignored unknown {files.some(unknown)}", stacklevel=2)
    kept = {k: _frozen(v) for k, v in data.items() if k in fields and k not in _RUN_FIELDS}
    if cls is wan.WanConfig and "text_len" in checkpoint.extra:
        kept["text_len"] = checkpoint.extra["text_len"]
    required = (f.name for f in fields.values() if f.default is dataclasses.MISSING)
    if absent := [n for n in required if n not in kept]:
        raise ValueError(f"{where}: {files.some(absent)} missing; copy the published config.json")
    if component == "text_encoder" and data.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise ValueError(f"{where}: feed_forward_proj is not gated-gelu; Wan uses UMT5")
    try:
        return cls(**kept)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _frozen(value):
    return tuple(value) if isinstance(value, list) else value


def model_config(checkpoint: Checkpoint) -> presets.ModelConfig:
    """Return the ModelConfig: architecture from the files, sampling from the preset it matches.

    Schedulers in released folders are not trusted for a known model (A14B says shift 3, was
    released with 12 and 5); a folder's own wanjax.json comes first, the scheduler last.
    """
    configs = {c: component_config(checkpoint, c) for c in checkpoint.tensors}
    experts = tuple(e for e, c in EXPERTS.items() if c in configs)
    base = configs["transformer"]
    if len(experts) == 2 and configs["transformer_2"] != base:
        raise ValueError(
            f"{checkpoint.where}: transformer and transformer_2 have different configs; "
            "both experts must share one architecture"
        )
    preset = next((m for m in presets.MODELS.values() if _same(m, base, experts)), None)
    boundary = checkpoint.index.get("boundary_ratio")
    if boundary is not None and len(experts) == 1:
        raise ValueError(
            f"{checkpoint.where}: boundary_ratio {boundary} in model_index.json but no "
            "transformer_2/; download the low-noise expert or set boundary_ratio to null"
        )
    if boundary is None and len(experts) == 2:
        boundary = preset.boundary if preset else None
        if boundary is None:
            raise ValueError(
                f"{checkpoint.where}: two experts need boundary_ratio in model_index.json"
            )
    optional = {"vae": "vae", "text": "text_encoder", "image": "image_encoder"}
    parts = {k: configs[c] for k, c in optional.items() if c in configs}
    if preset and not checkpoint.extra:
        return dataclasses.replace(
            preset, wan=base, boundary=boundary, tokenizer=_path(checkpoint.tokenizer), **parts
        )
    shift = checkpoint.scheduler.get("flow_shift", checkpoint.scheduler.get("shift", 5.0))
    sampling = {"shift": shift, "guidance": {"high": 5.0, "low": 5.0}, "steps": 50}
    sampling |= checkpoint.extra.get("sampling", {})
    guidance = presets.Guidance(**sampling.pop("guidance"))
    return presets.ModelConfig(
        name=checkpoint.extra.get("name", pathlib.Path(checkpoint.where).name),
        wan=base,
        sampling=presets.Sampling(guidance=guidance, **sampling),
        experts=experts,
        boundary=boundary,
        tokenizer=_path(checkpoint.tokenizer),
        **parts,
    )


def _path(path) -> str | None:
    return None if path is None else str(path)


def _same(preset: presets.ModelConfig, config: wan.WanConfig, experts) -> bool:
    fields = [f.name for f in dataclasses.fields(config) if f.name not in _RUN_FIELDS]
    equal = all(getattr(preset.wan, f) == getattr(config, f) for f in fields)
    return equal and preset.experts == experts


# ---- accounting ----


def plan(checkpoint: Checkpoint, component: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {path: shape} of a component's tree after checking every tensor name and shape."""
    init, _ = _INIT[component]
    tensors, where = checkpoint.tensors[component], f"{checkpoint.where}: {component}"
    if component in ("transformer", "transformer_2") and (kind := names.special_variant(tensors)):
        raise ValueError(
            f"{where} is a {kind} checkpoint, which the model code does not run; convert.weights "
            "can still change its layout"
        )
    config = component_config(checkpoint, component)
    shapes = trees.flatten(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    expected = dict(n for path, leaf in shapes.items() for n in names.torch_names(path, leaf.shape))
    account(where, expected, {n: t.shape for n, t in tensors.items()})
    return shapes


def account(where: str, expected: dict[str, tuple], got: dict[str, tuple]) -> None:
    """Raise a one-line ValueError if names or shapes differ."""
    missing = [f"{n} {s}" for n, s in expected.items() if n not in got]
    unexpected = [f"{n} {s}" for n, s in got.items() if n not in expected]
    wrong = [
        f"{n} is {got[n]}, expected {s}" for n, s in expected.items() if n in got and got[n] != s
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("of wrong shape", wrong))
    if any(items for _, items in parts):
        text = "; ".join(
            f"{len(items)} {what}: {files.some(items)}" for what, items in parts if items
        )
        raise ValueError(
            f"{where} has {len(got)} tensors, expected {len(expected)}; {text}; "
            "the files do not fit the config.json beside them"
        )


# ---- onto devices ----


def place(tensors: files.Tensors, shapes, component: str, *, mesh=None, dtype=None):
    """Read a component into its parameter tree, each process its own shards only."""
    axes = partial(_logical_axes, component)
    where = (
        {}
        if mesh is None
        else trees.flatten(sharding.tree_shardings(mesh, trees.unflatten(shapes), axes))
    )
    flat = {}
    for path, leaf in shapes.items():
        parts = [tensors[name] for name, _ in names.torch_names(path, leaf.shape)]
        if path.endswith("/gamma"):
            parts = [files.squeeze(t, tuple(range(1, len(t.shape)))) for t in parts]
        kind = _target(component, path, parts, dtype)
        flat[path] = _place(path, leaf.shape, parts, kind, where.get(path))
    return trees.unflatten(flat)


def _logical_axes(component: str, path: str, leaf) -> tuple[str | None, ...]:
    if component.startswith("transformer"):
        return wan.logical_axes(path, leaf)
    if component == "vae" or leaf.ndim < 2:
        return (None,) * leaf.ndim
    return (None,) * (leaf.ndim - 1) + ("embed",)  # encoders run once: split where it is largest


def _target(component: str, path: str, parts, dtype) -> np.dtype:
    stored = parts[0].dtype
    for part in parts[1:]:
        stored = stored if part.dtype == stored else jnp.promote_types(stored, part.dtype)
    if component.startswith("transformer") and dtype is not None:
        dtype = np.float32 if any(name in path for name in wan.FLOAT32) else dtype
    if dtype is None:
        dtype = jnp.bfloat16 if stored in _FP8 else stored
    return np.dtype(dtype)


def _place(path: str, shape: tuple, parts: list[files.Tensor], dtype, target):
    """Assemble one leaf. Chunks along the leading axis bound the host memory: layers of a stack, or
    rows of a leaf that keeps its torch layout; other leaves are one chunk."""
    stacked = names.stack_root(path) is not None
    torch_ndim = len(parts[0].shape)
    axes = names.permutation(path, torch_ndim)
    rows = not stacked and torch_ndim > 0 and axes == tuple(range(torch_ndim))
    shard_of = {None: (slice(None),) * len(shape)}
    if target is not None:
        shard_of = target.addressable_devices_indices_map(shape)
    groups: dict[tuple, list] = {}
    for device, index in shard_of.items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        groups.setdefault(bounds, []).append(device)
    if rows:
        axes = axes[:-1]
    shards = []
    for bounds, devices in groups.items():
        lead, inner = (bounds[0], bounds[1:]) if stacked or rows else ((0, 1), bounds)
        at = tuple(slice(*inner[axes.index(k)]) for k in range(len(axes)))
        raw_shape = tuple(s.stop - s.start for s in at)

        def chunk(first, last, at=at, raw_shape=raw_shape):
            raw = np.empty((last - first, *raw_shape), parts[0].dtype)
            if rows:
                files.fill([(parts[0], (slice(first, last), *at), raw)])
            else:
                files.fill((parts[i], at, raw[i - first, ...]) for i in range(first, last))
            return raw

        move = (0, *(1 + a for a in axes))
        local = [hi - lo for lo, hi in bounds]
        size = max(1, math.prod(raw_shape) * parts[0].dtype.itemsize)
        step = max(1, _CHUNK // size)
        if step >= lead[1] - lead[0]:
            host = chunk(*lead).transpose(move).astype(dtype).reshape(local)
            shards += [jax.device_put(host, d) for d in devices]
            continue
        buffers = [jnp.zeros(local, dtype, device=d) for d in devices]
        sent: list = []
        for first in range(*lead, step):
            raw = chunk(first, min(first + step, lead[1]))
            jax.block_until_ready(sent)  # the transfer before this read is done: two chunks live
            sent = [jax.device_put(raw, d) for d in devices]
            buffers = [
                _insert(buffer, x, first - lead[0], axes=move)
                for buffer, x in zip(buffers, sent, strict=True)
            ]
        shards += buffers
    if target is None:
        return shards[0]
    return jax.make_array_from_single_device_arrays(shape, target, shards)


@partial(jax.jit, static_argnames="axes", donate_argnames="buffer")
def _insert(buffer, raw, start, *, axes):
    x = raw.transpose(axes).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, 0)


# ---- out ----


def of_tree(tree) -> files.Tensors:
    """View a parameter tree as lazy tensors under diffusers names and torch layout.

    Arrays of several processes are gathered range by range, so all processes must read alike.
    """
    tensors = {}
    for path, leaf in trees.flatten(tree).items():
        for layer, (name, shape) in enumerate(names.torch_names(path, leaf.shape)):
            at = (layer,) if names.stack_root(path) else ()
            inner = leaf.shape[len(at) :]
            core = inner if path.endswith("/gamma") else shape
            read = partial(_gather, leaf, at, names.permutation(path, len(inner)))
            tensor = files.Tensor(core, np.dtype(leaf.dtype), read, "memory")
            if path.endswith("/gamma"):
                tensor = files.unsqueeze(tensor, tuple(range(1, len(shape))))
            tensors[name] = tensor
    return tensors


def _gather(leaf, layer: tuple, axes: tuple, index: files.Index) -> np.ndarray:
    """Read a range of one layer, given in torch axes, out of a leaf."""
    at = (*(slice(i, i + 1) for i in layer), *(index[a] for a in axes))
    local = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if local and leaf.nbytes <= _CHUNK:
        part = np.asarray(leaf)[at]
    else:
        part = _range(leaf, [s.start for s in at], sizes=tuple(s.stop - s.start for s in at))
        part = np.asarray(part if local else multihost_utils.process_allgather(part, tiled=True))
    return part.reshape(part.shape[len(layer) :]).transpose(np.argsort(axes))


def to_host(leaf) -> np.ndarray:
    """Return a whole array as numpy, gathered from all processes if it is spread over them."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


@partial(jax.jit, static_argnames="sizes")
def _range(leaf, starts, *, sizes):
    return jax.lax.dynamic_slice(leaf, starts, sizes)


def save_diffusers(params, config: presets.ModelConfig, out, dtype=None) -> None:
    """Write the folder that diffusers' Wan pipelines load; it appears whole or not at all.

    dtype: stored dtype of floating tensors (norms and tables of the transformer keep theirs);
    None keeps each leaf's. Raises ValueError if `out` exists and is not an empty folder.
    """
    tensors = {EXPERTS.get(key, key): of_tree(tree) for key, tree in params.items()}
    write_diffusers(config, tensors, out, dtype)


def write_diffusers(
    config: presets.ModelConfig, tensors: dict[str, files.Tensors], out, dtype=None
):
    """Write lazy tensors per component and the configs of `config` as a diffusers folder."""
    with fresh_folder(out) as folder:
        for component, part in tensors.items():
            part = {n: stored(component, n, t, dtype) for n, t in part.items()}
            plain = component in ("text_encoder", "image_encoder")
            stem = "model" if plain else "diffusion_pytorch_model"
            if folder is None:
                for tensor in part.values():
                    tensor.all()  # takes part in the gathering
                continue
            (folder / component).mkdir()
            files.write_sharded(folder / component, stem, part)
            _dump(folder / component / "config.json", component_json(config, component))
        if folder is not None:
            _write_pipeline(config, tensors, folder)


def stored(component: str, name: str, tensor: files.Tensor, dtype) -> files.Tensor:
    """Cast a tensor for storing; float32 names of the transformer and integers stay as they are."""
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    if dtype is None or not floating:
        return tensor
    if component.startswith("transformer") and any(n in name for n in wan.FLOAT32):
        return tensor
    return files.cast(tensor, dtype)


@contextmanager
def fresh_folder(out) -> Iterator[pathlib.Path | None]:
    """Yield a temporary folder beside `out` that takes its place at the end; None on processes > 0.

    The temporary folder is removed if anything fails, and `out` is untouched.
    """
    out = pathlib.Path(out)
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


def _dump(path: pathlib.Path, data: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_CLASSES = {
    "transformer": "WanTransformer3DModel",
    "transformer_2": "WanTransformer3DModel",
    "vae": "AutoencoderKLWan",
    "text_encoder": "UMT5EncoderModel",
    "image_encoder": "CLIPVisionModel",
}


def component_json(config: presets.ModelConfig, component: str) -> dict:
    """Return the config.json of a component."""
    part = {"vae": config.vae, "text_encoder": config.text, "image_encoder": config.image}
    part = part.get(component, config.wan)
    data = {k: v for k, v in dataclasses.asdict(part).items() if k not in _RUN_FIELDS}
    if component == "text_encoder":
        return {
            "architectures": [_CLASSES[component]],
            "model_type": "umt5",
            "feed_forward_proj": "gated-gelu",
            "num_decoder_layers": config.text.num_layers,
            **data,
        }
    if component == "image_encoder":
        return {"architectures": [_CLASSES[component]], "model_type": "clip_vision_model", **data}
    return {"_class_name": _CLASSES[component], "_diffusers_version": "0.35.0", **data}


def _write_pipeline(config: presets.ModelConfig, tensors, folder: pathlib.Path) -> None:
    image = config.wan.in_channels != config.wan.out_channels
    library = lambda c: ["transformers" if "encoder" in c else "diffusers", _CLASSES[c]]
    index = {
        "_class_name": "WanImageToVideoPipeline" if image else "WanPipeline",
        "_diffusers_version": "0.35.0",
        "boundary_ratio": config.boundary,
        "expand_timesteps": config.wan.in_channels == 48,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"] if config.tokenizer else [None, None],
        **{c: library(c) for c in tensors},
    }
    for absent in {"transformer_2"} | ({"image_encoder", "image_processor"} if image else set()):
        index.setdefault(absent, [None, None])
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "_diffusers_version": "0.35.0",
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": config.sampling.shift,
        "solver_order": 2,
        "solver_type": "bh2",
        "predict_x0": True,
    }
    extra = {
        "name": config.name,
        "text_len": config.wan.text_len,
        "sampling": dataclasses.asdict(config.sampling),
    }
    _dump(folder / "model_index.json", dict(sorted(index.items())))
    _dump(folder / "scheduler/scheduler_config.json", scheduler)
    _dump(folder / "wanjax.json", extra)
    if config.tokenizer:
        shutil.copytree(config.tokenizer, folder / "tokenizer")
    if "image_encoder" in tensors:
        size = config.image.image_size
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": size, "width": size},
            "size": {"shortest_edge": size},
            "resample": 3,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
        _dump(folder / "image_processor/preprocessor_config.json", processor)
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        _dump(folder / "model_index.json", dict(sorted(index.items())))
