"""Digest of every byte of a component of a checkpoint, whatever layout holds it.

piece   = blake2b of _PIECE bytes of a tensor's values in row order
tensor  = blake2b of (dtype, shape, its pieces)
digest  = blake2b of (config, every canonical name with its tensor), 16 hexadecimal digits

Names, shapes and values are those of disk.read, so the same values in another layout give the same
digest. Digests of tensors are kept in a file of the user's, by path, size and times of the files
that hold them, so that a second call reads headers only.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator
from concurrent import futures

import fsspec
import numpy as np

from convert import disk, files, load
from wanjax import paths

_PIECE = 1 << 20  # bytes; part of what a digest means
_WORKERS = 16  # each holds a piece, of dequantised data up to four times as much
_VERSION = 1  # of the digests that are kept


def component(path, name: str) -> str:
    """16 hexadecimal digits over the config and all bytes of a component of a checkpoint.

    path: what `disk.read` takes; name: "high", "low", "vae", "text_encoder" or "image_encoder".
    Raises ValueError for a checkpoint without it. Values are read through at most 64 MB of host
    memory; the Orbax form takes files.CHUNK, or one stored array where that is larger.
    """
    checkpoint, part = disk.read(path), disk.EXPERTS.get(name, name)
    if part not in checkpoint.tensors:
        has = ", ".join(checkpoint.tensors)
        raise ValueError(f"{path}: no {name}, only {has}; give a checkpoint that has one")
    key = _hash(_VERSION, part, _stamps(checkpoint, part))
    values = _kept().get(key)
    if values is None:
        values = _values(checkpoint, part)
        _keep(key, values)
    return _hash(_config(checkpoint, part), values)[:16]


def _config(checkpoint: disk.Checkpoint, part: str) -> dict:
    """What a component's config says beyond defaults: a new field of the code changes no digest."""
    config = disk.component_config(checkpoint, part)
    said = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}
    told = {name: value for name, (value, default) in said.items() if value != default}
    return {name: told[name] for name in sorted(told) if name not in disk.RUN_FIELDS}


def _values(checkpoint: disk.Checkpoint, part: str) -> str:
    """Digest of all tensors of a component."""
    found: dict[str, str] = {}
    with futures.ThreadPoolExecutor(_WORKERS) as pool:
        for tensors in load.stored(checkpoint, part):
            jobs = [(name, t, index) for name, t in tensors.items() for index in _ranges(t)]
            digests = pool.map(lambda job: _piece(*job[1:]), jobs)
            pieces: dict[str, list[str]] = {name: [] for name in tensors}
            for (name, _, _), digest in zip(jobs, digests, strict=True):
                pieces[name].append(digest)
            for name, t in tensors.items():
                found[name] = _hash(t.dtype.name, t.shape, pieces[name])
    return _hash(sorted(found.items()))


def _ranges(tensor: files.Tensor) -> Iterator[files.Index]:
    """Ranges of at most _PIECE bytes that follow each other in row order."""
    shape, size = tensor.shape, tensor.dtype.itemsize
    axis = len(shape)
    while axis and size * shape[axis - 1] <= _PIECE:  # these axes are read whole
        axis -= 1
        size *= shape[axis]
    whole = tuple(slice(0, n) for n in shape[axis:])
    if not axis:
        yield whole
        return
    count, step = shape[axis - 1], max(1, _PIECE // max(1, size))
    for outer in itertools.product(*map(range, shape[: axis - 1])):
        for first in range(0, count, step):
            last = min(first + step, count)
            yield (*(slice(i, i + 1) for i in outer), slice(first, last), *whole)


def _piece(tensor: files.Tensor, index: files.Index) -> str:
    array = np.ascontiguousarray(tensor.read(index))
    return hashlib.blake2b(array.reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()


def _stamps(checkpoint: disk.Checkpoint, part: str) -> list:
    """_stamp of the files that hold a component."""
    held = {t.where for t in checkpoint.tensors[part].values()}
    if checkpoint.arrays:
        held = {str(path) for path in checkpoint.arrays.rglob("*") if path.is_file()}
    return [_stamp(paths.resolve(where)) for where in sorted(held)]


def _stamp(path: paths.Path) -> list:
    """[absolute path, size, times in ns], or what an object store says of its object."""
    if paths.is_remote(path):
        store, name = fsspec.core.url_to_fs(str(path))
        store.invalidate_cache()  # a listing of before would hide that an object was replaced
        return [str(path), json.dumps(store.info(name), default=str, sort_keys=True)]
    at = os.stat(path)
    return [os.path.abspath(path), at.st_size, at.st_mtime_ns, at.st_ctime_ns]


def _hash(*parts) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _cache() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(root).expanduser() / "wanjax" / "digests.json"


def _kept() -> dict[str, str]:
    """Digests of earlier calls; {} where there is no readable file of them."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # RuntimeError: no home
        kept = json.loads(_cache().read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return kept
    return {}


def _keep(key: str, values: str) -> None:
    """Keep a digest for later calls; where there is nowhere to, they compute it again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _cache()
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        tmp.write_text(json.dumps(_kept() | {key: values}, indent=1), encoding="utf-8")
        os.replace(tmp, path)
