"""Encode a folder of captioned videos and images to latents and text rows, once, on disk.

    cache/cache.json          model, digests of its encoders, settings: the same for all clips
          clips/<key>.safetensors   latents [T,H,W,C], text [S,E], and for image-to-video models
                                    first [T,H,W,C] and image [S',E']; caption and source in its
                                    header
          report.json         the outcome for every file of the folder, with the reason

A key is a digest of the file's bytes, the caption, the settings and the encoders. A clip is written
whole or not at all, so an interrupted run can simply be started again. Several processes share the
folder: each encodes every n-th file on its own device, and process 0 brings the outcomes together.

Dims: T latent frames  H W latent height/width  C channels  S text rows  E text width
"""

import collections
import concurrent.futures
import functools
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from convert import digest
from wanjax.data import text, video
from wanjax.models import condition, presets, umt5, vae
from wanjax.parallel import distributed, sharding

FORMAT = 2  # 1 knew encoders by a few numbers of each leaf
ENCODERS = ("vae", "text_encoder", "image_encoder")  # components that a cache is made with
_AHEAD = 2  # files decoded while one is encoded
_SLOWER = 0.9  # a source below this share of the requested frame rate would repeat frames


@dataclass(frozen=True)
class Settings:
    """What clips are cut to. A clip gets the longest length it fills and, of the sizes that need
    no enlarging, the one closest to its aspect ratio (the largest of equals)."""

    frames: tuple[int, ...]  # allowed lengths, 4n + 1
    sizes: tuple[tuple[int, int], ...]  # allowed (height, width) in pixels
    fps: float | None  # frames per second after retiming; None keeps every frame


@dataclass(frozen=True)
class Outcome:
    """What happened to a file: used (its bucket), or not (the reason)."""

    file: str
    bucket: str = ""  # frames x height x width
    reason: str = ""
    key: str = ""
    seconds: float = 0.0


def build(folder, out, settings: Settings, params: dict, model: presets.ModelConfig, path):
    """Cache every captioned file below `folder` in `out`; returns [Outcome] of all of them.

    params: ENCODERS of the model, read from the checkpoint at `path`. All processes call it
    together. Raises ValueError before any work for settings that the model cannot take, a folder
    without media, or an `out` that holds something else.
    """
    folder, out, first = pathlib.Path(folder), pathlib.Path(out), jax.process_index() == 0
    check(settings, model)
    files = distributed.everywhere(lambda: media(folder))
    names = [file.relative_to(folder).as_posix() for file in files]
    identity = distributed.everywhere(lambda: identify(path, model))
    identity |= json.loads(json.dumps(asdict(settings)))
    distributed.agree({"cache": identity, "files": distributed.fingerprint(names)})
    distributed.everywhere(lambda: _claim(out, identity, model) if first else None)
    distributed.everywhere(lambda: _check_shared(out))
    mine = slice(jax.process_index(), None, jax.process_count())
    outcomes = _encode(files[mine], folder, out, settings, identity, _encoder(params, model))
    outcomes = _together(out, names, outcomes)

    def finish():
        _forget(out, folder, {o.key for o in outcomes})
        _write(out / "report.json", json.dumps([asdict(o) for o in outcomes], indent=1).encode())

    distributed.everywhere(finish if first else lambda: None)
    return outcomes


