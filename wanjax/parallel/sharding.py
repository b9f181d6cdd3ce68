"""The device mesh, the one table from logical to mesh axes, and sharded placement.

Every array dimension has a logical name; `RULES` says which mesh axes hold it. A single device is
the 1x1x1x1x1 mesh, so the same program runs anywhere. Batch over data x fsdp, tokens over
context, weights over fsdp x context, heads and ffn over tensor, blocks over stage.
"""

import collections
import contextlib
import functools
import itertools
import math

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax import trees

AXES = ("data", "fsdp", "context", "tensor", "stage")

RULES: dict[str | None, tuple[str, ...]] = {
    None: (),
    "batch": ("data", "fsdp"),
    "tokens": ("context",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp", "context"),  # the weight dimension gathered before use
    "adapter": ("tensor", "fsdp", "context"),  # heads or mlp of a low-rank matrix
    "layers": ("stage",),  # scanned blocks, in order
    "stage": ("stage",),  # blocks as a pipeline holds them
}


def make_mesh(shape: dict[str, int] | None = None, devices=None) -> Mesh:
    """Build the mesh {axis: size}; one axis may be -1 and takes the remaining devices.

    Raises ValueError when a name is unknown or the sizes do not multiply to the number of devices.
    """
    shape = dict(shape or {})
    devices = list(jax.devices() if devices is None else devices)
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is unknown; set config.mesh to some of {AXES}")
    sizes = {axis: shape.get(axis, 1) for axis in AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh {shape} needs sizes >= 1 and at most one -1; change config.mesh")
    if free:
        sizes[free[0]] = max(len(devices) // fixed, 1)
    total = math.prod(sizes.values())
    if total != len(devices):
        raise ValueError(
            f"mesh {sizes} has {total} places but {len(devices)} devices are present; "
            "change config.mesh (one axis may be -1 to take the rest)"
        )
    grid = np.asarray(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def use_mesh(mesh: Mesh | None):
    """Context in which `constrain` and the attention wrapper see the mesh; None gives plain
    single-device code."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def mesh_shape() -> dict[str, int]:
    """Sizes of the mesh in use ({} without one)."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def spec(*logical: str | None) -> P:
    """PartitionSpec of an array whose dimensions have these logical names."""
    rules = [RULES[name] for name in logical]
    uses = collections.Counter(itertools.chain(*rules))
    if clash := sorted(axis for axis, count in uses.items() if count > 1):
        raise ValueError(f"mesh axis {clash[0]!r} serves two dimensions of {logical}")
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in rules))


def constrain(x, *logical: str | None):
    """Pin the layout of an activation on the mesh in use; does nothing without a mesh."""
    if not mesh_shape():
        return x
    return jax.lax.with_sharding_constraint(x, spec(*logical))


def split_rows(function, whole, x):
    """function(whole, x) with the rows of x divided among all devices of the mesh in use, whatever
    their axes; `whole` is on each of them.

    x gets zero rows up to a multiple of the devices, and so has the result.
    """
    ways = math.prod(mesh_shape().values())
    if ways <= 1:
        return function(whole, x)
    x = jax.numpy.pad(x, [(0, -len(x) % ways)] + [(0, 0)] * (x.ndim - 1))
    split = jax.shard_map(function, in_specs=(P(), P(AXES)), out_specs=P(AXES), check_vma=False)
    return split(whole, x)


class InPlace:
    """jit of a function whose first `count` results take the place, and the layouts, of its first
    `count` arguments; the arrays given are gone.

    Left to itself XLA may choose another layout for a result, which then cannot be in place.
    Arguments that are not laid out on the mesh in use are left alone.
    """

    def __init__(self, count: int, function, *, static_argnames):
        functools.update_wrapper(self, function)
        self._count, self._function, self._static = count, function, static_argnames
        self._jitted: dict = {}

    def __call__(self, *args, **kwargs):
        return self._of(args)(*args, **kwargs)

    def lower(self, *args, **kwargs):
        """As that of a jitted function."""
        return self._of(args).lower(*args, **kwargs)

    def _of(self, args):
        leaves, tree = jax.tree.flatten(args[: self._count])
        layouts = tuple(leaf.sharding for leaf in leaves)
        on_mesh = all(isinstance(where, NamedSharding) for where in layouts)
        alone = math.prod(mesh_shape().values()) <= 1
        key = (tree, layouts) if on_mesh else alone
        if key not in self._jitted:
            own = (*jax.tree.unflatten(tree, layouts), None) if on_mesh else None
            moved = range(self._count) if on_mesh or alone else ()
            self._jitted[key] = jax.jit(
                self._function, static_argnames=self._static, donate_argnums=tuple(moved),
                out_shardings=own,
            )  # fmt: skip
        return self._jitted[key]


def fetch(x) -> np.ndarray:
    """The whole array on every host, even when its shards are spread over several."""
    if jax.process_count() == 1 or not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def own_rows(x, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, values) of those of the first `count` rows that this process is to deal with: a row
    belongs to the first device that holds it, so each has exactly one process. Nothing travels."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable and jax.process_count() == 1:
        return np.arange(count), np.asarray(x)[:count]
    where = x.sharding.devices_indices_map(x.shape)
    owner: dict = {}
    for device in sorted(where, key=lambda device: device.id):
        for row in range(count)[where[device][0]]:
            owner.setdefault(row, device)
    mine, numbers, values = jax.process_index(), [], []
    for shard in sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0):
        first = shard.index[0].start or 0
        rows = [row for row in range(count)[shard.index[0]] if owner[row] == shard.device]
        if rows and shard.device.process_index == mine:
            numbers += rows
            values.append(np.asarray(shard.data)[np.array(rows) - first])
    shape = (0, *x.shape[1:])
    return np.array(numbers, int), np.concatenate(values) if values else np.zeros(shape, x.dtype)


def to_host(tree):
    """Move arrays to pinned host memory under the same sharding, so that an idle expert holds no
    device memory once the originals are dropped. On a backend without such memory they stay."""
    host = "pinned_host"
    if host not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(host)), tree)


def to_device(tree):
    """Bring what `to_host` moved back to device memory; works inside jit as well, where XLA may
    start the copy ahead of the first use."""
    spaces = jax.memory.Space

    def fetched(x):
        away = jax.typeof(x).memory_space == spaces.Host
        return jax.device_put(x, spaces.Device) if away else x

    return jax.tree.map(fetched, tree)


def tree_shardings(mesh: Mesh, tree, axes_of):
    """Shardings for a parameter tree; axes_of(path, leaf) gives the logical axes of a leaf.

    A dimension that its mesh axes do not divide stays replicated (small vectors, odd heads).
    """

    def sharding(path, leaf):
        entries = []
        for size, entry in zip(leaf.shape, spec(*axes_of(path, leaf)), strict=False):
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            ways = math.prod(mesh.shape[name] for name in names)
            entries.append(entry if size % ways == 0 else None)
        return NamedSharding(mesh, P(*entries))

    return trees.map_paths(sharding, tree)
