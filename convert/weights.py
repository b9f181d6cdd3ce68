"""Parameter trees from checkpoints and back: any published Wan layout, straight onto a mesh.

A checkpoint is opened as lazy tensors under diffusers names (disk.py), so loading reads only the
byte ranges of each process's own shards, in chunks of layers, into device buffers.

    python -m convert.weights SRC --to diffusers|original|comfyui|orbax --out DST
"""

import dataclasses
import json
import math
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
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from convert import disk, files, names
from wanjax import trees
from wanjax.models import presets, quant, wan
from wanjax.parallel import sharding

_CHUNK = 256 << 20  # host bytes of one device transfer
_SMALL = 4 << 20  # below this the host transposes, above the device does
Bounds = tuple[tuple[int, int], ...]
_KEYS = {component: expert for expert, component in disk.EXPERTS.items()}


def load(path, *, mesh=None, dtype=None, experts_only=False, dense=None, offload=False):
    """Load a model: (params, presets.ModelConfig).

    Args:
      path: what `disk.read` takes (folders and files of any layout, or "tinywan22"), or a folder
        that convert.weights wrote with --to orbax.
      mesh: place leaves on this mesh by their logical axes; None keeps them on the default device.
      dtype: matmul weights become this; norms, tables and time embedding of the transformer stay
        float32. "float8" and "int8" quantise the matrices of the transformer's blocks (see
        models.quant), all else becomes bfloat16. None keeps the stored dtypes (fp8 and GGUF data
        become bfloat16).
      experts_only: leave out VAE and encoders.
      dense: {expert: {parameter name: change}}, added in float32 as the parameters are read.
      offload: keep the weights of the experts in host memory, see `sharding.to_host`.
    params has "high", "low" (two experts), "vae", "text_encoder", "image_encoder" as present.
    Raises ValueError naming missing, unexpected, misshapen or truncated tensors.
    """
    if isinstance(path, str | os.PathLike) and (pathlib.Path(path) / "arrays").is_dir():
        if dense:
            raise ValueError(
                f"{path} is an Orbax folder, to which dense changes of an adapter cannot be added; "
                "load the checkpoint that it was made from"
            )
        params, config = _restore(pathlib.Path(path).absolute(), mesh, dtype)
        if offload:
            params |= {e: sharding.to_host(params[e]) for e in config.experts}
        kept = config.experts if experts_only else params
        return {name: params[name] for name in kept}, config
    checkpoint = disk.read(path)
    config = disk.model_config(checkpoint)
    for expert, changes in (dense or {}).items():
        own = checkpoint.tensors[disk.EXPERTS[expert]]
        own |= {name: _changed(own[name], change) for name, change in changes.items()}
    kept = [c for c in checkpoint.tensors if c in _KEYS or not experts_only]
    plans = {c: disk.plan(checkpoint, c) for c in kept}  # every check comes first
    params = {
        _KEYS.get(c, c): place(
            checkpoint.tensors[c], shapes, c, mesh=mesh, dtype=dtype, offload=offload and c in _KEYS
        )
        for c, shapes in plans.items()
    }
    return params, config


def _changed(tensor: files.Tensor, change) -> files.Tensor:
    """A lazy tensor with a change added in float32."""
    change = np.asarray(change, np.float32).reshape(tensor.shape)

    def read(index):
        return (tensor.read(index).astype(np.float32) + change[index]).astype(tensor.dtype)

    return dataclasses.replace(tensor, read=read, compact=None)


def load_component(path, component: str, *, mesh=None, dtype=None):
    """Load one component of a checkpoint: (tree, config of that component)."""
    checkpoint = disk.read(path)
    if component not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{path}: no {component}, it has {has}; point to a folder that has one")
    shapes = disk.plan(checkpoint, component)
    tree = place(checkpoint.tensors[component], shapes, component, mesh=mesh, dtype=dtype)
    return tree, disk.component_config(checkpoint, component)


