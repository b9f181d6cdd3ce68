"""Parameter trees from checkpoints of any published layout, placed straight onto a mesh.

A checkpoint is opened as lazy tensors under diffusers names (disk.py), so each process reads only
the byte ranges of its own shards, in chunks of layers, into device buffers. Before any is read, a
component is checked to have exactly the tensors that its config describes.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from convert import disk, files, names, save
from wanjax import trees
from wanjax.models import presets, quant, wan
from wanjax.parallel import sharding

_SMALL = 4 << 20  # bytes below which the host transposes a part, not the device
Bounds = tuple[tuple[int, int], ...]
_KEYS = {component: expert for expert, component in disk.EXPERTS.items()}


def load(path, *, mesh=None, dtype=None, components=None, dense=None, offload=False):
    """Load a model: (params, presets.ModelConfig).

    Args:
      path: what `disk.read` takes (folders and files of any layout, or "tinywan22"), or a folder
        that convert.weights wrote with --to orbax.
      mesh: place leaves on this mesh by their logical axes; None keeps them on the default device.
      dtype: matmul weights become this; norms, tables and time embedding of the transformer stay
        float32. "float8" and "int8" quantise the matrices of the transformer's blocks (see
        models.quant); everything else becomes bfloat16. None keeps the stored dtypes (fp8 and GGUF
        data become bfloat16).
      components: which of "high", "low", "vae", "text_encoder", "image_encoder" to load, of those
        that the model has; None loads all.
      dense: {expert: {parameter name: change}}, added in float32 as the parameters are read.
      offload: keep the weights of the experts in host memory, see `sharding.to_host`.
    params has "high", "low" (two experts), "vae", "text_encoder", "image_encoder" as present.
    Raises ValueError naming missing, unexpected, misshapen or truncated tensors.
    """
    checkpoint, config = _examine(path, components)
    if checkpoint.arrays:
        if dense:
            raise ValueError(
                f"{path} is an Orbax folder, which cannot take the dense changes of an adapter; "
                "load the checkpoint it was made from"
            )
        params = _restore(checkpoint, mesh, dtype, components)
        if offload:
            params |= {e: sharding.to_host(params[e]) for e in config.experts if e in params}
        return params, config
    for expert, changes in (dense or {}).items():
        own = checkpoint.tensors[disk.EXPERTS[expert]]
        own |= {name: _changed(own[name], change) for name, change in changes.items()}
    params, put = {}, partial(place, mesh=mesh, dtype=dtype)
    for c, tensors in checkpoint.tensors.items():
        if _wanted(c, components):
            away = offload and c in _KEYS
            params[_KEYS.get(c, c)] = put(tensors, shapes(checkpoint, c), c, offload=away)
    return params, config


def model_config(path, *, components=None) -> presets.ModelConfig:
    """The ModelConfig of a checkpoint from its headers alone; raises as `load` does."""
    return _examine(path, components)[1]


def load_component(path, component: str, *, mesh=None):
    """Load one component of a checkpoint: (tree, config of that component)."""
    checkpoint = disk.read(path)
    if component not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{path}: no {component}, only {has}; give a folder that has one")
    tree = place(checkpoint.tensors[component], plan(checkpoint, component), component, mesh=mesh)
    return tree, disk.component_config(checkpoint, component)


def plan(checkpoint: disk.Checkpoint, component: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {path: shape} of a component's tree after checking every tensor name and shape."""
    tensors, where = checkpoint.tensors[component], f"{checkpoint.where}: {component}"
    if component in _KEYS and (kind := names.special_variant(tensors)):
        raise ValueError(
            f"{where} is a {kind} checkpoint, which the model code does not run; convert.weights "
            "can still change its layout"
        )
    tree = shapes(checkpoint, component)
    deep = max((x.shape[0] for p, x in tree.items() if names.stack_root(p)), default=0)
    if deep > len(tensors):
        raise ValueError(
            f"{where}: the config says {deep} layers, but the files hold {len(tensors)} tensors"
        )
    expected = dict(n for path, leaf in tree.items() for n in names.torch_names(path, leaf.shape))
    _compare(where, expected, {n: t.shape for n, t in tensors.items()})
    return tree


