"""Tensor files: read as lazy named tensors, written as safetensors.

Every reader returns {name: Tensor}; nothing is read before `Tensor.read(index)` asks for a range,
so loading, converting and merging all stream. Safetensors are read from object stores as well, a
range of bytes a request, many at once. Headers are checked in full when a file is opened:
a truncated, overlapping, duplicated or absurd entry is a ValueError that names file and tensor.
Format: https://github.com/huggingface/safetensors#format (8-byte length, JSON header, raw data).
One module for all formats, as their readers share the checks of names, shapes and ranges.
"""

import json
import math
import os
import pathlib
import re
import typing
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from wanjax import paths

DTYPES = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
    **{"U8": np.uint8, "BOOL": np.bool_},
}
_BF16 = np.dtype(ml_dtypes.bfloat16)
_CODES = {np.dtype(v): k for k, v in DTYPES.items()}
_HEADER_LIMIT = 100 << 20
_PIECE = 16 << 20  # bytes a reading thread takes at a time
CHUNK = 256 << 20  # host bytes of one transfer to or from a device
SHARD = 5 * 10**9  # bytes of a file at most, as diffusers writes them

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """A named tensor in a file: read(index) returns a new array of that range."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    where: str
    compact: np.dtype | None = None  # default for storing quantised data, which reads as float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def all(self) -> np.ndarray:
        return self.read(tuple(slice(0, n) for n in self.shape))


Tensors = dict[str, Tensor]


def of_array(array) -> Tensor:
    """Wrap an array that is in memory already."""
    array = np.asarray(array)
    return Tensor(array.shape, array.dtype, lambda index: array[index], "memory")


def cast(tensor: Tensor, dtype) -> Tensor:
    """Return the tensor in another dtype (converted range by range, when read)."""
    dtype = np.dtype(dtype)
    if dtype == tensor.dtype:
        return tensor
    read = lambda index: tensor.read(index).astype(dtype)
    return replace(tensor, dtype=dtype, read=read, compact=None)


def squeeze(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Drop axes of size one. ValueError if one is larger."""
    if any(a >= len(tensor.shape) or tensor.shape[a] != 1 for a in axes):
        raise ValueError(f"{tensor.where}: a tensor of shape {tensor.shape} has no size-one {axes}")
    kept = [a for a in range(len(tensor.shape)) if a not in axes]

    def read(index):
        full = [slice(0, 1)] * len(tensor.shape)
        for a, i in zip(kept, index, strict=True):
            full[a] = i
        return np.squeeze(tensor.read(tuple(full)), axes)

    return replace(tensor, shape=tuple(tensor.shape[a] for a in kept), read=read)