def _restore(path: pathlib.Path, mesh, dtype):
    """Load the Orbax form, each process its own shards."""
    checkpoint = disk.Checkpoint(str(path), {}, {}, extra=disk.read_json(path / "wanjax.json"))
    checkpoint.configs = checkpoint.extra.pop("configs")
    checkpoint.tensors = dict.fromkeys(checkpoint.configs, {})
    if (path / "google/umt5-xxl").is_dir():
        checkpoint.tokenizer = path / "google/umt5-xxl"
    config, params = disk.model_config(checkpoint), {}
    shapes = {c: disk.shapes(checkpoint, c) for c in checkpoint.configs}

    def target(component, where, leaf):
        return ocp.ArrayRestoreArgs(sharding=where, global_shape=leaf.shape)

    targets = {
        c: jax.tree.map(partial(target, c), _shardings(flat, c, mesh), trees.unflatten(flat))
        for c, flat in shapes.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        stored = checkpointer.restore(
            path / "arrays", args=ocp.args.PyTreeRestore(restore_args=targets)
        )
    for component, tree in stored.items():
        if dtype is not None:
            tree = wan.store(tree, dtype) if component in _KEYS else trees.cast(tree, _plain(dtype))
        params[_KEYS.get(component, component)] = tree
    return params, config


# ---- onto devices ----


def place(
    tensors: files.Tensors, shapes: dict, component: str, *, mesh=None, dtype=None, offload=False
):
    """Read a component into its parameter tree, each process its own shards only; with offload
    every leaf goes on to host memory."""
    where = trees.flatten(_shardings(shapes, component, mesh)) if mesh is not None else {}
    flat = {}
    for path, leaf in shapes.items():
        parts = [tensors[name] for name, _ in names.torch_names(path, leaf.shape)]
        if path.endswith("/gamma"):
            parts = [files.squeeze(t, tuple(range(1, len(t.shape)))) for t in parts]
        target = _target(component, path, parts, _plain(dtype))
        placed = _place(path, leaf.shape, parts, target, where)
        small = component.startswith("transformer") and dtype in quant.DTYPES
        leaves = dict(wan.store_leaf(path, placed, dtype) if small else {path: placed})
        flat |= sharding.to_host(leaves) if offload else leaves
    return trees.unflatten(flat)


def _plain(dtype):
    """The dtype of what is not quantised."""
    return jnp.bfloat16 if dtype in quant.DTYPES else dtype


def _shardings(shapes: dict, component: str, mesh):
    """Tree of shardings of a component; one device without a mesh."""

    def axes(path: str, leaf) -> tuple[str | None, ...]:
        if component.startswith("transformer"):
            return wan.logical_axes(path, leaf)
        if component == "vae" or leaf.ndim < 2:
            return (None,) * leaf.ndim
        return (None,) * (leaf.ndim - 1) + (
            "embed",
        )  # an encoder runs once: split its largest axis

    tree = trees.unflatten(shapes)
    if mesh is None:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), tree)
    return sharding.tree_shardings(mesh, tree, axes)


def _target(component: str, path: str, parts: list[files.Tensor], dtype) -> np.dtype:
    """The dtype a leaf gets, see `load`."""
    if dtype is None:
        stored = _common(parts)
        quantised = stored in disk.FP8 or parts[0].compact is not None
        return np.dtype(jnp.bfloat16) if quantised else stored
    keep = component.startswith("transformer") and any(name in path for name in wan.FLOAT32)
    return np.dtype(np.float32 if keep else dtype)


def _common(parts: list[files.Tensor]) -> np.dtype:
    """The dtype of the parts; float32 if they differ."""
    kinds = {part.dtype for part in parts}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def _place(path: str, shape: tuple, parts: list[files.Tensor], dtype: np.dtype, where: dict):
    """Assemble one leaf on its devices. Shards that fill a box together are read together, equal
    ones once."""
    target = where.get(path)
    if target is None:
        whole = tuple((0, n) for n in shape)
        return _shards(path, parts, whole, {whole: [None]}, dtype)[0]
    groups: dict[Bounds, list] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        groups.setdefault(bounds, []).append(device)
    box = tuple(
        (min(lo for lo, _ in axis), max(hi for _, hi in axis)) for axis in zip(*groups, strict=True)
    )
    volume = lambda bounds: math.prod(hi - lo for lo, hi in bounds)
    filled = sum(map(volume, groups)) == volume(box)
    jobs = [(box, groups)] if filled else [(bounds, {bounds: groups[bounds]}) for bounds in groups]
    shards = [x for job in jobs for x in _shards(path, parts, *job, dtype)]
    return jax.make_array_from_single_device_arrays(shape, target, shards)


