"""Checkpoints in and out: any published Wan layout <-> parameter trees, every tensor accounted for.

A checkpoint is read as lazy tensors under diffusers names (files.py, names.py), so loading onto a
mesh reads only the byte ranges of each process's own shards, layer by layer into device buffers,
and converting between layouts never holds more than a piece of one tensor.

    python -m convert.weights SRC --to diffusers|original|comfyui|orbax --out DST
"""

import dataclasses
import hashlib
import importlib.resources
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from convert import files, infer, names
from wanjax import sharding, trees
from wanjax.models import clip, presets, umt5, vae, wan

EXPERTS = {"high": "transformer", "low": "transformer_2"}
COMPONENTS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")
_MAX_SIZE = 1 << 20  # of any integer in a config
_CHUNK = 256 << 20  # host bytes of one device transfer
_SMALL = 4 << 20  # below this the host transposes, above the device does
RUN_FIELDS = ("text_len", "dtype", "attention", "remat")  # of WanConfig, not in config.json
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
    spiece: files.Tensor | None = None  # sentencepiece model that ComfyUI stores as a tensor
    said: bool = False  # a file name told its expert
    skipped: dict[str, list[str]] = field(default_factory=dict)  # names not needed, by component


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
    if (pathlib.Path(path) / "arrays").is_dir() if isinstance(path, str | os.PathLike) else False:
        return _restore(pathlib.Path(path).absolute(), mesh, dtype)
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


def _restore(path: pathlib.Path, mesh, dtype):
    """Load the Orbax form, each process its own shards."""
    checkpoint = Checkpoint(str(path), {}, {}, extra=read_json(path / "wanjax.json"))
    checkpoint.configs = checkpoint.extra.pop("configs")
    checkpoint.tensors = dict.fromkeys(checkpoint.configs, {})
    if (path / "google/umt5-xxl").is_dir():
        checkpoint.tokenizer = path / "google/umt5-xxl"
    config, targets = model_config(checkpoint), {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.metadata(path / "arrays").item_metadata.tree
        for component, tree in stored.items():
            tree = trees.unflatten(
                {p: jax.ShapeDtypeStruct(m.shape, m.dtype) for p, m in trees.flatten(tree).items()}
            )
            where = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)
            if mesh is not None:
                where = sharding.tree_shardings(mesh, tree, partial(_logical_axes, component))
            targets[component] = jax.tree.map(
                lambda x, s: ocp.ArrayRestoreArgs(sharding=s, global_shape=x.shape, dtype=x.dtype),
                tree,
                where,
            )
        params = checkpointer.restore(
            path / "arrays", args=ocp.args.PyTreeRestore(restore_args=targets)
        )
    params = {{v: k for k, v in EXPERTS.items()}.get(c, c): tree for c, tree in params.items()}
    if dtype is not None:
        cast = lambda key, tree: (
            wan.store(tree, dtype) if key in EXPERTS else trees.cast(tree, dtype)
        )
        params = {key: cast(key, tree) for key, tree in params.items()}
    return params, config


# ---- what is on disk ----


def read(path) -> Checkpoint:
    """Open a checkpoint of any layout without reading its tensors.

    path: diffusers folder, original folder, folder or list of single files (safetensors, .pth,
    GGUF), one such file, or "tinywan22". Layout, component and expert are read from names, shapes
    and file names.
    """
    if isinstance(path, str) and path == "tinywan22":
        path = str(importlib.resources.files("wanjax") / "assets" / "tinywan22")
    if isinstance(path, list | tuple):
        checkpoint = Checkpoint(", ".join(map(str, path)), {}, {})
        for part in path:
            _add_file(checkpoint, pathlib.Path(part))
        return _complete(checkpoint)
    path = pathlib.Path(path)
    checkpoint = Checkpoint(str(path), {}, {})
    if path.is_file():
        _add_file(checkpoint, path)
    elif not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; set model.path")
    elif (path / "model_index.json").is_file():
        _add_diffusers(checkpoint, path)
    else:
        _add_folder(checkpoint, path)
    return _complete(checkpoint)


def _complete(checkpoint: Checkpoint) -> Checkpoint:
    if "transformer" not in checkpoint.tensors and "transformer_2" in checkpoint.tensors:
        checkpoint.tensors["transformer"] = checkpoint.tensors.pop("transformer_2")
        checkpoint.configs["transformer"] = checkpoint.configs.pop("transformer_2")
    if not checkpoint.tensors:
        raise ValueError(
            f"{checkpoint.where}: no Wan tensors; expected a diffusers folder, an original "
            "folder, or .safetensors, .pth or .gguf files"
        )
    return checkpoint


