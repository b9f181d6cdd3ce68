"""Time one forward pass or LoRA step of Wan 14B on one GPU and split over several; write speed-up
and memory.

    python scripts/bench/scaling.py forward lora_step --devices 2 --out scripts/bench/RESULTS.md

context: one clip split by tokens. fsdp: a clip per device, weights split. stage: blocks split in
two or more pipeline stages with 8 clips as micro-batches; one device's time for as many clips is
what the naive split, where one device idles while the other works, would take at best.
Efficiency = seconds of one device per clip / (devices x seconds per clip).
"""

import argparse
import pathlib

from report_table import card, side, write_section

STAGE_CLIPS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=["forward", "lora_step"])
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--axes", nargs="+", default=["context", "fsdp", "stage"])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--layers", default="40", help="fewer to try the script")
    parser.add_argument("--size", default="480x832x81")
    args = parser.parse_args()
    for figure in args.figures:
        rows, alone = [], None
        for axis in ["alone", *args.axes]:
            devices = 1 if axis == "alone" else args.devices
            clips = {"fsdp": devices, "stage": STAGE_CLIPS}.get(axis, 1)
            row = _run(figure, axis, devices, clips, args)
            if row is None:
                continue
            each = row["seconds"] / clips
            alone = each if axis == "alone" else alone
            rows.append(
                {
                    "split": "one device" if axis == "alone" else f"{axis}={devices}",
                    "clips": clips,
                    "seconds": row["seconds"],
                    "speed-up": round(alone / each, 2) if alone else "",
                    "efficiency": f"{100 * alone / each / devices:.1f} %" if alone else "",
                    "TFLOP/s a device": round(row["tflops"] / devices, 1),
                    "peak GiB a device": row["peak_gib"],
                    "first call s": row["first_s"],
                }
            )
            title = f"scaling.py {figure}, 14B, {args.size}, {args.layers} layers, {row['stack']}"
            write_section(args.out, title, f"{args.devices} x {card()}", rows)


def _run(figure, axis, devices, clips, args):
    """The JSON row of ours.py in a process that sees so many GPUs; None when it failed."""
    options = ["--repeats", args.repeats, "--layers", args.layers, "--size", args.size]
    options += [] if axis == "alone" else ["--mesh", f"{axis}={devices}"]
    visible = ",".join(map(str, range(devices)))
    return side("ours.py", figure, *options, "--batch", str(clips), CUDA_VISIBLE_DEVICES=visible)


if __name__ == "__main__":
    main()
