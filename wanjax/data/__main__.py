"""Latent caches on the command line.

    python -m wanjax.data cache clips --model /models/Wan2.2-T2V-A14B-Diffusers --out cache \
        --fps 16 --size 480x832 --size 832x480 --frames 81 --frames 49
    python -m wanjax.data inspect clips     what a folder of videos and captions holds
    python -m wanjax.data inspect cache     what a cache or a folder of parquet files holds

A clip is cut to the longest --frames it fills and to the --size closest to its aspect ratio;
nothing is enlarged. Running the command again continues an interrupted one and adds new files.
Several processes, started as those of wanjax.train are (--coordinator, --num_processes and
--process_id, or what the environment says), share the files and the --out folder.
"""

import argparse
import collections
import contextlib
import json
import math
import pathlib
import signal
import sys

import jax
import numpy as np

from convert import weights
from wanjax import setup
from wanjax.data import cache, latents, video
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
    lengths = "allowed length, repeatable; default: the model's, and 1"
    add("--frames", type=int, action="append", help=lengths)
    add("--size", action="append", help="allowed HEIGHTxWIDTH, repeatable; default: the model's")
    add("--dtype", choices=setup.DTYPES, help="default: bfloat16, on CPUs float32")
    add("--coordinator", default="", help="host:port of process 0, or auto")
    add("--num_processes", type=int, help="processes that share the work")
    add("--process_id", type=int, help="which of them this is, from 0")
    add("--local_devices", default="", help="GPUs of this process, as 0,1; all")
    look = commands.add_parser("inspect", help="print what a folder or a cache holds")
    look.add_argument("folder")
    args = parser.parse_args(argv)
    try:
        _cache(args) if args.command == "cache" else print(inspect(args.folder))
    except ValueError as error:
        distributed.leave(1, f"wanjax.data: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"wanjax.data: {error}")
    except KeyboardInterrupt:
        sys.exit("wanjax.data: stopped; run the same command to continue")


def _cache(args) -> None:
    fps = None
    if args.fps != "keep":
        with contextlib.suppress(ValueError):
            fps = float(args.fps)
        if fps is None or not 0 < fps < math.inf:
            raise ValueError(f"--fps {args.fps}: expected a number of frames per second, or keep")
    sizes = tuple(map(_parse_size, args.size or ()))
    distributed.start(args.coordinator, args.num_processes, args.process_id, args.local_devices)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # clips are whole: there is nothing to save first
    cache.media(args.folder)
    model = weights.model_config(args.model, components=cache.ENCODERS)
    plan = model.sampling
    frames = tuple(sorted(set(args.frames or (plan.frames, 1))))
    settings = cache.Settings(frames, sizes or ((plan.height, plan.width),), fps)
    cache.check(settings, model)
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    params, model = setup.load_model(
        args.model, dtype=dtype, param_dtype=dtype, components=cache.ENCODERS
    )
    outcomes = cache.build(args.folder, args.out, settings, params, model, args.model)
    if jax.process_index() == 0:
        print(cache.table(outcomes))
        if fps is None:
            rate = f"the model plays them at {plan.fps} fps, whatever they were"
            print(f"every frame is kept: {rate}")
    if not any(outcome.bucket for outcome in outcomes):
        raise ValueError(f"no file of {args.folder} could be used; the reasons are above")


def inspect(folder) -> str:
    """Describe a cache, parquet files or a folder of media."""
    folder = pathlib.Path(folder)
    if (folder / "cache.json").is_file() or any(folder.rglob("*.parquet")):
        return _inspect_latents(folder)
    kinds, lost = collections.Counter(), []
    for file in cache.media(folder):
        name = file.relative_to(folder).as_posix()
        try:
            caption = cache.caption_of(file)
            meta = video.probe(file)
        except ValueError as error:
            lost.append(f"  {name}: {error}")
            continue
        kind = f"{meta['height']}x{meta['width']} {meta['codec']} {meta['fps']:g} fps"
        kinds[kind] += 1
        frames = round(meta["seconds"] * meta["fps"]) or 1
        print(f"{name}  {kind}  {frames} frames  {caption[:60]!r}")
    rows = [f"{sum(kinds.values())} captioned files of {folder}"]
    rows += [f"  {kind}: {count}" for kind, count in kinds.most_common()]
    return "\n".join(rows + ([f"not usable: {len(lost)}"] if lost else []) + lost)


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
