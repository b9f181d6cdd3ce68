"""Plan the shipped recipes for TPU topologies you don't have and write what they need.

    python scripts/bench/plans.py --out scripts/bench/plan.md                  hours on two cores
    python scripts/bench/plans.py --out scripts/bench/plan.md --cases SFT --topologies v5p:4x4x4

Needs wanjax[plan] (libtpu only compiles; no TPU is used) and no weights. Plans are kept as JSON in
--plans and reused; the table lists all of them.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from report_table import table

ROOT = pathlib.Path(__file__).parents[2]
A14B, T2V_14B, T2V_1B = "wan2.2_t2v_a14b", "wan2.1_t2v_14b", "wan2.1_t2v_1.3b"
PODS = ("v5p:4x4x4", "v6e:16x16", "v5e:8x8", "tpu7x:4x4x4")
CASES = {  # name: config file, model, changes, topologies
    "SFT A14B, LoRA": ("sft_wan22.py", A14B, {}, PODS),
    "GRPO A14B": ("grpo_wan22.py", A14B, {}, PODS),
    "NFT A14B": ("nft_wan22.py", A14B, {}, PODS),
    "DMD2 1.3B from 14B": ("dmd2_wan21.py:14b", T2V_1B, {
        "roles.teacher.path": T2V_14B, "roles.critic.path": T2V_1B,
    }, PODS),
    "SFT 14B, full, 720p x 81, one clip": ("sft_wan22.py", T2V_14B, {
        "lora.rank": 0, "experts": "('high',)", "sampling.height": 720, "sampling.width": 1280,
        "data.batch": 1, "micro_samples": 1, "mesh.fsdp": 1, "mesh.data": 1, "mesh.context": 4,
    }, ("v5p:2x2x1",)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to write")
    parser.add_argument("--plans", type=pathlib.Path, default=ROOT / "runs/plans")
    parser.add_argument("--cases", nargs="+", default=[*CASES], help="prefixes of case names")
    parser.add_argument("--topologies", nargs="+", help="only these")
    args = parser.parse_args()
    args.plans.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, (config, model, changes, topologies) in CASES.items():
        for topology in topologies:
            path = args.plans / f"{name}, {topology}.json".replace(" ", "_").replace(":", "_")
            wanted = any(name.startswith(case) for case in args.cases)
            if wanted and topology in (args.topologies or topologies) and not path.exists():
                make(path, config, model, changes, topology)
            if path.exists():
                rows.append(row(name, json.loads(path.read_text(encoding="utf-8"))))
                write(args.out, rows)


def make(path: pathlib.Path, config: str, model: str, changes: dict, topology: str) -> None:
    """Run the planner; writes nothing if it fails."""
    given = {"prompts": "shapes:train:1", "data.path": ".", **changes}
    command = [sys.executable, "-m", "wanjax.plan", "--config", f"configs/{config}"]
    command += ["--topology", topology, "--model", model, "--json"]
    command += [f"--config.{key}={value}" for key, value in given.items()]
    print(f"{path.stem}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode == 0:
        path.write_text(done.stdout.strip().splitlines()[-1] + "\n", encoding="utf-8")


def row(name: str, plan: dict) -> dict:
    """A row of the table: the largest phase and a step's ideal time."""
    gib = lambda n: f"{n / 2**30:.1f}"
    phases = plan["phases"].values()
    mesh = " ".join(f"{axis}={n}" for axis, n in plan["mesh"].items() if n > 1)
    advice = [
        " and ".join(f"{key} = {value}" for key, value in option["changes"].items())
        for option in plan.get("advice", ())
    ]
    return {
        "recipe": name,
        "topology": plan["topology"],
        "mesh": mesh + (" (proposed)" if plan["note"] else ""),
        "peak / HBM GiB": f"{gib(plan['total'])} / " + gib(plan["hbm"]),
        "fits": "yes" if plan["fits"] else "; ".join(advice) or "no",
        "PFLOP per step": f"{sum(p['flops'] * p['calls'] for p in phases) / 1e15:,.0f}",
        "ideal s per step": f"{sum(p['ideal_seconds'] * p['calls'] for p in phases):.1f}",
        "links s per step": f"{sum(p['link_seconds'] * p['calls'] for p in phases):.1f}",
        "involuntary remats": sum(p["rematerializations"] for p in phases),
        "compile s": f"{sum(p['compile_seconds'] for p in phases):.0f}",
    }


def write(path: pathlib.Path, rows: list[dict]) -> None:
    lines = [
        "# What the recipes need on TPUs",
        "",
        "Compiled with XLA:TPU on two CPU cores by `python scripts/bench/plans.py`; nothing",
        "here has run on a TPU. Peak: the largest phase plus everything that stays resident.",
        "Ideal: matmuls at the dense bf16 peak of every chip. Links: collectives at the",
        "combined rate of a chip's links; they run alongside the matmuls as far as XLA overlaps",
        "them. A mesh is proposed where the recipe's own does not divide.",
        "",
        *table(rows),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