def media(folder) -> list[pathlib.Path]:
    """Video and image files below a folder, sorted; ValueError when there are none."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no folder at {folder}; expected videos or images with .txt captions")
    kinds = video.IMAGES + video.VIDEOS
    found = sorted(f for f in folder.rglob("*") if f.suffix.lower() in kinds and f.is_file())
    if not found:
        raise ValueError(f"{folder} holds no video or image ({' '.join(kinds)})")
    return found


def caption_of(file: pathlib.Path) -> str:
    """The caption beside a file; ValueError with the reason why there is none."""
    path = file.with_suffix(".txt")
    if not path.is_file():
        raise ValueError("no caption (a .txt file of the same name)")
    try:
        caption = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("caption is not UTF-8") from None
    if not text.clean(caption):
        raise ValueError("empty caption")
    return caption


def check(settings: Settings, model: presets.ModelConfig) -> None:
    """Raise ValueError for lengths and sizes that the model cannot take."""
    code, patch = model.vae, model.wan.patch_size
    for frames in settings.frames:
        if frames < 1 or (frames - 1) % code.scale_factor_temporal:
            raise ValueError(f"--frames {frames}: expected {code.scale_factor_temporal}·n + 1")
    unit = [code.scale_factor_spatial * p for p in patch[1:]]
    for height, width in settings.sizes:
        if height < 1 or width < 1 or height % unit[0] or width % unit[1]:
            raise ValueError(
                f"--size {height}x{width}: expected multiples of {unit[0]}x{unit[1]} for this model"
            )


def identify(path, model: presets.ModelConfig) -> dict:
    """What all clips of a cache share besides the settings, as JSON; path: of the checkpoint."""
    return {
        "latent_channels": model.vae.z_dim,
        "text_length": model.wan.text_len,
        "image_to_video": condition.kind(model) == "latents",
        **{part: digest.component(path, part) for part in ENCODERS[: 3 if model.image else 2]},
    }


def read_identity(out) -> dict:
    """What the clips of the cache at `out` share; ValueError for a cache of another format."""
    facts = json.loads((pathlib.Path(out) / "cache.json").read_text(encoding="utf-8"))
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{out} is a cache of format {facts.get('format')}, this version reads {FORMAT}; run "
            "python -m wanjax.data cache again with another --out"
        )
    return facts["identity"]


def header(path) -> dict:
    """{"shapes": {tensor: shape}, and the rest of its header} of a clip; ValueError if damaged."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return {"shapes": shapes, **json.loads(file.metadata()["clip"])}
    except (safetensors.SafetensorError, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and cache again") from None


def table(outcomes: list[Outcome]) -> str:
    """Text table: used clips by bucket, the others by reason."""
    used, lost = collections.defaultdict(list), collections.defaultdict(list)
    for o in outcomes:
        (used[o.bucket] if o.bucket else lost[o.reason]).append(o)
    total = [o for group in used.values() for o in group]
    rows = [f"{'used':24} {'clips':>6} {'seconds':>9}"]
    for name, group in [*sorted(used.items()), ("all", total)]:
        rows.append(f"  {name:22} {len(group):6} {sum(o.seconds for o in group):9.1f}")
    rows += [f"{'not used, and why':24} {'files':>6}"] if lost else []
    for reason, group in sorted(lost.items(), key=lambda pair: -len(pair[1])):
        names = ", ".join(o.file for o in group[:3]) + (", …" if len(group) > 3 else "")
        rows.append(f"  {reason}: {len(group)} ({names})")
    return "\n".join(rows)


def _encode(files, folder, out, settings: Settings, identity: dict, encode) -> list[Outcome]:
    """Encode the files that are not in the cache yet, and say how far it is."""
    outcomes: list[Outcome] = []
    keys: set[str] = set()
    started, work, shown = time.monotonic(), 0, 0.0
    for file, prepared in _prepared(files, folder, settings, identity, out):
        outcome = prepared if isinstance(prepared, Outcome) else prepared[0]
        if outcome.key in keys:
            outcome = _twin(outcome)
        elif not isinstance(prepared, Outcome):
            outcome = _store(encode, out, folder, *prepared)
            work += 1
        outcomes.append(outcome)
        keys |= {outcome.key} - {""}
        done, now = len(outcomes), time.monotonic()
        if now - shown > 5 or done == len(files):
            shown, rate = now, work / max(now - started, 1e-9)
            left = f"{(len(files) - done) / rate / 60:.1f} min" if work else "-"
            what = outcome.bucket or outcome.reason
            name = file.relative_to(folder).as_posix()
            print(f"cache    {done}/{len(files)}  ETA {left}  {name}: {what}", flush=True)
    return outcomes


def _together(out, names, outcomes: list[Outcome]) -> list[Outcome]:
    """Outcomes of all processes in the order of the files, the first of equal clips used."""
    count = jax.process_count()
    if count > 1:
        parts = [out / f".outcomes-{i}.json" for i in range(count)]
        mine = parts[jax.process_index()]
        _write(mine, json.dumps([asdict(o) for o in outcomes]).encode())
        while not all(part.is_file() for part in parts):  # collectives would not wait for hours
            time.sleep(0.5)
        outcomes = [Outcome(**row) for part in parts for row in json.loads(part.read_bytes())]
        distributed.everywhere(lambda: None)  # all have read them
        mine.unlink()
    by_name, keys, found = {o.file: o for o in outcomes}, {""}, []
    for outcome in (by_name[name] for name in names):
        again = outcome.bucket and outcome.key in keys
        found.append(_twin(outcome) if again else outcome)
        keys.add(outcome.key)
    return found


def _twin(outcome: Outcome) -> Outcome:
    return Outcome(outcome.file, reason="the same file and caption as another")


def _prepared(files, folder, settings, identity, out) -> Iterator[tuple]:
    """(file, what `_prepare` returns) in order, working a few files ahead of the reader."""
    with concurrent.futures.ThreadPoolExecutor(_AHEAD) as pool:

        def prepare(file):
            return pool.submit(_prepare, file, folder, settings, identity, out)

        queue = collections.deque((file, prepare(file)) for file in files[:_AHEAD])
        try:
            for following in [*files[_AHEAD:], *[None] * min(_AHEAD, len(files))]:
                file, future = queue.popleft()
                yield file, future.result()
                if following:
                    queue.append((following, prepare(following)))
        finally:
            for _, future in queue:
                future.cancel()


def _prepare(file, folder, settings: Settings, identity: dict, out):
    """Outcome of a file that needs no work, or (its future Outcome, frames, header facts)."""
    name = file.relative_to(folder).as_posix()
    try:
        caption = caption_of(file)
        with open(file, "rb") as data:
            content = hashlib.file_digest(data, "sha256").hexdigest()
        parts = json.dumps([content, caption, identity], sort_keys=True)
        key = hashlib.sha256(parts.encode()).hexdigest()[:32]
        done = out / "clips" / f"{key}.safetensors"
        if done.is_file():
            known = header(done)
            return Outcome(name, known["bucket"], "", key, known["seconds"])
        frames, fps = _cut(file, settings, identity["image_to_video"])
    except ValueError as error:
        return Outcome(name, reason=" ".join(str(error).split()))
    bucket = "x".join(map(str, frames.shape[:3]))
    facts = dict(caption=caption, file=name, sha256=content, bucket=bucket, fps=fps)
    outcome = Outcome(name, bucket, "", key, len(frames) / fps if fps else 0.0)
    return outcome, frames, facts | {"seconds": outcome.seconds}


def _cut(file, settings: Settings, image_to_video: bool):
    """(frames_THWC of one bucket, frame rate); ValueError with the reason to drop the file."""
    meta = video.probe(file)
    if settings.fps and 0 < meta["fps"] < _SLOWER * settings.fps:
        raise ValueError(
            f"{meta['fps']:g} frames a second would be repeated to give {settings.fps:g} (--fps)"
        )
    frames, size = [], None
    for frame in video.read_frames(file, max(settings.frames), settings.fps):
        size = size or _size(frame.shape[:2], settings.sizes)
        frames.append(video.fit(frame, *size))
    lengths = [n for n in settings.frames if n <= len(frames)]
    if not lengths:
        raise ValueError(f"{len(frames)} frames, shorter than --frames {min(settings.frames)}")
    if image_to_video and max(lengths) == 1:
        raise ValueError("one frame has nothing to learn for an image-to-video model")
    return np.stack(frames[: max(lengths)]), settings.fps or meta["fps"]


def _size(source, sizes):
    """The allowed size closest in aspect ratio to (height, width), among those it covers."""
    fitting = [s for s in sizes if s[0] <= source[0] and s[1] <= source[1]]
    if not fitting:
        smallest = min(sizes, key=math.prod)
        listed = "x".join(map(str, smallest))
        raise ValueError(f"{source[0]}x{source[1]} would have to be enlarged to {listed} (--size)")

    def distance(size):
        stretch = abs(math.log(size[0] / size[1]) - math.log(source[0] / source[1]))
        return round(stretch, 6), -math.prod(size)

    return min(fitting, key=distance)


def _encoder(params: dict, model: presets.ModelConfig):
    """A function (frames_THWC uint8, caption) -> {name: float32 array} of one clip."""
    tokenizer = text.load_tokenizer(model.tokenizer)
    read = jax.jit(functools.partial(umt5.encode, config=model.text))
    rows: dict = {}

    @jax.jit
    def pixels(params, frames_THWC):
        x_BTHWC = frames_THWC[None].astype(jnp.float32) / 127.5 - 1
        x_BTHWC = x_BTHWC.astype(jax.tree.leaves(params["vae"])[0].dtype)
        found = {"latents": vae.encode(params["vae"], x_BTHWC, config=model.vae)}
        if condition.kind(model) == "latents":
            cond = condition.first_frame(params, x_BTHWC[:, 0], len(frames_THWC), model=model)
            found |= {"first": cond["latents"][..., -model.vae.z_dim :]}
            found |= {"image": cond["image"]} if "image" in cond else {}
        return {name: a[0].astype(jnp.float32) for name, a in found.items()}

    def read_text(ids, mask):
        return sharding.fetch(read(params["text_encoder"], ids, mask))

    def encode(frames_THWC, caption):
        rows.clear()  # captions rarely repeat
        length = model.wan.text_len
        text.encode_prompts(read_text, tokenizer, [caption], length=length, batch=1, cache=rows)
        found = pixels(params, frames_THWC)
        arrays = {name: sharding.fetch(a) for name, a in found.items()}
        return arrays | {"text": rows[caption].astype(np.float32)}

    return encode


def _store(encode, out, folder, outcome: Outcome, frames, facts) -> Outcome:
    """Encode a clip and write its file; an Outcome with a reason if values are not finite."""
    tensors = encode(frames, facts["caption"])
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            return Outcome(outcome.file, reason=f"its {name} are not finite numbers")
    facts = {**facts, "folder": str(folder.resolve())}
    path = out / "clips" / f"{outcome.key}.safetensors"
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # one string, because safetensors writes several in arbitrary order
    _write(path, safetensors.numpy.save(tensors, {"clip": json.dumps(facts, sort_keys=True)}))
    return outcome


def _claim(out, identity: dict, model: presets.ModelConfig) -> None:
    """Claim `out` for the encoders and settings of `identity`."""
    file = out / "cache.json"
    if file.is_file():
        old = read_identity(out)
        pairs = {k: (old.get(k), value) for k, value in identity.items()}
        changed = ", ".join(f"{k} {a} -> {b}" for k, (a, b) in pairs.items() if a != b)
        if changed:
            raise ValueError(
                f"{out} holds a cache of other settings ({changed}); choose another --out"
            )
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and holds no cache; choose another --out")
    (out / "clips").mkdir(parents=True, exist_ok=True)
    for part in (*out.rglob(".*.tmp"), *out.glob(".outcomes-*.json")):  # of an interrupted run
        part.unlink()
    facts = {"format": FORMAT, "model": model.name, "identity": identity}
    _write(file, json.dumps(facts, indent=1).encode())


def _check_shared(out) -> None:
    if not (out / "cache.json").is_file():
        raise ValueError(
            f"{out} is not the folder in which process 0 began the cache; set --out to one that "
            "all processes share"
        )


def _forget(out, folder, keys) -> None:
    """Remove clips of this folder whose file or caption has changed or is gone."""
    for path in sorted((out / "clips").glob("*.safetensors")):
        if path.stem not in keys and header(path).get("folder") == str(folder.resolve()):
            path.unlink()
            print(f"cache    removed {path.name}: its file or caption has changed or is gone")


def _write(path, data: bytes) -> None:
    """Write a file whole or not at all."""
    tmp = path.with_name(f".{path.name}.{jax.process_index()}.tmp")  # two may write equal clips
    tmp.write_bytes(data)
    os.replace(tmp, path)