def shapes(checkpoint: disk.Checkpoint, component: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return {path: shape} of the tree that a component's config describes."""
    config = disk.component_config(checkpoint, component)
    try:
        return dict(_shapes(component, config))
    except (TypeError, ValueError, ArithmeticError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"{checkpoint.where}: no model can be built from the config of {component}: {text}"
        ) from None


def stored(checkpoint: disk.Checkpoint, component: str) -> Iterator[files.Tensors]:
    """The tensors of a component as they are stored, without a device: all of them, or of the Orbax
    form, which keeps a leaf in one piece, some leaves at a time in host memory."""
    if not checkpoint.arrays:
        yield checkpoint.tensors[component]
        return
    leaves, group, size = shapes(checkpoint, component), [], 0
    for path, leaf in leaves.items():
        more = leaf.dtype.itemsize * math.prod(leaf.shape)
        if group and size + more > files.CHUNK:
            yield save.of_tree(_stored_leaves(checkpoint, component, group))
            group, size = [], 0
        group, size = [*group, path], size + more
    yield save.of_tree(_stored_leaves(checkpoint, component, group))


def place(
    tensors: files.Tensors, shapes: dict, component: str, *, mesh=None, dtype=None, offload=False
):
    """Read a component into its parameter tree, each process only its own shards; with offload
    every leaf goes on to host memory."""
    where = trees.flatten(shardings(shapes, component, mesh)) if mesh is not None else {}
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


def _examine(path, components) -> tuple[disk.Checkpoint, presets.ModelConfig]:
    """Open a checkpoint and account for every tensor that is needed, before any is read."""
    checkpoint = disk.read(path)
    config = disk.model_config(checkpoint)
    check = shapes if checkpoint.arrays else plan
    for component in checkpoint.tensors:
        if _wanted(component, components):
            check(checkpoint, component)
    return checkpoint, config


def _wanted(component: str, components) -> bool:
    """Whether a component of a checkpoint is among those that are asked for by our names."""
    return components is None or _KEYS.get(component, component) in components


@lru_cache(16)
def _shapes(component: str, config) -> tuple:
    tree = jax.eval_shape(lambda: disk.MODELS[component][1](jax.random.key(0), config))
    return tuple(trees.flatten(tree).items())


def _compare(where: str, expected: dict[str, tuple], got: dict[str, tuple]) -> None:
    """Raise a one-line ValueError if names or shapes differ."""
    missing = [f"{n} {s}" for n, s in expected.items() if n not in got]
    unexpected = [f"{n} {s}" for n, s in got.items() if n not in expected]
    both = [(n, got[n], s) for n, s in expected.items() if n in got]
    wrong = [f"{n} is {shape}, expected {s}" for n, shape, s in both if shape != s]
    parts = (("missing", missing), ("unexpected", unexpected), ("of wrong shape", wrong))
    found = [f"{len(items)} {what}: {files.some(items)}" for what, items in parts if items]
    if found:
        raise ValueError(
            f"{where} has {len(got)} tensors, expected {len(expected)}; {'; '.join(found)}; "
            "the files do not match the config.json beside them"
        )


def _restore(checkpoint: disk.Checkpoint, mesh, dtype, components) -> dict:
    """Load the Orbax form, each process its own shards."""

    def target(where, leaf):
        return ocp.ArrayRestoreArgs(sharding=where, global_shape=leaf.shape)

    targets = {}
    for c in checkpoint.configs:
        if not _wanted(c, components):
            continue
        flat = shapes(checkpoint, c)
        targets[c] = jax.tree.map(target, shardings(flat, c, mesh), trees.unflatten(flat))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        options = ocp.args.PyTreeRestore(targets, targets, partial_restore=True)
        stored = checkpointer.restore(checkpoint.arrays, args=options)
    params = {}
    for component, tree in stored.items():
        if dtype is not None:
            tree = wan.store(tree, dtype) if component in _KEYS else trees.cast(tree, _plain(dtype))
        params[_KEYS.get(component, component)] = tree
    return params


def _stored_leaves(checkpoint: disk.Checkpoint, component: str, paths: list[str]) -> dict:
    """Some leaves of a component of the Orbax form, as host arrays."""
    wanted = dict.fromkeys(paths, ocp.RestoreArgs(restore_type=np.ndarray))
    tree = {component: trees.unflatten(wanted)}
    how = ocp.args.PyTreeRestore(tree, tree, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(checkpoint.arrays, args=how)[component]


def _changed(tensor: files.Tensor, change) -> files.Tensor:
    """A lazy tensor with a change added in float32."""
    change = np.asarray(change, np.float32).reshape(tensor.shape)

    def read(index):
        return (tensor.read(index).astype(np.float32) + change[index]).astype(tensor.dtype)

    return dataclasses.replace(tensor, read=read, compact=None)


def _plain(dtype):
    """The dtype of what is not quantised."""
    return jnp.bfloat16 if dtype in quant.DTYPES else dtype


def shardings(shapes: dict, component: str, mesh):
    """Tree of the layouts that `place` gives a component of {path: shape}; one device without a
    mesh."""

    def axes(path: str, leaf) -> tuple[str | None, ...]:
        if component.startswith("transformer"):
            return wan.logical_axes(path, leaf)
        if component == "vae" or leaf.ndim < 2:
            return (None,) * leaf.ndim
        return (*(None,) * (leaf.ndim - 1), "embed")  # an encoder runs once: split the last axis

    tree = trees.unflatten(shapes)
    if mesh is None:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), tree)
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