def _add_diffusers(checkpoint: Checkpoint, path: pathlib.Path) -> None:
    checkpoint.index = read_json(path / "model_index.json")
    for component in COMPONENTS:
        if (path / component).is_dir():
            tensors, _ = files.open_folder(path / component)
            where = f"{path}/{component}"
            checkpoint.tensors[component], skipped = _hub(tensors, component, "diffusers", where)
            checkpoint.skipped[component] = skipped
            checkpoint.configs[component] = read_json(path / component / "config.json")
    for name, at in (("scheduler", "scheduler/scheduler_config.json"), ("extra", "wanjax.json")):
        if (path / at).is_file():
            setattr(checkpoint, name, read_json(path / at))
    if (path / "tokenizer").is_dir():
        checkpoint.tokenizer = path / "tokenizer"
    if "transformer" not in checkpoint.tensors:
        raise ValueError(f"{path}: no transformer/ folder; download the checkpoint again")


_COMFY = ("diffusion_models", "vae", "text_encoders", "clip_vision")


def _add_folder(checkpoint: Checkpoint, path: pathlib.Path) -> None:
    """Original release (high_noise_model/, low_noise_model/ or shards at the root), or files."""
    if (path / "wanjax.json").is_file():
        checkpoint.extra = read_json(path / "wanjax.json")
    experts = {"high_noise_model": "high", "low_noise_model": "low"}
    for name in sorted(experts):
        if (path / name).is_dir():
            tensors, metadata = files.open_folder(path / name)
            _add(checkpoint, tensors, metadata, path / name, experts[name])
    loose = sorted(path.glob("*.safetensors"))
    shards = [
        f for f in loose if re.search(r"-\d{5}-of-\d{5}|^diffusion_pytorch_model|^model\.", f.name)
    ]
    if shards:
        tensors, metadata = files.open_folder(path)
        used = {t.where for t in tensors.values()}
        _add(checkpoint, tensors, metadata, path, None)
        loose = [f for f in loose if str(f) not in used]
    for kind in _COMFY:
        loose += sorted((path / kind).glob("*.safetensors"))
    for file in [*loose, *sorted(path.glob("*.pth")), *sorted(path.glob("*.gguf"))]:
        _add_file(checkpoint, file)
    tokenizer = path / "google" / "umt5-xxl"
    if tokenizer.is_dir():
        checkpoint.tokenizer = tokenizer


