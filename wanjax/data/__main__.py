"""Latent caches on the command line.

    python -m wanjax.data cache clips --model /models/Wan2.2-T2V-A14B-Diffusers --out cache \
        --fps 16 --size 480x832 --size 832x480 --frames 81 --frames 49
    python -m wanjax.data inspect clips     what a folder of videos and captions holds
    python -m wanjax.data inspect cache     what a cache or a folder of parquet files holds

A clip is cut to the longest --frames it fills and to the --size closest to its aspect ratio;
nothing is enlarged. Without --frames, videos get any length of the model's from 5 up, and images
one frame. `inspect` judges files as `cache` does with the same --model, --fps, --frames and --size.
Running `cache` again continues an interrupted one, adds new files and encodes changed captions.
Several processes, started as those of wanjax.train are (--coordinator, --num_processes and
--process_id, or what the environment says), share the files and the --out folder.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import signal
import sys

import jax
import numpy as np

from convert import weights
from wanjax import paths, setup
from wanjax.data import cache, cut, latents, media
from wanjax.parallel import distributed


def main(argv=None) -> None:
    """Command line: see the file docstring and --help."""
    parser = argparse.ArgumentParser(prog="python -m wanjax.data", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("cache", help="encode captioned videos and images")
    add = make.add_argument
    add("folder", help="videos and images, each with a .txt caption of the same name")
    add("--model", required=True, help="diffusers folder, any Wan checkpoint, or tinywan22")
    add("--out", required=True, help="folder of the cache")
    add("--fps", required=True, help="frames per second to retime to (Wan: 16), or keep")
    add("--dtype", choices=setup.DTYPES, help="default: bfloat16, on CPUs float32")
    add("--coordinator", default="", help="host:port of process 0, or auto")
    add("--num_processes", type=int, help="processes that share the work")
    add("--process_id", type=int, help="which of them this is, from 0")
    add("--local_devices", default="", help="GPUs of this process, as 0,1; all")
    look = commands.add_parser("inspect", help="print what a folder or a cache holds")
    look.add_argument("folder", help="videos and images, a cache or parquet files")
    look.add_argument("--model", help="judge files as for this model, by its headers alone")
    look.add_argument("--fps", default="keep", help="judge files as if retimed; default: keep")
    for command in (make, look):
        lengths = "allowed length, repeatable; default: the model's and shorter ones, 1 for images"
        command.add_argument("--frames", type=int, action="append", help=lengths)
        sizes = "allowed HEIGHTxWIDTH, repeatable; default: the model's"
        command.add_argument("--size", action="append", help=sizes)
    args = parser.parse_args(argv)
    try:
        args.folder = paths.local(args.folder)
        _cache(args) if args.command == "cache" else _inspect(args)
    except (ValueError, OSError) as error:
        distributed.leave(1, f"wanjax.data: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"wanjax.data: {error}")
    except KeyboardInterrupt:
        sys.exit("wanjax.data: stopped; run the same command to continue")


def _cache(args) -> None:
    asked, out = _asked(args), paths.local(args.out)
    distributed.start(args.coordinator, args.num_processes, args.process_id, args.local_devices)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # clips are whole: there is nothing to save first
    media.listing(args.folder)
    model = weights.model_config(args.model, components=cache.ENCODERS)
    settings = _of_model(asked, model)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    params, model = setup.load_model(
        args.model, dtype=dtype, param_dtype=dtype, components=cache.ENCODERS
    )
    outcomes = cache.build(args.folder, out, settings, params, model, args.model)
    if jax.process_index() == 0:
        print(cache.table(outcomes))
        if settings.fps is None:
            rate = f"the model plays them at {model.sampling.fps} fps, whatever they were"
            print(f"every frame is kept: {rate}")
    if not any(outcome.bucket for outcome in outcomes):
        raise ValueError(f"no file of {args.folder} could be used; the reasons are above")


def _asked(args) -> cut.Settings:
    """What --fps, --frames and --size say."""
    fps = None
    if args.fps != "keep":
        with contextlib.suppress(ValueError):
            fps = float(args.fps)
        if fps is None or not 0 < fps < math.inf:
            raise ValueError(f"--fps {args.fps}: expected a number of frames per second, or keep")
    sizes, frames = map(_parse_size, args.size or ()), tuple(sorted(set(args.frames or ())))
    if frames and frames[0] < 1:
        raise ValueError(f"--frames {frames[0]}: expected at least 1")
    return cut.Settings(frames, tuple(sizes), fps, stills=1 in frames)


def _of_model(asked: cut.Settings, model) -> cut.Settings:
    """The model's lengths and size where none are asked for; ValueError for what it cannot take."""
    plan = model.sampling
    frames = asked.frames or tuple(range(1, plan.frames + 1, model.vae.scale_factor_temporal))
    sizes = asked.sizes or ((plan.height, plan.width),)
    settings = dataclasses.replace(asked, frames=frames, sizes=sizes)
    cache.check(settings, model)
    return cache.of_kind(settings, model)