def _volume(bounds: Bounds) -> int:
    return math.prod(hi - lo for lo, hi in bounds)


def _place(path: str, shape: tuple, parts: list[files.Tensor], dtype: np.dtype, where: dict):
    """Assemble one leaf on its devices. Shards that fill a box together are read together, equal
    ones once."""
    if (target := where.get(path)) is None:
        whole = tuple((0, n) for n in shape)
        return _shards(path, parts, whole, {whole: [None]}, dtype)[0]
    groups: dict[Bounds, list] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        groups.setdefault(bounds, []).append(device)
    sides = [list(zip(*axis, strict=True)) for axis in zip(*groups, strict=True)]
    box = tuple((min(los), max(his)) for los, his in sides)
    filled = sum(map(_volume, groups)) == _volume(box)
    jobs = [(box, groups)] if filled else [(bounds, {bounds: groups[bounds]}) for bounds in groups]
    shards = [x for job in jobs for x in _shards(path, parts, *job, dtype)]
    return jax.make_array_from_single_device_arrays(shape, target, shards)


def _shards(path: str, parts: list[files.Tensor], box: Bounds, groups: dict, dtype: np.dtype):
    """Read the range `box` of a leaf and put the range of each group on each of its devices.

    Chunks along the leading axis bound the host memory: layers of a stack, or rows of a leaf that
    has its torch layout; a kernel outside a stack is one chunk. While one chunk is sent the next
    is read, and only that one.
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

    (first, last), ranges = leading(box)
    at = tuple(slice(*bounds) for bounds in ranges)
    move = (0, *(1 + a for a in axes))
    size = _volume(tuple(ranges)) * _common(parts).itemsize
    step = max(1, files.CHUNK // max(1, size))

    def read(lo: int) -> np.ndarray:
        hi = min(lo + step, last)
        raw = np.empty((hi - lo, *(s.stop - s.start for s in at)), _common(parts))
        if rows:
            files.fill([(parts[0], (slice(lo, hi), *at), raw)])
        else:
            files.fill((parts[i], at, raw[i - lo, ...]) for i in range(lo, hi))
        return raw

    arrays: dict[Bounds, list] = {}
    starts = range(first, last, step)
    for lo, raw in zip(starts, files.ahead(read, starts), strict=True):
        for bounds, devices in groups.items():
            (start, stop), own = leading(bounds)
            begin, end = max(lo, start), min(lo + len(raw), stop)
            if begin >= end:
                continue
            cut = (slice(a - s.start, b - s.start) for (a, b), s in zip(own, at, strict=True))
            part = np.ascontiguousarray(raw[(slice(begin - lo, end - lo), *cut)])
            shape, whole = tuple(hi - lo for lo, hi in bounds), end - begin == stop - start
            if not whole and bounds not in arrays:
                arrays[bounds] = [jnp.zeros(shape, dtype, device=d) for d in devices]
            into = None if whole else (arrays[bounds], begin - start)
            arrays[bounds] = _send(part, devices, into, axes=move, dtype=dtype, shape=shape)
    return [x for bounds in groups for x in arrays[bounds]]


def _send(part: np.ndarray, devices: list, into: tuple[list, int] | None, *, axes, dtype, shape):
    """Put a shard in torch layout on its devices, or a chunk of it into (buffers, start)."""
    small = into is None and part.nbytes < _SMALL
    if small:
        part = part.transpose(axes).astype(dtype).reshape(shape)
    sent = jax.block_until_ready([jax.device_put(part, d) for d in devices])
    if into is None:
        arrange = partial(_arrange, axes=axes, dtype=dtype, shape=shape)
        return sent if small else list(map(arrange, sent))
    buffers, start = into
    return [_insert(b, x, start, axes=axes) for b, x in zip(buffers, sent, strict=True)]


@partial(jax.jit, static_argnames=("axes", "dtype", "shape"))
def _arrange(raw, *, axes, dtype, shape):
    return raw.transpose(axes).astype(dtype).reshape(shape)


@partial(jax.jit, static_argnames="axes", donate_argnames="buffer")
def _insert(buffer, raw, start, *, axes):
    x = raw.transpose(axes).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, 0)
