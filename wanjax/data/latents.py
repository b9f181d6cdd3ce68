"""Clips as latents and text rows: our own caches and FastVideo's parquet files, and the endless,
seeded, random-access stream of batches that training draws from.

A batch holds clips of one shape. Shapes take turns in proportion to their clips, in a shuffled
order that is redrawn once every clip has been seen about once; the clips of a shape come in fresh
permutations (grain's shuffle). So the batch of a step is a function of (clips, batch, seed, step),
and the cursor of a run is the step, whatever the number of hosts; every host knows all texts and
reads the latents of its own rows only.

A row of a parquet file is had by decoding its whole row group. So clips of parquet files come row
group by row group instead: each time over, the groups and the clips of each are in a fresh order,
and a shape has its turn as soon as a batch of its clips has come together.

Clips are held out by a digest of their content, so a clip stays on its side when others are added.

FastVideo's columns are {vae_latent, text_embedding, first_frame_latent, clip_feature}_{bytes,
shape, dtype}; latents are raw posterior means, channels first; first-frame latents are normalised.

P clips of a batch  T latent frames  H W latent height/width  C channels  S text rows  E text width
"""

import functools
import hashlib
import json
import math
import pathlib
import zlib
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
import numpy as np
import safetensors
from jax.sharding import NamedSharding

from convert import digest
from wanjax.data import Item, cache, media, prompts, text
from wanjax.models import condition, presets, vae
from wanjax.parallel import sharding

Shape = tuple[int, ...]
_COLUMNS = {"latents": "vae_latent", "text": "text_embedding"}
_COLUMNS |= {"first": "first_frame_latent", "image": "clip_feature"}


@dataclass(frozen=True)
class Clip:
    """What is known about a clip without reading its arrays."""

    caption: str
    digest: str  # of its content, hexadecimal
    shape: Shape | None  # of its latents [T,H,W,C]; None for text alone
    rows: int  # of text
    width: int  # E
    first: Shape | None  # of the first frame's latents
    image: Shape | None  # of its CLIP tokens [S,E]
    file: str
    group: int | None = None  # row group of a parquet file
    row: int = 0  # in that group
    source: str = ""  # the video or image that a cache was made of


@dataclass(frozen=True, eq=False)
class Source:
    """The clips of a folder in a fixed order, and for a cache what it was made with."""

    path: str
    clips: tuple[Clip, ...]
    identity: dict

    @functools.cached_property
    def digest(self) -> str:
        """One digest of all clips, for `agree` and resuming."""
        return _digest(self.clips)


def read(path) -> Source:
    """Read the headers of a cache (see wanjax.data.cache) or of all parquet files below a folder.

    Raises ValueError naming a missing folder, a cache of another format, a damaged file or a column
    that is not as expected.
    """
    path = pathlib.Path(path)
    if (path / "cache.json").is_file():
        identity = cache.read_identity(path)
        files = sorted((path / "clips").glob("*.safetensors"))
        with futures.ThreadPoolExecutor(16) as pool:  # waits for disks, not for CPUs
            clips = list(pool.map(_of_cache, files))
    else:
        identity, files = {}, sorted(path.rglob("*.parquet")) if path.is_dir() else []
        clips = [clip for file in files for clip in _of_parquet(file)]
    if not clips:
        raise ValueError(
            f"{path} holds no cached clips; set config.data.path to a folder that python -m "
            "wanjax.data cache wrote, or to one of FastVideo parquet files"
        )
    return Source(str(path), tuple(clips), identity)


def buckets(clips) -> dict[Shape | None, list[Clip]]:
    """Clips by the shape of their latents, shapes sorted."""
    found: dict[Shape | None, list[Clip]] = {}
    for clip in sorted(clips, key=lambda clip: clip.shape or ()):
        found.setdefault(clip.shape, []).append(clip)
    return found