def unsqueeze(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Insert axes of size one, numbered in the result."""
    ndim = len(tensor.shape) + len(axes)
    kept = [a for a in range(ndim) if a not in axes]
    sizes = dict(zip(kept, tensor.shape, strict=True))
    read = lambda index: np.expand_dims(tensor.read(tuple(index[a] for a in kept)), axes)
    return replace(tensor, shape=tuple(sizes.get(a, 1) for a in range(ndim)), read=read)


def rows(tensor: Tensor, first: int, last: int) -> Tensor:
    """View rows first..last-1 of axis 0."""

    def read(index):
        moved = slice(index[0].start + first, index[0].stop + first)
        return tensor.read((moved, *index[1:]))

    return replace(tensor, shape=(last - first, *tensor.shape[1:]), read=read)


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenate along axis 0; different dtypes become float32. A single tensor stays as it is."""
    if len(tensors) == 1:
        return tensors[0]
    if len({t.dtype for t in tensors}) > 1:
        tensors = [cast(t, np.float32) for t in tensors]
    starts = np.cumsum([0, *(t.shape[0] for t in tensors)])

    def read(index):
        parts = []
        for tensor, at in zip(tensors, starts, strict=False):
            first, last = max(index[0].start - at, 0), min(index[0].stop - at, tensor.shape[0])
            if first < last:
                parts.append(tensor.read((slice(int(first), int(last)), *index[1:])))
        return np.concatenate(parts) if parts else np.empty((0, *tensors[0].shape[1:]))

    return replace(tensors[0], shape=(int(starts[-1]), *tensors[0].shape[1:]), read=read)


def dequantise(tensor: Tensor, scale: Tensor) -> Tensor:
    """w · scale in float32; the scale is one number, one per row [O,1], or per block [O,N,1]."""
    factor = scale.all().astype(np.float32)
    whole = factor.size == 1
    blocks = factor.shape[1] if factor.ndim > 1 else 1
    if not np.isfinite(factor).all():
        raise ValueError(f"{scale.where}: a scale is not finite")
    if not whole and (
        len(tensor.shape) != 2
        or factor.size != tensor.shape[0] * blocks
        or len(factor) != tensor.shape[0]
        or tensor.shape[1] % blocks
    ):
        raise ValueError(
            f"{scale.where}: scale of shape {scale.shape} does not fit a weight of {tensor.shape}"
        )

    def read(index):
        if whole:
            return tensor.read(index).astype(np.float32) * factor.reshape(())
        full = tensor.read((index[0], slice(0, tensor.shape[1]))).astype(np.float32)
        part = factor[index[0]].reshape(len(full), blocks, 1)
        return (full.reshape(len(full), blocks, -1) * part).reshape(full.shape)[:, index[1]]

    return replace(tensor, dtype=np.dtype(np.float32), read=read, compact=_BF16)


def open_safetensors(path) -> tuple[Tensors, dict[str, str]]:
    """Return ({name: Tensor}, header metadata) of one file. ValueError if the file is damaged."""
    path = paths.resolve(path)
    size, head = paths.size(path), paths.read_range(path, 0, 8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise ValueError(
            f"{path}: not a safetensors file, or truncated (it announces a header of {length} "
            f"bytes but has {size}); download it again"
        )
    raw = paths.read_range(path, 8, 8 + length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("header is not an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not a string map")
        spans = {name: _span(name, entry) for name, entry in header.items()}
        _check_cover(spans, size - 8 - length)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path}: damaged safetensors file: {paths.one_line(error)}") from None
    start = 8 + length
    return {
        name: Tensor(shape, dtype, _reader(path, dtype, shape, start + begin, name), str(path))
        for name, (dtype, shape, begin, _) in spans.items()
    }, metadata


def _unique(pairs):
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise ValueError(f"key {twice!r} occurs twice")
    return out


def _check_name(name) -> None:
    if not isinstance(name, str) or not 0 < len(name) < 300 or not name.isprintable():
        raise ValueError(f"{str(name)[:40]!r} is not a valid tensor name")


def _span(name: str, entry) -> tuple[np.dtype, tuple[int, ...], int, int]:
    _check_name(name)
    if not isinstance(entry, dict):
        raise ValueError(f"entry {name!r} is not an object")
    code, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {code!r}, expected one of {', '.join(DTYPES)}")
    if not _naturals(shape, 32) or not _naturals(offsets, 2) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has shape {shape} at bytes {offsets}")
    dtype, (begin, end) = np.dtype(DTYPES[code]), offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(
            f"tensor {name!r} of shape {shape} {code} needs {math.prod(shape) * dtype.itemsize} "
            f"bytes but holds {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _naturals(value, most: int) -> typing.TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > most:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_cover(spans, size: int) -> None:
    at = 0
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if end > size:
            raise ValueError(f"tensor {name!r} ends at byte {end} of {size}: the file is truncated")
        if begin != at:
            raise ValueError(f"tensor {name!r} starts at byte {begin}, expected {at}")
        at = end
    if at != size:
        raise ValueError(f"{size - at} bytes after the last tensor")


def _reader(path: paths.Path, dtype, shape, offset: int, name: str):
    rows = math.prod(shape[1:]) * dtype.itemsize

    def read_remote(index: Index) -> np.ndarray:
        # Whole rows, of which the rest is dropped: a request costs more than the bytes between.
        first, last = (index[0].start, index[0].stop) if shape else (0, 1)
        data = paths.read_range(path, offset + first * rows, offset + last * rows)
        if len(data) != (last - first) * rows:
            raise ValueError(f"{path}: tensor {name!r} is cut short; copy the file there again")
        whole = np.frombuffer(data, dtype)
        if not shape:
            return whole.reshape(()).copy()
        return whole.reshape(last - first, *shape[1:])[(slice(None), *index[1:])].copy()

    def read(index: Index) -> np.ndarray:
        if all(i.start == 0 and i.stop == n for i, n in zip(index[1:], shape[1:], strict=True)):
            first = index[0].start if shape else 0
            count = index[0].stop - first if shape else 1
            out = np.empty((count, *shape[1:]) if shape else (), dtype)
            _pread(path, out, offset + first * rows, name)
            return out
        # A strided range: map the tensor, touch only the pages of the range, unmap.
        return np.array(np.memmap(path, dtype, "r", offset, shape)[index])

    return read_remote if paths.is_remote(path) else read


def _pread(path, out: np.ndarray, offset: int, name: str) -> None:
    view = out.reshape(-1).view(np.uint8).data
    with open(path, "rb", buffering=0) as file:
        while len(view):
            got = os.preadv(file.fileno(), [view], offset)
            if got <= 0:
                raise ValueError(f"{path}: tensor {name!r} is cut short; download the file again")
            view, offset = view[got:], offset + got


def open_any(path) -> tuple[Tensors, dict[str, str]]:
    """Open one tensor file; its first bytes say whether it is safetensors, torch zip or GGUF."""
    path = paths.resolve(path)
    head = paths.read_range(path, 0, 512)
    _check_binary(path, head)
    if paths.is_remote(path) and (head[:4] == b"GGUF" or head[:2] == b"PK"):
        raise ValueError(
            f"{path}: only safetensors are read from an object store; copy the file to a local disk"
        )
    if head[:4] == b"GGUF":
        return open_gguf(path), {}
    if head[:2] == b"PK":
        return open_torch(path), {}
    if head[:1] == b"\x80" and path.suffix != ".safetensors":
        raise ValueError(
            f"{path}: legacy torch pickles are not read; save it again with torch.save"
        )
    return open_safetensors(path)


def _check_binary(path: paths.Path, head: bytes) -> None:
    """Raise ValueError for a text or nothing at all where weights should be."""
    if not head:
        raise ValueError(f"{path}: empty file; download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path}: a Git LFS pointer, not the weights; run `git lfs install && git lfs pull` in "
            "its folder, or download it with `hf download`"
        )
    if head.lstrip()[:1] == b"<":
        raise ValueError(f"{path}: a web page, not weights; download the file itself")
    if head[:1] != b"\x80" and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head):
        start = head[:40].decode().split("\n")[0]
        raise ValueError(f"{path}: a text file ({start!r}), not weights; download it again")


def open_torch(path) -> Tensors:
    """Open a .pth with torch's restricted unpickler, mapped and not read; no code in it runs."""
    import torch  # the only format that needs it

    try:
        with zipfile.ZipFile(path) as archive:
            packed = [i.filename for i in archive.infolist() if i.compress_type != 0]
        if packed:
            raise ValueError(f"compressed entries ({some(packed)})")
        data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged or hostile: any error of zip, pickle or storage code
        line = paths.one_line(error)
        raise ValueError(f"{path}: not a safe torch weights file: {line}") from None
    for key in ("state_dict", "model", "module"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: holds {type(data).__name__}, expected a dict of tensors")
    tensors = {}
    for name, value in data.items():
        try:
            _check_name(name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ValueError(f"{path}: entry {name!r} is not a tensor; save only the weights")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{path}: tensor {name!r} is larger than its storage")
        dtype = np.dtype(getattr(ml_dtypes, str(value.dtype)[6:], None) or str(value.dtype)[6:])

        def read(index, value=value, dtype=dtype):
            part = value[index].contiguous() if value.ndim else value
            return part.view(torch.uint8).numpy().view(dtype).reshape(part.shape).copy()

        tensors[name] = Tensor(tuple(value.shape), dtype, read, str(path))
    return tensors


def open_gguf(path) -> Tensors:
    """Open a GGUF file; quantised tensors read as float32."""
    import gguf  # an optional dependency

    plain = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    known = (*plain, *(gguf.GGMLQuantizationType[k] for k in ("BF16", "Q8_0", "Q4_K")))
    try:
        reader = gguf.GGUFReader(path)
        found = {t.name: (t, _gguf_shape(reader, t)) for t in reader.tensors}
    except Exception as error:  # the reader checks little: any error means a damaged file
        raise ValueError(f"{path}: damaged GGUF file: {paths.one_line(error)}") from None
    tensors = {}
    for name, (t, shape) in found.items():
        if t.tensor_type not in known:
            raise ValueError(
                f"{path}: tensor {name!r} is {t.tensor_type.name}, expected one of F32, F16, BF16, "
                "Q8_0, Q4_K"
            )
        if name.endswith("patch_embedding.weight") and len(shape) == 4:
            shape = (shape[0], -1, 1, *shape[2:])  # the format stops at four axes
        count = math.prod(int(n) for n in t.shape)
        shape = tuple(count // -math.prod(shape) if n == -1 else n for n in shape)
        if math.prod(shape) != count:
            raise ValueError(f"{path}: tensor {name!r} of {count} values has shape {shape}")

        def read(index, t=t, shape=shape):
            values = t.data
            if t.tensor_type not in plain and len(shape) == 2 and values.ndim == 2:
                part = gguf.quants.dequantize(values[index[0]], t.tensor_type)
                return np.array(part.reshape(-1, shape[1])[:, index[1]])
            if t.tensor_type not in plain:
                values = gguf.quants.dequantize(values, t.tensor_type)
            return np.array(values.reshape(shape)[index])

        dtype = np.dtype(plain.get(t.tensor_type, np.float32))
        compact = None if t.tensor_type in plain else _BF16
        tensors[name] = Tensor(shape, dtype, read, str(path), compact)
    return tensors


def _gguf_shape(reader, tensor) -> tuple[int, ...]:
    """The shape of a tensor, or the one ComfyUI keeps for tensors that had to be reshaped."""
    _check_name(tensor.name)
    if original := reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}"):
        return tuple(int(original.parts[k][0]) for k in original.data)
    return tuple(int(n) for n in reversed(tensor.shape))


def open_folder(folder) -> tuple[Tensors, dict[str, str]]:
    """Return ({name: Tensor}, metadata) of a folder: an index and its shards, or plain files.

    ValueError if shards are missing, a name occurs twice, or the index points outside the folder.
    """
    folder = paths.resolve(folder)
    indexes = sorted(folder.glob("*.safetensors.index.json"), key=lambda p: (p.name.count("."), p))
    if not indexes:
        files = sorted(folder.glob("*.safetensors"))
        usual = ("diffusion_pytorch_model.safetensors", "model.safetensors")
        plain = [f for f in files if f.name in usual]
        return _merge(plain[:1] or files, folder)
    weight_map = _weight_map(indexes[0])
    tensors, metadata = _merge([folder / f for f in sorted(set(weight_map.values()))], folder)
    places = {name: tensor.where for name, tensor in tensors.items()}
    wrong = [n for n, file in weight_map.items() if places.get(n) != str(folder / file)]
    extra = sorted(set(tensors) - set(weight_map))
    if wrong or extra:
        raise ValueError(
            f"{indexes[0]}: {len(wrong)} tensors are not in the shard it names ({some(wrong)}), "
            f"{len(extra)} tensors are not listed ({some(extra)}); download the folder again"
        )
    return tensors, metadata


def _weight_map(index: paths.Path) -> dict[str, str]:
    if (size := paths.size(index)) > _HEADER_LIMIT:
        raise ValueError(f"{index}: index of {size} bytes is too large")
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_unique)["weight_map"]
        files = set(weight_map.values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: damaged index: {paths.one_line(error)}") from None
    for name in files:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise ValueError(
                f"{index}: shard {paths.one_line(name)!r} is not the name of a file in this folder"
            )
    return weight_map


def _merge(shards: Iterable[paths.Path], folder) -> tuple[Tensors, dict[str, str]]:
    tensors, metadata = {}, {}
    for path in shards:
        if not path.is_file():
            raise ValueError(f"{folder}: shard {path.name} is missing; download it again")
        part, meta = open_safetensors(path)
        if twice := set(part) & set(tensors):
            raise ValueError(f"{folder}: {some(sorted(twice))} are in more than one file")
        tensors.update(part)
        metadata.update(meta)
    return tensors, metadata


def some(names, count: int = 3) -> str:
    """Return the first few of some names and how many more there are."""
    names = list(map(str, names))
    more = f", +{len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more if names else "none"


_POOL = futures.ThreadPoolExecutor(min(16, 4 * (os.cpu_count() or 1)), "wanjax-read")


def fill(jobs: Iterable[tuple[Tensor, Index, np.ndarray]]) -> None:
    """Read ranges into arrays of their shapes, in parallel pieces."""

    def piece(tensor, index, out):
        out[...] = tensor.read(index)

    running = []
    for tensor, index, out in jobs:
        if out.nbytes <= _PIECE:
            running.append(_POOL.submit(piece, tensor, index, out))
            continue
        rows = max(1, _PIECE * len(out) // out.nbytes)
        for r in range(0, len(out), rows):
            part, first = out[r : r + rows], index[0].start + r
            at = (slice(first, first + len(part)), *index[1:])
            running.append(_POOL.submit(piece, tensor, at, part))
    for future in running:
        future.result()


def ahead(read: Callable, items: Iterable) -> Iterator:
    """Yield read(item) of each item in order, reading the next while the caller uses one."""
    with futures.ThreadPoolExecutor(1) as reader:
        pending = []
        for item in items:
            pending.append(reader.submit(read, item))
            if len(pending) == 2:
                yield pending.pop(0).result()
        yield from (last.result() for last in pending)


def write_safetensors(path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write one file, tensor by tensor, and flush it to disk."""
    header: dict = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            for array in _pieces(tensor):
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def touch(tensor: Tensor) -> None:
    """Read a tensor as `write_safetensors` does, and keep nothing."""
    for _ in _pieces(tensor):
        pass


def _pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    if tensor.nbytes <= 4 * _PIECE:
        yield tensor.all()
        return
    rows = max(1, 4 * _PIECE * tensor.shape[0] // tensor.nbytes)
    for r in range(0, tensor.shape[0], rows):
        rest = tuple(slice(0, n) for n in tensor.shape[1:])
        yield tensor.read((slice(r, min(r + rows, tensor.shape[0])), *rest))


def write_sharded(folder, stem: str, tensors: Tensors) -> None:
    """Write `stem`.safetensors, or numbered shards of at most SHARD bytes with their index."""
    folder = pathlib.Path(folder)
    shards: list[Tensors] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > SHARD:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / f"{stem}.safetensors", tensors)
        return
    weight_map = {}
    for k, shard in enumerate(shards, 1):
        file = f"{stem}-{k:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
