"""Encode a folder of captioned videos and images to latents and text rows, once, on disk.

    cache/cache.json          model, digests of its encoders, dtype, settings: the same for all
          clips/<key>.safetensors   latents [T,H,W,C], text [S,E], and for image-to-video models
                                    first [T,H,W,C] and image [S',E']; caption and source in its
                                    header
          report.json         the outcome for every file of the folder, with the reason

A key is a digest of the file's bytes, the caption, the settings and the encoders. Where only the
caption is new, latents are taken from the clip that has them and text alone is encoded. A clip is
written whole or not at all, so an interrupted run can simply be started again. Several processes
share the folder: each encodes every n-th file on its own device, and process 0 brings the outcomes
together.

Dims: T latent frames  H W latent height/width  C channels  S text rows  E text width
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import socket
import time
from concurrent import futures
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from convert import digest
from wanjax.data import cut, media, text
from wanjax.models import condition, presets, umt5, vae
from wanjax.parallel import distributed, sharding

FORMAT = 3  # 1 knew encoders by a few numbers of each leaf, 2 did not know the dtype
ENCODERS = ("vae", "text_encoder", "image_encoder")  # components that a cache is made with
_TEXTS = 64  # rows of this many captions are kept for files that share them


@dataclass(frozen=True)
class Outcome:
    """What happened to a file: used (its bucket), or not (the reason)."""

    file: str
    bucket: str = ""  # frames x height x width
    reason: str = ""
    key: str = ""
    seconds: float = 0.0


def build(folder, out, settings: cut.Settings, params: dict, model: presets.ModelConfig, path):
    """Cache every captioned file below `folder` in `out`; returns [Outcome] of all files there.

    params: ENCODERS of the model, read from the checkpoint at `path`. All processes call it
    together. Raises ValueError before any work for settings that the model cannot take, a folder
    without media, or an `out` that holds something else.
    """
    folder, out, first = pathlib.Path(folder), pathlib.Path(out), jax.process_index() == 0
    check(settings, model)
    settings = of_kind(settings, model)
    files = distributed.everywhere(lambda: media.listing(folder))
    identity = distributed.everywhere(lambda: identify(path, model))
    identity |= json.loads(json.dumps(asdict(settings)))
    identity |= {"dtype": jax.tree.leaves(params["vae"])[0].dtype.name}
    distributed.agree({"cache": identity, "files": distributed.fingerprint([*map(ascii, files)])})
    distributed.everywhere(lambda: _claim(out, identity, model) if first else None)
    distributed.everywhere(lambda: _check_shared(out))
    mine = dict([*files.items()][jax.process_index() :: jax.process_count()])
    outcomes = _encode(mine, folder, out, settings, identity, _encoder(params, model))
    outcomes = _together(out, [*files], outcomes)

    def finish():
        _forget(out, folder, {o.key for o in outcomes})
        _write(out / "report.json", json.dumps([asdict(o) for o in outcomes], indent=1).encode())

    distributed.everywhere(finish if first else lambda: None)
    return outcomes


def check(settings: cut.Settings, model: presets.ModelConfig) -> None:
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


def of_kind(settings: cut.Settings, model: presets.ModelConfig) -> cut.Settings:
    """The settings, knowing whether the model continues an image."""
    return dataclasses.replace(settings, image_to_video=condition.kind(model) == "latents")


def identify(path, model: presets.ModelConfig) -> dict:
    """What all clips of a cache share besides the settings, as JSON; path: of the checkpoint."""
    return {
        "latent_channels": model.vae.z_dim,
        "text_length": model.wan.text_len,
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
    """Text table: used clips by bucket, how many of each length, the other files by reason."""
    used, lost = collections.defaultdict(list), collections.defaultdict(list)
    for o in outcomes:
        (used[o.bucket] if o.bucket else lost[o.reason]).append(o)
    order = sorted(used, key=lambda bucket: tuple(map(int, bucket.split("x"))))
    rows = [f"{'used':24} {'clips':>6} {'seconds':>9}"]
    for name, group in [*((b, used[b]) for b in order), ("all", sum(used.values(), []))]:
        rows.append(f"  {name:22} {len(group):6} {sum(o.seconds for o in group):9.1f}")
    if len(used) > 1:
        lengths = collections.Counter()
        for bucket in order:
            lengths[bucket.split("x")[0]] += len(used[bucket])
        listed = (f"{count} of {n} frame{'s' * (n != '1')}" for n, count in lengths.items())
        rows.append(f"  by length: {', '.join(listed)}")
        least = min(order, key=lambda bucket: len(used[bucket]))
        rows.append(
            f"  a batch is of one bucket; the smallest is {least} with {len(used[least])}: a "
            "larger config.data.batch repeats its clips; fewer --frames or --size make fewer "
            "buckets"
        )
    rows += [f"{'not used, and why':24} {'files':>6}"] if lost else []
    for reason, group in sorted(lost.items(), key=lambda pair: -len(pair[1])):
        names = ", ".join(media.shown(o.file) for o in group[:3])
        rows.append(f"  {reason}: {len(group)} ({names}{', …' if len(group) > 3 else ''})")
    return "\n".join(rows)


def outcome_of(found: media.Found) -> Outcome:
    """The Outcome of a file that was looked at and is not in a cache."""
    if found.made is None:
        return Outcome(found.file, reason=found.reason)
    length, fps = found.made.shape[0], found.made.fps
    bucket = "x".join(map(str, found.made.shape))
    return Outcome(found.file, bucket, seconds=length / fps if fps else 0.0)


def twin(file: str) -> Outcome:
    """The Outcome of a file that equals one before it."""
    return Outcome(file, reason="the same file and caption as another")


def _encode(files, folder, out, settings: cut.Settings, identity: dict, encode) -> list[Outcome]:
    """Encode the files that are not in the cache yet, and say how far it is."""
    outcomes: list[Outcome] = []
    keys: set[str] = set()
    latents = _by_content(out)
    started, work, shown = time.monotonic(), 0, 0.0

    def known(caption, sha256):
        done = _path(out, _key(caption, sha256, identity))
        path = done if done.is_file() else latents.get(sha256)
        return path and {"path": path, **header(path)}

    looked = media.look(folder, files, settings, known, keep=True, share=_share())
    with contextlib.closing(looked):
        for found in looked:
            key = "" if found.reason else _key(found.caption, found.sha256, identity)
            path = _path(out, key)
            if found.reason:
                outcome = outcome_of(found)
            elif key in keys:
                outcome = twin(found.file)
            elif found.known and found.known["path"] == path:
                outcome = Outcome(
                    found.file, found.known["bucket"], "", key, found.known["seconds"]
                )
            else:
                outcome = _store(encode, out, folder, found, key)
                latents[found.sha256] = path
                work += 1
            outcomes.append(outcome)
            keys |= {outcome.key} - {""}
            done, now = len(outcomes), time.monotonic()
            if now - shown > 5 or done == len(files):
                shown, rate = now, work / max(now - started, 1e-9)
                left = f"{(len(files) - done) / rate / 60:.1f} min" if work else "-"
                what = outcome.bucket or outcome.reason
                name = media.shown(found.file)
                print(f"cache    {done}/{len(files)}  ETA {left}  {name}: {what}", flush=True)
    return outcomes


def _key(caption: str, sha256: str, identity: dict) -> str:
    parts = json.dumps([sha256, caption, identity], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _path(out, key: str) -> pathlib.Path:
    return out / "clips" / f"{key}.safetensors"


def _by_content(out) -> dict[str, pathlib.Path]:
    """{digest of a source's bytes: a clip that holds its latents} of a cache."""
    files = sorted((out / "clips").glob("*.safetensors"))
    with futures.ThreadPoolExecutor(16) as pool:  # waits for disks, not for CPUs
        return dict(zip((h["sha256"] for h in pool.map(header, files)), files, strict=True))


def _share() -> int:
    """Processes of this command on this machine."""
    host = socket.gethostname()
    return distributed.gather(host).count(host) if jax.process_count() > 1 else 1


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
        found.append(twin(outcome.file) if again else outcome)
        keys.add(outcome.key)
    return found


def _encoder(params: dict, model: presets.ModelConfig):
    """Functions (frames_THWC uint8) -> {name: float32 array} and (caption) -> text [S,E]."""
    tokenizer = text.load_tokenizer(model.tokenizer)
    read = jax.jit(functools.partial(umt5.encode, config=model.text))

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

    @functools.lru_cache(_TEXTS)
    def rows(caption):
        kept: dict = {}
        length = model.wan.text_len
        text.encode_prompts(read_text, tokenizer, [caption], length=length, batch=1, cache=kept)
        return kept[caption].astype(np.float32)

    return lambda frames: {n: sharding.fetch(a) for n, a in pixels(params, frames).items()}, rows


def _store(encode, out, folder, found: media.Found, key: str) -> Outcome:
    """Encode a clip, or only its caption where its latents are known, and write its file; an
    Outcome with a reason if values are not finite."""
    pixels, rows = encode
    if found.made is None:
        assert found.known is not None
        tensors = safetensors.numpy.load_file(found.known["path"])
        facts: dict = {name: found.known[name] for name in ("bucket", "fps", "seconds")}
        print(f"cache    {media.shown(found.file)}: its latents are there, only text is encoded")
    else:
        tensors, outcome = pixels(found.made.frames), outcome_of(found)
        facts = dict(bucket=outcome.bucket, fps=found.made.fps, seconds=outcome.seconds)
    tensors |= {"text": rows(found.caption)}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            return Outcome(found.file, reason=f"its {name} are not finite numbers")
    facts |= dict(caption=found.caption, file=found.file, sha256=found.sha256)
    facts |= {"folder": str(folder.resolve())}
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    # one string, because safetensors writes several in arbitrary order
    data = safetensors.numpy.save(tensors, {"clip": json.dumps(facts, sort_keys=True)})
    _write(_path(out, key), data)
    return Outcome(found.file, facts["bucket"], "", key, facts["seconds"])


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
    elif out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; set --out to a folder")
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
        known = header(path) if path.stem not in keys else {}
        if known.get("folder") == str(folder.resolve()):
            path.unlink()
            name = media.shown(known["file"])
            print(f"cache    {name}: removed what was made before its file or caption changed")


def _write(path, data: bytes) -> None:
    """Write a file whole or not at all."""
    tmp = path.with_name(f".{path.name}.{jax.process_index()}.tmp")  # two may write equal clips
    tmp.write_bytes(data)
    os.replace(tmp, path)