def by_row_groups(clips, batch: int, seed) -> list[list[Clip]]:
    """Every clip once, row group by row group, in batches of one shape.

    The last batch of a shape is filled up with those before, or repeats the few there are.
    """
    groups: dict[tuple, list[Clip]] = {}
    for clip in clips:
        groups.setdefault((clip.file, clip.group), []).append(clip)
    rng, together, batches = np.random.default_rng(seed), {}, []
    held = list(groups.values())
    for group in (held[i] for i in rng.permutation(len(held))):
        for clip in (group[i] for i in rng.permutation(len(group))):
            drawn = together.setdefault(clip.shape, [])
            drawn.append(clip)
            if len(drawn) % batch == 0:
                batches.append(drawn[-batch:])
    rest = (drawn[-batch:] for drawn in together.values() if len(drawn) % batch)
    return batches + [(drawn * batch)[-batch:] for drawn in rest]


def load(clip: Clip, names, code: vae.VAEConfig) -> dict[str, np.ndarray]:
    """Arrays of a clip by name, float32: normalised latents [T,H,W,C], text [S,E], first, image."""
    if clip.group is not None:
        return _load_parquet(clip, names, code)
    with safetensors.safe_open(clip.file, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in names}


@dataclass(frozen=True, eq=False)
class LatentStream:
    """An endless shuffled stream, `batch` clips of one shape per step."""

    source: Source
    batch: int
    seed: int
    holdout: float  # share of the clips never trained on
    model: presets.ModelConfig
    first_frame: bool = False  # give TI2V-5B the clip's first frame; I2V models always get it
    _ahead: dict = field(default_factory=dict, init=False)  # step -> future of its arrays
    _pool: Any = field(default_factory=lambda: futures.ThreadPoolExecutor(1, "latents"), init=False)

    def __post_init__(self):
        if self.batch < 1 or not 0 <= self.holdout < 1:
            raise ValueError(
                f"config.data.batch is {self.batch} and config.data.holdout {self.holdout}; "
                "expected at least 1, and a share in [0, 1)"
            )
        if not self.clips:
            raise ValueError(
                f"all {len(self.source.clips)} clips of {self.source.path} are held out; "
                "lower config.data.holdout or add clips"
            )
        _check(self.source, self.model)
        _check_captions(self.source)
        if self.first_frame and condition.kind(self.model) == "":
            raise ValueError(
                f"config.data.first_frame is on but model {self.model.name} takes no image; "
                "set it to False"
            )

    @functools.cached_property
    def held(self) -> tuple[Clip, ...]:
        """Clips that are held out."""
        clips = self.source.clips
        return tuple(c for c in clips if int(c.digest[:8], 16) / 2**32 < self.holdout)

    @functools.cached_property
    def clips(self) -> tuple[Clip, ...]:
        """Clips that are trained on."""
        held = set(self.held)
        return tuple(clip for clip in self.source.clips if clip not in held)

    @functools.cached_property
    def text_rows(self) -> int:
        """S of every batch, so that caption lengths cause no recompilation."""
        return text.bucket(max(clip.rows for clip in self.source.clips), self.model.wan.text_len)

    def choose(self, step: int) -> list[Clip]:
        """The clips of a step."""
        groups = list(self._groups.values())
        turns = [math.ceil(len(group) / self.batch) for group in groups]
        epoch, turn = divmod(step, sum(turns))
        if self.clips[0].group is not None:
            return self._by_row_groups(epoch)[turn]
        order = np.repeat(np.arange(len(groups)), turns)
        order = np.random.default_rng((self.seed, epoch)).permutation(order)
        which = order[turn]
        before = epoch * turns[which] + int((order[:turn] == which).sum())  # batches of this shape
        group = groups[which]
        shuffled = grain.MapDataset.range(len(group)).seed(self.seed).shuffle().repeat()
        first = before * self.batch
        return [group[shuffled[i]] for i in range(first, first + self.batch)]

    def at(self, step: int) -> Item:
        """The batch of a step; the next one is prefetched."""
        ahead = self._ahead.pop(step, None)
        clips = self.choose(step)
        found = ahead.result() if ahead else self._read(clips, self._arrays(clips))
        following = self.choose(step + 1)
        self._ahead[step + 1] = self._pool.submit(self._read, following, self._arrays(following))
        return self._item(clips, found, self._arrays(clips))

    def heldout(self) -> Iterator[tuple[Item, int]]:
        """(batch, how many of its first rows count) over all held-out clips; rows beyond repeat."""
        for group in buckets(self.held).values():
            for first in range(0, len(group), self.batch):
                real = group[first : first + self.batch]
                clips = [real[i % len(real)] for i in range(self.batch)]
                names = self._arrays(clips)
                yield self._item(clips, self._read(clips, names), names), len(real)

    def preview(self, count: int, shape: Shape) -> Item | None:
        """Text rows and cond of the first clips, held-out ones if any, for sample videos.

        shape: latents of a sample; a model that takes a first frame needs clips of this shape.
        """
        conditional = condition.kind(self.model) == "latents" or self.first_frame
        clips = [c for c in self.held or self.clips if not conditional or c.shape == shape][:count]
        if not clips:
            return None
        names = self._arrays(clips) if conditional else ()  # else clips may differ in shape
        return self._item(clips, self._read(clips, names), names)

    def describe(self) -> str:
        """A line about the clips, and one per shape: it says where a batch repeats clips."""
        line = f"clips    {len(self.clips)} trained on, {len(self.held)} held out, "
        line += f"texts of up to {self.text_rows} rows"
        return "\n".join([line, *map(self._describe, self._groups.values())])

    def _describe(self, group: list[Clip]) -> str:
        line = f"         {len(group)} of latents {group[0].shape}"
        if len(group) >= self.batch:
            return line
        return f"{line}, fewer than config.data.batch {self.batch}: its batches repeat clips"

    def state(self, step: int) -> dict:
        """Return what a checkpoint must hold (JSON) to continue with `step` as the next step."""
        found = {"step": step, "batch": self.batch, "seed": self.seed}
        return found | {"clips": len(self.clips), "digest": _digest(self.clips)}

    def resume(self, state: dict, allow: bool = False) -> int:
        """Return the next step of a saved state; ValueError if it is of a different stream, unless
        `allow`."""
        restore = "config.data and the folder it names"
        return prompts.next_step(state, self.state(state["step"]), "clips", restore, allow)

    @functools.cached_property
    def _groups(self):
        return buckets(self.clips)

    @functools.cached_property
    def _by_row_groups(self):
        """Batches of an epoch of parquet files; the batch of a step and the next may be of two."""
        draw = lambda epoch: by_row_groups(self.clips, self.batch, (self.seed, epoch))
        return functools.lru_cache(maxsize=2)(draw)

    def _read(self, clips, names) -> list[dict]:
        """Text of every clip, and the named arrays of those this process holds."""
        mine = _rows(self._layout(len(clips)), len(clips))
        return [
            load(clip, ("text", *names) if i in mine else ("text",), self.model.vae)
            for i, clip in enumerate(clips)
        ]

    def _arrays(self, clips) -> tuple[str, ...]:
        if clips[0].shape is None:
            return ()
        given = ("first", "image")[: 1 + (self.model.image is not None)]
        return ("latents", *(given if condition.kind(self.model) == "latents" else ()))

    def _item(self, clips, arrays, names) -> Item:
        rows = [found["text"] for found in arrays]
        ctx_PSE = np.zeros((len(clips), self.text_rows, rows[0].shape[1]), np.float32)
        for i, row_SE in enumerate(rows):
            ctx_PSE[i, : len(row_SE)] = row_SE
        texts = [clip.caption for clip in clips]
        found = {name: self._place(arrays, name) for name in names}
        x0, cond = found.get("latents"), None
        if "first" in found:
            cond = condition.of_latents(found["first"], found.get("image"))
        elif self.first_frame and x0 is not None and x0.shape[1] > 1:  # one frame leaves no video
            cond = {"first": x0[:, :1]}
        return Item(texts, ctx_PSE, x0, cond)

    def _place(self, arrays, name):
        """One array [P, ...] over the mesh, from the rows that each process holds."""
        count, sample = len(arrays), next(a[name] for a in arrays if name in a)
        layout = self._layout(count)
        if layout is None:
            return jax.numpy.asarray(np.stack([a[name] for a in arrays]))

        def part(index):
            return np.stack([a[name] for a in arrays[index[0]]])

        return jax.make_array_from_callback((count, *sample.shape), layout, part)

    def _layout(self, count: int):
        """Sharding of a batch by rows where the mesh divides it, else a copy everywhere."""
        if not self._mesh:
            return None
        shape = self._mesh.shape
        even = count % (shape["data"] * shape["fsdp"]) == 0
        return NamedSharding(self._mesh, sharding.spec("batch" if even else None))

    @functools.cached_property
    def _mesh(self):
        """The mesh in use at the first batch (threads do not inherit it)."""
        return jax.sharding.get_mesh() if sharding.mesh_shape() else None


