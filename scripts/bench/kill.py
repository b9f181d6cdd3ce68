"""Kill a training run with SIGKILL at random moments, let it finish, and compare it with an
uninterrupted run: every line of metrics.jsonl (except times) and every exported tensor.

    python scripts/bench/kill.py --out scripts/bench/RESULTS.md    quickstart, 15 minutes

The uninterrupted run is kept in --runs and reused; the other always starts over. Exit code 1 if
they differ.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import time

import numpy as np
from report_table import write_section
from safetensors.numpy import load_file

from wanjax.run import metrics

ROOT = pathlib.Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="for the kill times")
    parser.add_argument("--runs", type=pathlib.Path, default="runs/kill")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    args, more = parser.parse_known_args()  # the rest goes to wanjax.train
    command = [sys.executable, "-m", "wanjax.train", "--config", args.config]
    command += [f"--config.workdir={args.runs.absolute()}", *more]
    start(command, "whole").wait()
    whole, killed = args.runs / "whole", args.runs / "killed"
    steps = len(metrics.read(whole))
    shutil.rmtree(killed, ignore_errors=True)  # killing a finished run would show nothing
    rng, at = random.Random(args.seed), []
    for wanted in sorted(rng.sample(range(steps), args.kills)):
        process = start(command, "killed")
        while process.poll() is None and len(metrics.read(killed)) < wanted:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, seconds(whole)))  # anywhere within a step
        if process.poll() is None:
            process.kill()
            at.append(len(metrics.read(killed)))
        process.wait()
    if len(at) < args.kills:
        sys.exit(
            f"killed only {len(at)} of {args.kills} times: the run ended first; try another --seed"
        )
    start(command, "killed").wait()
    rows = [
        {
            "run": args.config,
            "steps": steps,
            "killed after lines": ", ".join(map(str, at)),
            "metrics": "same" if repr(lines(whole)) == repr(lines(killed)) else "DIFFER",
            "adapters": "same" if tensors(whole) == tensors(killed) else "DIFFER",
        }
    ]
    write_section(args.out, "kill.py", f"none, {platform.machine()} CPU", rows)
    return int("DIFFER" in rows[0].values())


def start(command: list[str], name: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, f"--config.name={name}"], env=env, cwd=ROOT)


def lines(run: pathlib.Path) -> list[dict]:
    """What each step logs, without times."""
    timed = ("time/", "perf/")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in metrics.read(run)
    ]


def seconds(run: pathlib.Path) -> float:
    """Mean seconds per step, rollout plus update."""
    spent = json.loads((run / "summary.json").read_text())["seconds"]
    return (spent["collect"] + spent["update"]) / len(metrics.read(run))


def tensors(run: pathlib.Path) -> dict:
    """Bytes of every exported tensor."""
    files = sorted((run / "export").glob("*.safetensors"))
    assert files, f"{run} has no export"
    found = {f"{f.name}/{k}": np.asarray(v) for f in files for k, v in load_file(f).items()}
    return {name: (x.shape, str(x.dtype), x.tobytes()) for name, x in found.items()}


if __name__ == "__main__":
    sys.exit(main())