def _add_file(checkpoint: Checkpoint, path: pathlib.Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set model.path")
    tensors, metadata = files.open_any(path)
    _add(checkpoint, tensors, metadata, path, expert_in_name(path.stem))


def expert_in_name(text: str) -> str | None:
    """Return "high" or "low" if a name says one of them, None if neither; ValueError if both."""
    sides = {s for s in EXPERTS if re.search(rf"(?i)(?<![a-z]){s}(?![a-z])|{s}_?noise", text)}
    if len(sides) == 2:
        raise ValueError(f"{text}: the name says both high and low noise; rename the file")
    return sides.pop() if sides else None


def _add(checkpoint: Checkpoint, tensors, metadata, where, expert: str | None) -> None:
    """Sort a file's tensors into components under diffusers names."""
    tensors = _unwrapped(tensors, where)
    found = names.detect(tensors)
    if not found:
        raise ValueError(
            f"{where}: {len(tensors)} tensors of no Wan component ({files.some(tensors)}); "
            "expected a transformer, VAE, UMT5 or CLIP checkpoint"
        )
    prefixes = sorted({p for _, _, p in found}, key=len, reverse=True)
    for component, naming, prefix in found:
        owner = lambda n: next((p for p in prefixes if n.startswith(p)), None)
        part = {n[len(prefix) :]: t for n, t in tensors.items() if owner(n) == prefix}
        if component == "transformer" and expert:
            component, checkpoint.said = EXPERTS[expert], True
        if component in checkpoint.tensors:
            raise ValueError(f"{checkpoint.where}: {component} is in more than one file ({where})")
        if (spiece := part.pop("spiece_model", None)) is not None:
            checkpoint.spiece = spiece
        hub, skipped = _hub(part, component, naming, f"{where}: {component}")
        checkpoint.skipped[component] = skipped
        hints = _hints(checkpoint, component, metadata, where)
        checkpoint.tensors[component] = hub
        checkpoint.configs[component] = infer.config(component, hub, hints, str(where))
    leftover = [n for n in tensors if not any(n.startswith(p) for p in prefixes)]
    if leftover:
        raise ValueError(
            f"{where}: {len(leftover)} tensors of no component: {files.some(leftover)}"
        )


def _hints(checkpoint: Checkpoint, component: str, metadata, where: pathlib.Path) -> dict:
    """What a header, wanjax.json or config.json beside the file says of a component's config."""
    if raw := metadata.get(f"wanjax.{component.removesuffix('_2')}"):
        try:
            return dict(json.loads(raw))
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{where}: header entry wanjax.{component} is not JSON") from None
    if component in checkpoint.extra.get("configs", {}):
        return checkpoint.extra["configs"][component]
    beside = where / "config.json" if where.is_dir() else where.parent / "config.json"
    if component.startswith("transformer") and beside.is_file():
        return read_json(beside)
    return {}


def _unwrapped(tensors: files.Tensors, where) -> files.Tensors:
    out = {names.unwrap(n): t for n, t in tensors.items()}
    if len(out) != len(tensors):
        raise ValueError(f"{where}: two names differ only in wrapper prefixes")
    return out


_IGNORED = re.compile(
    r".*\.norm_added_q\..*|(.*\.)?freqs|scaled_fp8|.*\.(scale_input|input_scale)|textual\..*"
    r"|visual\.head|log_scale|(vision_model\.)?embeddings\.position_ids|visual_projection\.weight"
    r"|motion_encoder\.enc\.net_app\.convs\..*\.kernel|logit_scale"
)


def _hub(tensors: files.Tensors, component: str, naming: str, where: str):
    """Rename to diffusers names and undo quantisation; return (tensors, names left out).

    Left out is what carries no information of its own: tied copies, tables, scales used up.
    """
    tensors = _unwrapped(tensors, where)
    skipped = [n for n in tensors if _IGNORED.fullmatch(n)]
    tensors = {n: t for n, t in tensors.items() if n not in skipped}
    for suffix in (".scale_weight", ".weight_scale"):
        for name in [n for n in tensors if n.endswith(suffix)]:
            scale, weight = tensors.pop(name), name.removesuffix(suffix) + ".weight"
            if weight not in tensors or tensors[weight].dtype not in _FP8:
                raise ValueError(f"{where}: {name} belongs to no fp8 weight")
            tensors[weight] = files.dequantise(tensors[weight], scale)
            skipped.append(name)
    if component == "text_encoder" and "encoder.embed_tokens.weight" in tensors:
        tied = tensors.pop("encoder.embed_tokens.weight")  # always the same as shared.weight
        tensors.setdefault("shared.weight", tied)
        skipped.append("encoder.embed_tokens.weight")
    if component == "image_encoder" and naming == "diffusers":
        tensors = {n.removeprefix("vision_model."): t for n, t in tensors.items()}
    if naming == "diffusers":
        return tensors, skipped
    table, out, unknown = names.rules(component, tensors), {}, []
    for name, tensor in tensors.items():
        hit = names.to_diffusers(name, table)
        if hit is None:
            unknown.append(f"{name} {tensor.shape}")
            continue
        new, rule = hit
        if rule.drop:
            tensor = files.squeeze(tensor, rule.drop)
        if len(new) > 1 and (not tensor.shape or tensor.shape[0] % len(new)):
            raise ValueError(
                f"{where}: {name} of shape {tensor.shape} does not split in {len(new)}"
            )
        size = tensor.shape[0] // len(new) if len(new) > 1 else 0
        for k, n in enumerate(new):
            out[n] = files.rows(tensor, k * size, (k + 1) * size) if size else tensor
    if unknown:
        raise ValueError(f"{where}: {len(unknown)} unexpected tensors: {files.some(unknown)}")
    return out, skipped


def read_json(path: pathlib.Path) -> dict:
    """Read a JSON object; ValueError naming the file if it is none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds {type(data).__name__}, expected a JSON object")
    return data


# ---- configs ----


def component_config(checkpoint: Checkpoint, component: str):
    """Return the config dataclass of one component from its config.json."""
    _, cls = _INIT[component]
    data = checkpoint.configs[component]
    where = f"{checkpoint.where}/{component}/config.json"
    fields = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(k for k in data if k not in fields and not k.startswith("_"))
    if unknown and component in ("transformer", "transformer_2", "vae"):
        warnings.warn(f"{where}: ignored unknown {files.some(unknown)}", stacklevel=2)
    kept = {k: v for k, v in data.items() if k in fields and k not in RUN_FIELDS}
    if cls is wan.WanConfig and "text_len" in checkpoint.extra:
        kept["text_len"] = checkpoint.extra["text_len"]
    if component == "text_encoder" and data.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise ValueError(f"{where}: feed_forward_proj is not gated-gelu; Wan uses UMT5")
    return _build(cls, kept, where)


def _build(cls, data: dict, where: str):
    """Make a config dataclass from JSON values of the right types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(data, dict) or set(data) - set(fields):
        raise ValueError(f"{where}: expected an object with {files.some(fields, 99)}")
    data = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    for key, value in data.items():
        if not _fits(fields[key].type, value):
            text = str(value)[:80]
            raise ValueError(f"{where}: {key} is {text!r}, expected {fields[key].type}")
    required = (f.name for f in fields.values() if f.default is dataclasses.MISSING)
    if absent := [n for n in required if n not in data]:
        raise ValueError(f"{where}: {files.some(absent)} missing; copy the published file")
    try:
        return cls(**data)
    except (TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from None


def _fits(kind, value) -> bool:
    """Whether a JSON value has the type of a config field, and a size that a model can have."""
    if isinstance(value, int) and abs(value) > _MAX_SIZE:
        return False
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(x, int | float) for x in value)
    return isinstance(value, int | float if kind is float else kind)


def model_config(checkpoint: Checkpoint) -> presets.ModelConfig:
    """Return the ModelConfig: architecture from the files, sampling from the preset it matches.

    Schedulers in released folders are not trusted for a known model (A14B says shift 3, was
    released with 12 and 5); a folder's own wanjax.json comes first, the scheduler last.
    """
    if "transformer" not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{checkpoint.where}: has {has} but no transformer; add its file")
    configs = {c: component_config(checkpoint, c) for c in checkpoint.tensors}
    experts = tuple(e for e, c in EXPERTS.items() if c in configs)
    base = configs["transformer"]
    if len(experts) == 2 and configs["transformer_2"] != base:
        raise ValueError(
            f"{checkpoint.where}: transformer and transformer_2 have different configs; "
            "both experts must share one architecture"
        )
    same = [m for m in presets.MODELS.values() if _same(m.wan, base)]
    paired = len(experts) == 2 or checkpoint.said  # one file named high or low is half a pair
    preset = next((m for m in same if (len(m.experts) == 2) == paired), next(iter(same), None))
    boundary = checkpoint.index.get("boundary_ratio", checkpoint.extra.get("boundary"))
    if not isinstance(boundary, float | None):
        raise ValueError(
            f"{checkpoint.where}: boundary_ratio is {str(boundary)[:80]!r}, not a number"
        )
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
            preset,
            wan=base,
            experts=experts,
            boundary=boundary,
            tokenizer=_path(checkpoint.tokenizer),
            **parts,
        )
    where = f"{checkpoint.where}/wanjax.json"
    shift = checkpoint.scheduler.get("flow_shift", checkpoint.scheduler.get("shift", 5.0))
    said = checkpoint.extra.get("sampling", {"guidance": {"high": 5.0, "low": 5.0}, "steps": 50})
    said = {"shift": shift, **said} if isinstance(said, dict) else {}
    said["guidance"] = _build(presets.Guidance, said.get("guidance"), where)
    return presets.ModelConfig(
        name=str(checkpoint.extra.get("name", pathlib.Path(checkpoint.where).name)),
        wan=base,
        sampling=_build(presets.Sampling, said, where),
        experts=experts,
        boundary=boundary,
        tokenizer=_path(checkpoint.tokenizer),
        **parts,
    )