def _rows(layout, count: int) -> set[int]:
    """Rows held by devices of this process."""
    if layout is None:
        return set(range(count))
    indices = layout.addressable_devices_indices_map((count,)).values()
    return {row for index in indices for row in range(count)[index[0]]}


def _digest(clips) -> str:
    return f"{zlib.crc32(' '.join(clip.digest for clip in clips).encode()):08x}"


def _check(source: Source, model: presets.ModelConfig) -> None:
    """Raise ValueError when clips do not fit the model."""
    channels, form = model.vae.z_dim, condition.kind(model)
    for clip in source.clips:
        where = _where(clip)
        if clip.shape is not None and clip.shape[-1] != channels:
            raise ValueError(
                f"{where} has latents {clip.shape} but the VAE of {model.name} gives {channels} "
                "channels; set config.data.path to latents of this model's VAE"
            )
        if clip.width != model.wan.text_dim:
            raise ValueError(
                f"{where} has text rows of width {clip.width}, model {model.name} reads "
                f"{model.wan.text_dim}; set config.data.path to a cache of this model"
            )
        fits = clip.first == clip.shape
        needs: list[tuple] = [("first-frame latents", clip.first, clip.shape, fits)]
        if model.image:
            fits = (clip.image or ())[1:] == (model.image.hidden_size,)
            needs.append(("CLIP tokens", clip.image, f"[S, {model.image.hidden_size}]", fits))
        for what, shape, needed, fits in needs if form == "latents" and clip.shape else ():
            if not fits:
                found = f"{what} {shape}" if shape else f"no {what}"
                raise ValueError(
                    f"{where} has {found}, which model {model.name} needs as {needed}; cache the "
                    "clips again with this model"
                )


