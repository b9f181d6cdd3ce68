"""Host memory and open files of a long run: TinyWan2.2, 300 GRPO steps on 2,400 different prompts,
a checkpoint every 10 steps.

    python scripts/bench/flat.py --out scripts/bench/RESULTS.md

The trainer runs as a process of its own; resident memory and the number of its open files are read
from /proc between steps. Exit code 1 if the last third of the run needs over 2 % more memory than
the second third, or has more files open.
"""

import argparse
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

import jax
from report_table import write_section

from wanjax.run import metrics

ROOT = pathlib.Path(__file__).parents[2]
OWN = {
    "prompts": "shapes:train:2", "eval.prompts": "", "prompts_per_step": 8, "group_size": 2,
    "sampling.batch": 16, "micro_samples": 16, "save_every": 10, "sampling.steps": 3,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=pathlib.Path, default="runs/flat")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    args, more = parser.parse_known_args()  # the rest goes to wanjax.train
    shutil.rmtree(args.runs, ignore_errors=True)
    command = [sys.executable, "-m", "wanjax.train", "--config", "configs/quickstart.py"]
    own = OWN | {"steps": args.steps, "workdir": args.runs.absolute(), "name": "run"}
    own["text_cache"] = args.runs.absolute() / "text"
    command += [f"--config.{key}={value}" for key, value in own.items()] + more
    process = subprocess.Popen(command, cwd=ROOT)
    seen = watch(process, args.runs / "run")
    if process.wait():
        return process.returncode
    marks = [args.steps * k // 6 for k in range(1, 7)]
    rows = [{"step": step, **_nearest(seen, step)} for step in marks]
    settings = f"{platform.machine()}, {os.cpu_count()} CPUs, jax {jax.__version__}"
    write_section(args.out, "flat.py", f"{settings}; {args.steps} steps", rows)
    second, last = (_most(seen, args.steps * k // 3, args.steps * (k + 1) // 3) for k in (1, 2))
    grown = last["rss MB"] / second["rss MB"] - 1
    print(f"memory {grown:+.1%}, open files {second['open files']} -> {last['open files']}")
    return int(grown > 0.02 or last["open files"] > second["open files"])


def watch(process, run: pathlib.Path) -> dict[int, dict]:
    """{step: resident memory and open files when it was the last finished one} of a training."""
    seen: dict[int, dict] = {}
    while process.poll() is None:
        records = metrics.read(run)
        if records:
            seen[int(records[-1]["step"]) + 1] = _facts(process.pid)
        time.sleep(0.2)
    return {step: facts for step, facts in seen.items() if facts}


def _facts(pid: int) -> dict:
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        resident = next(row for row in status.splitlines() if row.startswith("VmRSS"))
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return {}  # it has just ended
    return {"rss MB": int(resident.split()[1]) // 1000, "open files": files}


def _nearest(seen: dict[int, dict], step: int) -> dict:
    return seen[min(seen, key=lambda other: abs(other - step))]


def _most(seen: dict[int, dict], first: int, last: int) -> dict:
    rows = [facts for step, facts in seen.items() if first < step < last]  # not the end's report
    return {name: max(row[name] for row in rows) for name in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