def _shards(path: str, parts: list[files.Tensor], box: Bounds, groups: dict, dtype: np.dtype):
    """Read the range `box` of a leaf and put the range of each group on each of its devices.

    Chunks along the leading axis bound the host memory: layers of a stack, or rows of a leaf that
    has its torch layout; a kernel outside a stack is one chunk. The next chunk is read while one is
    sent, and only one.
    """
    axes = names.permutation(path, len(parts[0].shape))
    stacked = names.stack_root(path) is not None
    rows = not stacked and box != () and axes == tuple(range(len(box)))
    if rows:
        axes = axes[:-1]

    def leading(bounds: Bounds):
        """(range of the leading axis, range of the other axes in torch order)."""
        first, inner = (bounds[0], bounds[1:]) if stacked or rows else ((0, 1), bounds)
        return first, [inner[axes.index(k)] for k in range(len(axes))]

    def read(lo: int) -> np.ndarray:
        hi = min(lo + step, last)
        raw = np.empty((hi - lo, *(s.stop - s.start for s in at)), _common(parts))
        if rows:
            files.fill([(parts[0], (slice(lo, hi), *at), raw)])
        else:
            files.fill((parts[i], at, raw[i - lo, ...]) for i in range(lo, hi))
        return raw

    (first, last), ranges = leading(box)
    at = tuple(slice(*bounds) for bounds in ranges)
    move = (0, *(1 + a for a in axes))
    size = math.prod(s.stop - s.start for s in at) * _common(parts).itemsize
    step = max(1, _CHUNK // max(1, size))
    arrays: dict[Bounds, list] = {}
    starts = range(first, last, step)
    for lo, raw in zip(starts, files.ahead(read, starts), strict=True):
        for bounds, devices in groups.items():
            local = tuple(hi - lo for lo, hi in bounds)
            (start, stop), own = leading(bounds)
            begin, end = max(lo, start), min(lo + len(raw), stop)
            if begin >= end:
                continue
            cut = (slice(a - s.start, b - s.start) for (a, b), s in zip(own, at, strict=True))
            part = np.ascontiguousarray(raw[(slice(begin - lo, end - lo), *cut)])
            small = end - begin == stop - start and part.nbytes < _SMALL
            if small:
                part = part.transpose(move).astype(dtype).reshape(local)
            sent = jax.block_until_ready([jax.device_put(part, d) for d in devices])
            if small:
                arrays[bounds] = sent
            elif end - begin == stop - start:
                arrays[bounds] = [_arrange(x, axes=move, dtype=dtype, shape=local) for x in sent]
            else:
                if bounds not in arrays:
                    arrays[bounds] = [jnp.zeros(local, dtype, device=d) for d in devices]
                pairs = zip(arrays[bounds], sent, strict=True)
                arrays[bounds] = [_insert(old, x, begin - start, axes=move) for old, x in pairs]
    return [x for bounds in groups for x in arrays[bounds]]


@partial(jax.jit, static_argnames=("axes", "dtype", "shape"))
def _arrange(raw, *, axes, dtype, shape):
    return raw.transpose(axes).astype(dtype).reshape(shape)


@partial(jax.jit, static_argnames="axes", donate_argnames="buffer")
def _insert(buffer, raw, start, *, axes):
    x = raw.transpose(axes).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, 0)


# ---- out of trees ----


def of_tree(tree) -> files.Tensors:
    """View a parameter tree as lazy tensors under diffusers names and torch layout.

    Arrays of several processes are gathered range by range, so all processes must read alike.
    """
    tensors = {}
    for path, leaf in trees.flatten(tree).items():
        gamma = path.endswith("/gamma")
        for layer, (name, shape) in enumerate(names.torch_names(path, leaf.shape)):
            at = (layer,) if names.stack_root(path) else ()
            axes = names.permutation(path, len(leaf.shape) - len(at))
            core = leaf.shape if gamma else shape
            tensor = files.Tensor(
                core, np.dtype(leaf.dtype), partial(_gather, leaf, at, axes), "memory"
            )
            tensors[name] = (
                files.unsqueeze(tensor, tuple(range(1, len(shape)))) if gamma else tensor
            )
    return tensors


def _gather(leaf, layer: tuple, axes: tuple, index: files.Index) -> np.ndarray:
    """Read a range of one layer, given in torch axes, out of a leaf."""
    at = (*(slice(i, i + 1) for i in layer), *(index[a] for a in axes))
    local = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    if local and leaf.nbytes <= _CHUNK:
        part = np.asarray(leaf)[at]
    else:
        starts, sizes = [s.start for s in at], tuple(s.stop - s.start for s in at)
        part = to_host(_range(leaf, starts, sizes=sizes))
    return part.reshape(part.shape[len(layer) :]).transpose(np.argsort(axes))


@partial(jax.jit, static_argnames="sizes")
def _range(leaf, starts, *, sizes):
    return jax.lax.dynamic_slice(leaf, starts, sizes)


def to_host(leaf) -> np.ndarray:
    """Return a whole array as numpy, gathered from all processes if it is spread over them."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


# ---- diffusers folders ----


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


def write_component(folder, component: str, tensors: files.Tensors, config: dict) -> None:
    """Write one component folder; folder None (processes > 0) only takes part in gathering."""
    if folder is None:
        for tensor in tensors.values():
            files.touch(tensor)
        return
    (folder / component).mkdir()
    encoder = component in ("text_encoder", "image_encoder")
    stem = "model" if encoder else "diffusion_pytorch_model"
    files.write_sharded(folder / component, stem, tensors)
    dump_json(folder / component / "config.json", config)


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
        "expand_timesteps": config.wan.out_channels == 48,
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
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        dump_json(folder / "model_index.json", dict(sorted(index.items())))


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
    index |= {"scheduler": ["few_step", "FewStepScheduler"]}
    index |= {"boundary_ratio": said["sampler"]["boundary"]}
    dump_json(folder / "model_index.json", index)
    dump_json(folder / "scheduler/scheduler_config.json", said["few_step"])
    shutil.copy(pathlib.Path(__file__).with_name("few_step.py"), folder / "scheduler")


if __name__ == "__main__":
    from convert import export  # it imports this module

    raise SystemExit(export.main())