def _check_captions(source: Source) -> None:
    """Raise ValueError naming clips whose .txt, where it is within reach, says something else than
    when it was cached."""
    held = [clip for clip in source.clips if clip.source]
    with futures.ThreadPoolExecutor(16) as pool:
        stale = [
            clip.source for clip, old in zip(held, pool.map(_is_stale, held), strict=True) if old
        ]
    if stale:
        names = ", ".join(stale[:3]) + (", …" if len(stale) > 3 else "")
        raise ValueError(
            f"{source.path} is stale: {len(stale)} of {len(source.clips)} captions have changed "
            f"since ({names}); run the same python -m wanjax.data cache command again, which "
            "encodes those alone"
        )


def _is_stale(clip: Clip) -> bool:
    file = pathlib.Path(clip.source)
    try:
        return file.with_suffix(".txt").is_file() and media.caption_of(file) != clip.caption
    except OSError:
        return False  # not within reach
    except ValueError:
        return True  # no caption any more


def check_encoders(source: Source, path) -> None:
    """Raise ValueError when a cache was made by encoders other than those of the checkpoint at
    `path`; their bytes are compared, not loaded."""
    for part in cache.ENCODERS:
        made = source.identity.get(part)
        if made is not None and made != digest.component(path, part):
            raise ValueError(
                f"the cache {source.path} was made by a different {part.replace('_', ' ')} from "
                "that of config.model.path; cache the clips again with this model"
            )


def _of_cache(file) -> Clip:
    found = cache.header(file)
    shapes = found["shapes"]
    rows, width = shapes["text"]
    more = (shapes.get("first"), shapes.get("image"))
    about = (found["caption"], found["sha256"], shapes["latents"], rows, width, *more, str(file))
    folder = found.get("folder")
    return Clip(*about, source=str(pathlib.Path(folder, found["file"])) if folder else "")


