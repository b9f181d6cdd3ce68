"""Benchmark figures in wanjax and in diffusers on one GPU, one after the other; write the ratio.

    python scripts/bench/compare.py forward lora_step --out scripts/bench/RESULTS.md

Each side runs in its own process (otherwise each would hold the whole card), alternating per
figure. If a side fails, its output is shown and the figure is skipped.
"""

import argparse
import pathlib

from report_table import card, side, write_section

TITLES = {
    "forward": "DiT forward, 14B",
    "lora_step": "LoRA r32 step, 14B",
    "grpo": "GRPO iteration, A14B 480x480x5, K=16",
    "nft": "NFT iteration, A14B 480x480x5, K=16",
    "dmd2": "DMD2 step of one clip, A14B",
    "checkpoint": "checkpoint, LoRA r64 of both experts with AdamW's moments",
    "vae_decode": "VAE decode",
    "vae_encode": "VAE encode",
    "umt5": "UMT5-XXL, 8 x 512 tokens",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=TITLES)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    parser.add_argument("--repeats", default="5")
    parser.add_argument("--layers", default="40", help="use fewer to try the scripts")
    parser.add_argument("--size", default="480x832x81")
    parser.add_argument("--remat", default="full", help="ours.py's training policy")
    parser.add_argument("--text_rows", default="512", help="per prompt, before padding")
    args = parser.parse_args()
    for figure in args.figures:
        options = ["--repeats", args.repeats, "--layers", args.layers, "--size", args.size]
        options += ["--text_rows", args.text_rows]
        ours = side("ours.py", figure, *options, "--remat", args.remat)
        peer = side("peer.py", figure, *options)
        if ours and peer:
            usual = {
                name: parser.get_default(name) for name in ("size", "layers", "remat", "text_rows")
            }
            flags = [f" --{n} {getattr(args, n)}" for n in usual if getattr(args, n) != usual[n]]
            rows = [_row(figure, args, ours, peer)]
            write_section(args.out, f"compare.py {figure}{''.join(flags)}", card(), rows)


def _row(figure, args, ours, peer) -> dict:
    size = "" if figure in ("grpo", "nft", "umt5", "checkpoint") else f" {args.size}"
    layers = "" if figure.startswith(("vae", "umt5")) else f", {args.layers} layers"
    if figure == "checkpoint":
        return {
            "figure": f"{TITLES[figure]}{layers}, {ours['gb']} GB",
            "save s": f"{ours['seconds']} / {peer['seconds']}",
            "restore s": f"{ours['restore_s']} / {peer['restore_s']}",
            "stacks": f"{ours['stack']}; {peer['stack']}",
        }
    return {
        "figure": f"{TITLES[figure]}{size}{layers}, bf16",
        "wanjax s": ours["seconds"],
        "diffusers s": peer["seconds"],
        "faster x": round(peer["seconds"] / ours["seconds"], 2),
        "wanjax TFLOP/s": ours.get("tflops", ""),
        "GiB": f"{ours['peak_gib']} / {peer['peak_gib']}",
        "first call s": f"{ours['first_s']} / {peer['first_s']}",
        "stacks": f"{ours['stack']}; {peer['stack']}",
    }


if __name__ == "__main__":
    main()
