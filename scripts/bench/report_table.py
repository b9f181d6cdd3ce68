"""Shared by the benchmarks: time a call, run a side in its own process, and write a script's rows
into its section of a markdown file."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time


def card() -> str:
    """Name of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        found = []
    return found[0] if found else "no GPU"


def timed(call, repeats: int, warm_up: int = 1) -> dict:
    """Median seconds of `repeats` calls after `warm_up` calls, and the seconds of call(0), which
    compiles; each call must end by fetching a value to the host."""
    seconds = []
    for i in range(repeats + warm_up):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": round(statistics.median(seconds[warm_up:]), 4),
        "first_s": round(seconds[0], 1),
    }


def side(script: str, *arguments: str, **environment: str) -> dict | None:
    """The JSON that a script in this folder prints last; None, with a message, if it fails."""
    command = [sys.executable, str(pathlib.Path(__file__).parent / script), *arguments]
    env = os.environ | environment
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    print(done.stdout or f"{' '.join([script, *arguments])} failed", flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None


def table(rows: list[dict]) -> list[str]:
    """Lines of a markdown table; rows are dicts with the same keys."""
    cells = [rows[0], *(row.values() for row in rows)]
    head, *body = ("| " + " | ".join(map(str, line)) + " |" for line in cells)
    return [head, "|" + "---|" * len(rows[0]), *body]


def write_section(path: pathlib.Path, script: str, card: str, rows: list[dict]) -> None:
    """Replace or append the section of `script`; rows are dicts with the same keys."""
    lines = [f"## {script}", "", f"Card: {card}", "", *table(rows)]
    old = path.read_text(encoding="utf-8") if path.exists() else "# Benchmark results\n"
    head, *sections = old.split("\n## ")
    kept = [s for s in sections if not s.startswith(f"{script}\n")]
    body = [head.rstrip()] + [f"## {s.rstrip()}" for s in kept] + ["\n".join(lines)]
    path.write_text("\n\n".join(body) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)