def _path(path) -> str | None:
    return None if path is None else str(path)


def _same(preset: wan.WanConfig, config: wan.WanConfig) -> bool:
    run = {f: getattr(config, f) for f in RUN_FIELDS}
    return dataclasses.replace(preset, **run) == config


def fingerprint(checkpoint: Checkpoint) -> str:
    """Short hash of the transformers: every name and shape, and a few small tensors' values."""
    digest = hashlib.sha256()
    for component in EXPERTS.values():
        tensors = checkpoint.tensors.get(component, {})
        for name in sorted(tensors):
            digest.update(f"{component}.{name} {tensors[name].shape}".encode())
        for name in ("proj_out.weight", "scale_shift_table", "blocks.0.attn1.to_q.bias"):
            if name in tensors:
                digest.update(tensors[name].all().astype(np.float32).tobytes())
    return digest.hexdigest()[:16]


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
    try:
        shapes = trees.flatten(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    except (TypeError, ValueError, ArithmeticError, OverflowError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"{where}: the config makes no model: {text}") from None
    deep = max((x.shape[0] for p, x in shapes.items() if names.stack_root(p)), default=0)
    if deep > len(tensors):
        raise ValueError(
            f"{where}: config says {deep} layers, the files hold {len(tensors)} tensors"
        )
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
    if dtype is None and (stored in _FP8 or parts[0].compact is not None):
        dtype = jnp.bfloat16
    dtype = stored if dtype is None else dtype
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
            raw = chunk(*lead)
            if raw.nbytes < _SMALL:
                host = raw.transpose(move).astype(dtype).reshape(local)
                shards += [jax.device_put(host, d) for d in devices]
            else:
                sent = [jax.device_put(raw, d) for d in devices]
                shards += [_arrange(x, axes=move, dtype=dtype, shape=tuple(local)) for x in sent]
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


@partial(jax.jit, static_argnames=("axes", "dtype", "shape"))
def _arrange(raw, *, axes, dtype, shape):
    return raw.transpose(axes).astype(dtype).reshape(shape)


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
    parts = {"vae": config.vae, "text_encoder": config.text, "image_encoder": config.image}
    with fresh_folder(out) as folder:
        for c, part in tensors.items():
            part = {n: stored(c, n, t, dtype) for n, t in part.items()}
            write_component(folder, c, part, component_json(parts.get(c, config.wan), c))
        if folder is not None:
            write_pipeline(config, tensors, folder)


def write_component(folder, component: str, tensors: files.Tensors, config: dict) -> None:
    """Write one component folder; folder None (processes > 0) only takes part in gathering."""
    if folder is None:
        for tensor in tensors.values():
            tensor.all()
        return
    (folder / component).mkdir()
    encoder = component in ("text_encoder", "image_encoder")
    files.write_sharded(
        folder / component, "model" if encoder else "diffusion_pytorch_model", tensors
    )
    dump_json(folder / component / "config.json", config)


def stored(component: str, name: str, tensor: files.Tensor, dtype) -> files.Tensor:
    """Cast a tensor for storing; float32 names of the transformer and integers stay as they are."""
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    if dtype is None and tensor.compact is not None:
        return files.cast(tensor, tensor.compact)
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


def dump_json(path: pathlib.Path, data: dict) -> None:
    """Write a JSON object, making its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_CLASSES = {
    "transformer": "WanTransformer3DModel",
    "transformer_2": "WanTransformer3DModel",
    "vae": "AutoencoderKLWan",
    "text_encoder": "UMT5EncoderModel",
    "image_encoder": "CLIPVisionModel",
}


def component_json(config, component: str) -> dict:
    """Return the config.json of a component's config dataclass."""
    data = {k: v for k, v in dataclasses.asdict(config).items() if k not in RUN_FIELDS}
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
    return {"_class_name": _CLASSES[component], "_diffusers_version": "0.35.0", **data}


def extra_json(config: presets.ModelConfig) -> dict:
    """Return wanjax.json: what no other file of a folder says."""
    return {
        "name": config.name,
        "text_len": config.wan.text_len,
        "boundary": config.boundary,
        "sampling": dataclasses.asdict(config.sampling),
    }


def write_pipeline(config: presets.ModelConfig, tensors, folder: pathlib.Path) -> None:
    """Write what makes component folders a diffusers pipeline: index, scheduler, tokenizer."""
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
    dump_json(folder / "model_index.json", dict(sorted(index.items())))
    dump_json(folder / "scheduler/scheduler_config.json", scheduler)
    dump_json(folder / "wanjax.json", extra_json(config))
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
        dump_json(folder / "image_processor/preprocessor_config.json", processor)
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        dump_json(folder / "model_index.json", dict(sorted(index.items())))


if __name__ == "__main__":
    from convert import export  # it imports this module

    raise SystemExit(export.main())
