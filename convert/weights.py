"""Convert checkpoints between layouts, with adapters merged in; `load` puts one onto a mesh.

python -m convert.weights SRC --to diffusers|original|comfyui|orbax --out DST
python -m convert.weights SRC --to diffusers --out DST --lora F:high@1.0 --lora F:low@0.5

merged = cast(float32(W) + strength · (alpha/rank · B A + dense change))
rounding of a merge: |merged − (W + ΔW)| / |ΔW|, over all touched weights; large when ΔW is below
the resolution of the stored dtype, and warned about above 1 %
"""

import argparse
import dataclasses
import sys

import numpy as np

from convert import disk, files, layouts, lora, names, save, verify
from convert.load import load as load  # public names
from convert.load import model_config as model_config
from convert.load import plan
from convert.lora import adapter, read
from wanjax.models import lora as low_rank


def main(argv=None) -> int:
    """Write a checkpoint in another layout, with adapters merged in."""
    parser = argparse.ArgumentParser(prog="python -m convert.weights", description=main.__doc__)
    add = parser.add_argument
    add("src", nargs="+", help="folder, file, or the files of one model")
    add("--to", required=True, choices=layouts.LAYOUTS)
    add("--out", required=True)
    add("--dtype", choices=layouts.DTYPES)
    add("--lora", action="append", default=[], metavar="FILE[:high|low|both][@S]")
    add("--verify", action="store_true", help="compare the forward pass block by block")
    strict = argparse.BooleanOptionalAction
    add("--strict", action=strict, default=True, help="fail if part of an adapter does not fit")
    args = parser.parse_args(argv)
    try:
        convert(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def convert(args) -> None:
    """Read, check, merge, write, verify; nothing is written before every check has passed."""
    checkpoint = disk.read(args.src[0] if len(args.src) == 1 else args.src)
    if checkpoint.arrays:
        raise ValueError(
            f"{checkpoint.where} is an Orbax folder; give the checkpoint it was made from"
        )
    special = names.special_variant(checkpoint.tensors.get("transformer", ()))
    for component in checkpoint.tensors:
        if not (special and component.startswith("transformer")):
            plan(checkpoint, component)
    if args.verify and special:
        raise ValueError(f"{checkpoint.where}: wanjax cannot run this variant; drop --verify")
    merged, roundings = checkpoint, []
    for text in args.lora:
        merged, rounding = _merge_file(merged, text, args)
        roundings += [(text, r) for r in rounding]
    layouts.write(merged, args.out, args.to, args.dtype)
    rows: list[tuple] = [("component", "mapped", "missing", "unexpected", "not needed")]
    for component, part in checkpoint.tensors.items():
        skipped = checkpoint.skipped.get(component, [])
        why = f"{len(skipped)} ({files.some(skipped)})" if skipped else "0"
        rows.append((component, len(part), 0, 0, why))
    print(table(rows))
    for text, rounding in roundings:
        print(f"--lora {text}: {rounding}")
        if rounding.large:
            print(
                f"warning: --lora {text}: the stored weights have lost {rounding.relative:.0%} of "
                "the change; write --dtype float32, or apply the adapter instead "
                "(python -m wanjax.sample --lora)"
            )
    if args.verify:
        errors = verify.verify(merged, disk.read(args.out))
        worst = max(errors, key=lambda e: e[1])
        print(f"verify: {len(errors)} blocks, worst relative error {worst[1]:.2e} at {worst[0]}")


def merge(tensors: files.Tensors, added: adapter.Adapter, expert, strength, dtype, component: str):
    """Return (tensors with the adapter added in float32 when read, lora.Rounding filled by
    reading)."""
    rounding = low_rank.Rounding()
    out = dict(tensors)
    pairs, dense = added.modules.get(expert, {}), added.dense.get(expert, {})
    for name in {*(f"{m}.weight" for m in pairs), *dense}:
        base, pair = out[name], pairs.get(name.removesuffix(".weight"))
        final = save.stored(component, name, base, dtype)
        extra = dense[name].astype(np.float32).reshape(base.shape) if name in dense else None

        def read(index, base=base, pair=pair, extra=extra, final=final):
            w = base.read(index).astype(np.float32)
            change = np.zeros_like(w)
            if pair is not None:
                b, a = pair.b[index[0]].astype(np.float32), pair.a.astype(np.float32)
                rows = (pair.scale * strength) * (b @ a)
                change += rows.reshape(len(b), *base.shape[1:])[:, *index[1:]]
            if extra is not None:
                change += strength * extra[index]
            result = (w + change).astype(final.dtype)
            moved, wanted = result.astype(np.float32) - w, change.astype(np.float64)
            rounding.add(
                float(np.square(moved - wanted).sum()), float(np.square(wanted).sum()),
                float((moved * wanted).sum()), int((result != w.astype(final.dtype)).sum()), w.size,
            )  # fmt: skip
            return result

        out[name] = dataclasses.replace(base, dtype=final.dtype, read=read, compact=None)
    return out, rounding


def table(rows: list[tuple]) -> str:
    """Align rows of text."""
    widths = [max(len(str(r[k])) for r in rows) for k in range(len(rows[0]))]
    lines = ([str(c).ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def _merge_file(checkpoint: disk.Checkpoint, text: str, args):
    """(checkpoint with the adapter of one --lora added, [Rounding of each expert])."""
    path, expert, strength = lora.parse_argument(text)
    config = disk.model_config(checkpoint)
    found, skipped = adapter.fit(adapter.route(read.read(path), config.experts, expert), config)
    if skipped and args.strict:
        raise ValueError(f"--lora {text}: {skipped}; pass --no-strict to merge the rest")
    print(f"--lora {text}: {adapter.summary(found, strength)}{'; ' + skipped if skipped else ''}")
    dtype = layouts.plain_dtype(args.dtype)
    tensors, roundings = dict(checkpoint.tensors), []
    for side in [e for e in adapter.EXPERTS if e in found.experts]:
        component = disk.EXPERTS[side]
        part = tensors[component]
        tensors[component], rounding = merge(part, found, side, strength, dtype, component)
        roundings.append(rounding)
    return dataclasses.replace(checkpoint, tensors=tensors), roundings


if __name__ == "__main__":
    raise SystemExit(main())
