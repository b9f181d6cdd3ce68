"""Adapters into another dialect, or out of two checkpoints.

python -m convert.lora SRC --to diffusers|comfyui|kohya|diffsynth --out DST
python -m convert.lora TUNED --base BASE --rank 64 --to comfyui --out DST
"""

import argparse
import pathlib
import re
import sys

import jax.numpy as jnp

from convert import disk
from convert.lora import adapter, extract, read, write
from wanjax.models import presets


def main(argv=None) -> int:
    """Write an adapter in another dialect, or extract one from a tuned checkpoint and its base."""
    parser = argparse.ArgumentParser(prog="python -m convert.lora", description=main.__doc__)
    add = parser.add_argument
    add("src", nargs="+", help="adapter file, folder, or a high and a low file")
    add("--to", required=True, choices=write.DIALECTS)
    add("--out", required=True, help="folder")
    add("--name", help="stem of the written files (default: of the source)")
    add("--expert", choices=(*adapter.EXPERTS, "both"))
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--combined", action="store_true", help="both experts in one file")
    add("--model", help="a preset name or checkpoint to check the adapter against")
    strict = argparse.BooleanOptionalAction
    add("--strict", action=strict, default=True, help="fail if part of the adapter does not fit")
    add("--base", help="extract: src is a tuned checkpoint, this its base")
    add("--rank", type=int, default=64, help="rank of an extracted adapter")
    args = parser.parse_args(argv)
    try:
        convert(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def convert(args) -> None:
    """Read or extract, route, check against a model, write; print what was done."""
    source = args.src[0] if len(args.src) == 1 else args.src
    found = extract.extract(args.base, source, args.rank) if args.base else read.read(source)
    if args.expert:
        found = adapter.route(found, adapter.EXPERTS, args.expert)
    config = None
    if args.model:
        config = presets.MODELS.get(args.model) or disk.model_config(disk.read(args.model))
        found, skipped = adapter.fit(adapter.route(found, config.experts), config)
        if skipped and args.strict:
            raise ValueError(f"{source}: {skipped}; pass --no-strict to convert the rest")
        print(skipped or f"fits {config.name}")
    print(adapter.summary(found, config=config))
    if found.dense and args.to in ("diffusers", "diffsynth"):
        print(f"note: {args.to} does not read its dense changes; ComfyUI and wanjax do")
    if args.dtype:
        found, loss = adapter.cast(found, jnp.dtype(args.dtype))
        print(f"note: {loss}\n" if loss else "", end="")
    stem = args.name or re.sub(r"(?i)[_-](high|low)(_?noise)?$", "", pathlib.Path(args.src[0]).stem)
    paths = write.write(found, args.out, args.to, stem=stem, combined=args.combined)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    raise SystemExit(main())
