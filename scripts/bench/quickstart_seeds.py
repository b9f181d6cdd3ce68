"""Run the quickstart with several seeds, and with shuffled rewards as the control.

    python scripts/bench/quickstart_seeds.py --out scripts/bench/RESULTS.md --seeds 0 1 2

Every run trains from the same TinyWan2.2 and is scored on the same held-out prompts from the same
noise, before and after. The control permutes the scores of each scored batch, so the advantages
carry no information; its success must not move.
"""

import argparse
import json
import pathlib
import platform
import zlib

import jax
import numpy as np
from report_table import write_section

from configs import quickstart
from wanjax import train
from wanjax.rewards import shapes


def shuffled(video_BTHWC, prompts, meta=None):
    """The shapes reward, its scores permuted over the batch; the parts stay with their clips."""
    scores, info = shapes.reward(video_BTHWC, prompts, meta)
    seed = zlib.crc32(np.ascontiguousarray(video_BTHWC))
    return np.random.default_rng(seed).permutation(scores), info


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    parser.add_argument("--runs", default="runs/seeds", help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", default=["shapes", "shuffled"])
    args = parser.parse_args()
    rows = []
    for reward in args.rewards:
        for seed in args.seeds:
            config = quickstart.get_config()
            config.name, config.workdir, config.seed = f"{reward}_{seed}", args.runs, seed
            if reward == "shuffled":
                del config.reward["shapes"]
                config.reward[f"{pathlib.Path(__file__).stem}:shuffled"] = 1.0
            run = train.main(config)
            s = json.loads((run / "summary.json").read_text())
            rows.append({
                "reward": reward,
                "seed": seed,
                "success before": f"{s['success_before']:.3f}",
                "success after": f"{s['success_after']:.3f}",
                "gain, points": f"{100 * (s['success_after'] - s['success_before']):+.1f}",
                "reward before": f"{s['reward_before']:.3f}",
                "reward after": f"{s['reward_after']:.3f}",
                "seconds": round(sum(s["seconds"].values())),
            })  # fmt: skip
    card = f"{jax.devices()[0].device_kind}, {platform.machine()}, jax {jax.__version__}"
    write_section(args.out, "quickstart_seeds.py", card, rows)


if __name__ == "__main__":
    main()