def _inspect(args) -> None:
    """Describe a cache, parquet files or a folder of media."""
    folder, settings = args.folder, _asked(args)
    if (folder / "cache.json").is_file() or any(folder.rglob("*.parquet")):
        print(_inspect_latents(folder))
        return
    files, outcomes, keys = media.listing(folder), [], set()
    if args.model:
        model = weights.model_config(args.model, components=cache.ENCODERS)
        settings = _of_model(settings, model)
    never = lambda caption, sha256: None
    for found in media.look(folder, files, settings, never, keep=False):
        key, outcome = (found.caption, found.sha256), cache.outcome_of(found)
        if outcome.bucket and key in keys:
            outcome = cache.twin(found.file)
        outcomes.append(outcome)
        keys.add(key)
        print(_line(found, outcome), flush=True)
    print(f"\njudged by {_told(settings)}")
    print(cache.table(outcomes))


def _line(found: media.Found, outcome: cache.Outcome) -> str:
    """A file as it is, and what becomes of it."""
    name = media.shown(found.file)
    become = f"as {outcome.bucket}" if outcome.bucket else f"not used: {outcome.reason}"
    if found.made is None:
        return f"{name}  {become}"
    meta = found.made.meta
    said = f" ({meta['said']} by its container)" if meta["said"] not in (0, meta["frames"]) else ""
    facts = f"{meta['height']}x{meta['width']} {meta['codec']} {meta['fps']:g} fps"
    return f"{name}  {facts}  {meta['frames']} frames{said}  {become}  {found.caption[:60]!r}"


def _told(settings: cut.Settings) -> str:
    frames = ", ".join(map(str, settings.frames)) or "any (--frames)"
    sizes = ", ".join("x".join(map(str, size)) for size in settings.sizes) or "any (--size)"
    fps = f"{settings.fps:g}" if settings.fps else "as it is (--fps)"
    note = "" if settings.frames and settings.sizes else "; --model gives those of a model"
    return f"frames: {frames}; size: {sizes}; frames a second: {fps}{note}"


def _inspect_latents(folder) -> str:
    source = latents.read(folder)
    clips = source.clips
    rows = [f"{key:20} {value}" for key, value in source.identity.items()]
    rows.append(f"{'latents T,H,W,C':20} {'clips':>7} {'text rows':>12}")
    for shape, group in latents.buckets(clips).items():
        name = "text only" if shape is None else ",".join(map(str, shape))
        lengths = [clip.rows for clip in group]
        rows.append(f"{name:20} {len(group):7} {min(lengths):6}-{max(lengths)}")
    distinct = len({clip.caption for clip in clips})
    rows.append(f"{len(clips)} clips, {distinct} different captions, digest {source.digest}")
    sizes = [len(clip.caption) for clip in clips]
    rows.append(f"captions of {min(sizes)} to {max(sizes)} characters, mean {np.mean(sizes):.0f}")
    rows += [f"  {clip.caption[:90]!r}" for clip in clips[:3]]
    report = folder / "report.json"
    if report.is_file():
        outcomes = [cache.Outcome(**o) for o in json.loads(report.read_text(encoding="utf-8"))]
        rows.append(cache.table(outcomes))
    return "\n".join(rows)


def _parse_size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise ValueError(f"--size {text}: expected HEIGHTxWIDTH, such as 480x832")
    return int(height), int(width)


if __name__ == "__main__":
    main()
