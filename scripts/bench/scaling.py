"""Time a Wan 14B forward pass or LoRA step on one GPU and split over several; write speed-up and
memory.

    python scripts/bench/scaling.py forward lora_step --out scripts/bench/RESULTS.md \
        --meshes context=2 context=4 fsdp=4 stage=2

context: one clip, split by tokens. fsdp: one clip per device, weights sharded. stage: blocks split
into two or more pipeline stages, with 8 clips as micro-batches; one device's time for as many clips
is the best a naive split, where one device idles while the other works, could achieve.
Efficiency = seconds of one device per clip / (devices x seconds per clip).
"""

import argparse
import os
import pathlib

from report_table import card, side, write_section

STAGE_CLIPS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=["forward", "lora_step"])
    parser.add_argument("--meshes", nargs="+", required=True, metavar="AXIS=DEVICES")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--layers", default="40", help="use fewer to try the script")
    parser.add_argument("--size", default="480x832x81")
    parser.add_argument("--remat", default="full", help="policy of lora_step")
    args = parser.parse_args()
    for figure in args.figures:
        rows, alone = [], None
        for mesh in ["", *args.meshes]:
            axis, _, devices = mesh.partition("=")
            devices = int(devices or 1)
            clips = {"fsdp": devices, "stage": STAGE_CLIPS}.get(axis, 1)
            row = _run(figure, mesh, devices, clips, args)
            if row is None:
                continue
            each = row["seconds"] / clips
            alone = alone if mesh else each
            rows.append(
                {
                    "split": mesh or "one device",
                    "clips": clips,
                    "seconds": row["seconds"],
                    "speed-up": round(alone / each, 2) if alone else "",
                    "efficiency": f"{100 * alone / each / devices:.1f} %" if alone else "",
                    "TFLOP/s per device": round(row["tflops"] / devices, 1),
                    "peak GiB per device": row["peak_gib"],
                    "first call s": row["first_s"],
                }
            )
            policy = "" if figure == "forward" else f", remat {args.remat}"
            model = f"14B, {args.size}, {args.layers} layers{policy}, {row['stack']}"
            write_section(args.out, f"scaling.py {figure}, {model}", card(), rows)


def _run(figure, mesh, devices, clips, args):
    """The JSON row of ours.py in a process that sees `devices` GPUs; None if it failed."""
    options = ["--repeats", args.repeats, "--layers", args.layers, "--size", args.size]
    options += ["--remat", args.remat, "--mesh", mesh, "--batch", str(clips)]
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    return side("ours.py", figure, *options, CUDA_VISIBLE_DEVICES=",".join(given[:devices]))


if __name__ == "__main__":
    main()