def _of_parquet(file) -> list[Clip]:
    try:
        parquet = _pyarrow().ParquetFile(file)
    except (OSError, ValueError) as error:  # as pyarrow's own errors are
        raise ValueError(f"{file} is damaged ({error}); download it again") from None
    has = set(parquet.schema_arrow.names)
    parts = {c: {f"{c}_{part}" for part in ("bytes", "shape", "dtype")} for c in _COLUMNS.values()}
    needed = {"caption"} | parts["text_embedding"]
    needed |= set().union(*(three for three in parts.values() if three & has))
    if not needed <= has:
        raise ValueError(
            f"{file} has columns {sorted(has)[:8]}, but not {sorted(needed - has)[0]}; expected "
            "FastVideo's text_embedding_{bytes,shape,dtype} and caption, and the same three of "
            "vae_latent for clips"
        )
    wanted = {f"{column}_{part}" for column in _COLUMNS.values() for part in ("shape", "dtype")}
    wanted |= {"id", "caption", "file_name"}
    clips = []
    for group in range(parquet.num_row_groups):
        rows = parquet.read_row_group(group, columns=sorted(wanted & has)).to_pylist()
        for number, row in enumerate(rows):
            shapes = {name: tuple(row.get(f"{c}_shape") or ()) for name, c in _COLUMNS.items()}
            identity = json.dumps([row.get("id"), row.get("file_name"), row["caption"]])
            digest = hashlib.sha256(identity.encode()).hexdigest()
            shape, first = (_channels_last(shapes[name]) for name in ("latents", "first"))
            length, width = list(shapes["text"])
            about = (length, width, first, shapes["image"] or None)
            clips.append(Clip(row["caption"], digest, shape, *about, str(file), group, number))
    return clips


def _where(clip: Clip) -> str:
    return clip.file if clip.group is None else f"{clip.file} row {clip.row} of group {clip.group}"


def _channels_last(shape) -> Shape | None:
    return (*shape[1:], shape[0]) if shape else None


@functools.lru_cache(maxsize=2)  # a batch may lie across the border of two
def _row_group(file, group: int) -> dict[str, Any]:
    """{column: its table} of a row group, filled as columns are asked for."""
    del file, group
    return {}


def _read_columns(file, group: int, names: list[str]):
    return _pyarrow().ParquetFile(file).read_row_group(group, columns=names)


def _load_parquet(clip: Clip, names, code: vae.VAEConfig) -> dict[str, np.ndarray]:
    assert clip.group is not None
    found = {}
    for name in names:
        columns = [f"{_COLUMNS[name]}_{part}" for part in ("bytes", "shape", "dtype")]
        held = _row_group(clip.file, clip.group)
        if name not in held:
            held[name] = _read_columns(clip.file, clip.group, columns)
        row = held[name].slice(clip.row, 1).to_pylist()[0]
        array = _array(*(row[key] for key in columns), where=_where(clip))
        if name in ("latents", "first"):
            array = np.moveaxis(array, 0, -1)
        if name == "latents":  # stored as they left the encoder
            mean, std = (np.asarray(a, np.float32) for a in (code.latents_mean, code.latents_std))
            array = (array - mean) / std
        found[name] = np.ascontiguousarray(array)
    return found


def _array(data: bytes, shape, dtype: str, *, where: str) -> np.ndarray:
    """Bytes as float32; their number must fit shape and dtype."""
    known = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
    if known.get(dtype, 0) * math.prod(shape) != len(data):
        raise ValueError(
            f"{where}: {len(data)} bytes are not {dtype or 'nothing'}{list(shape)}; the file is "
            "damaged or states a wrong dtype"
        )
    return np.frombuffer(data, jax.numpy.dtype(dtype)).reshape(shape).astype(np.float32)


def _pyarrow():
    try:
        from pyarrow import parquet  # an optional package
    except ImportError:
        raise ValueError("parquet files need pyarrow; pip install 'wanjax[data]'") from None
    return parquet
