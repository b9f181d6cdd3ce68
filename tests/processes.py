"""Train as 2 and 4 processes of one CPU device each, and compare with one process of as many
devices: GRPO, NFT, SFT and DMD2 with a GAN head, on a two-expert model of random weights.

    python -m tests.processes --out scripts/bench/RESULTS.md

The single process runs through; the others get SIGTERM after a step, end with code 42 and are
started again. Compared: all lines of metrics.jsonl without times (rewards, advantages' spread,
losses, gradient norms), every array of the last checkpoint, evaluations. Two processes must agree
bit for bit. Four add their gradients in another order (gloo's), which shows in the last digits:
`apart` is the largest relative difference of a reward or gradient norm. Exit code 1 for two that
differ, or four apart by over 1e-4.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow
from pyarrow import parquet

from scripts.bench import report_table
from tests import tiny
from wanjax import train as trainer
from wanjax.parallel import distributed
from wanjax.run import checkpoint, metrics

ROOT = pathlib.Path(__file__).parents[1]
ALGORITHMS = ("grpo", "nft", "sft", "dmd2")
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--runs", type=pathlib.Path, default="runs/processes")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    args = parser.parse_args()
    shutil.rmtree(args.runs, ignore_errors=True)
    args.runs.mkdir(parents=True)
    prepare(args.runs)
    rows = []
    for name in args.algorithms.split(","):
        for number in map(int, args.processes.split(",")):
            one = train(args.runs, name, 1, number, stop=False)
            many = train(args.runs, name, number, number, stop=True)
            rows.append({"algorithm": name, "processes": number, **compare(one, many)})
            print(rows[-1], flush=True)
    settings = f"{platform.machine()}, {os.cpu_count()} CPUs, jax {jax.__version__}"
    note = f"{settings}; {STEPS} steps, stopped and resumed"
    report_table.write_section(args.out, "tests/processes.py", note, rows)
    return int(any(r["apart"] > 1e-4 or (r["differ"] and r["processes"] == 2) for r in rows))


def prepare(folder: pathlib.Path) -> None:
    """Write the model, and clips as FastVideo's parquet files."""
    os.environ.setdefault("XDG_CACHE_HOME", str(folder.absolute() / "cache"))
    tiny.save_model(folder)
    rng, rows = np.random.default_rng(0), []
    for number in range(8):
        row = {"id": f"clip {number}", "caption": f"clip {number}"}
        for key, shape in (("text_embedding", (31 + number, 24)), ("vae_latent", (4, 2, 2, 2))):
            array = rng.normal(size=shape).astype(np.float32)
            row |= {f"{key}_bytes": array.tobytes(), f"{key}_dtype": "float32"}
            row[f"{key}_shape"] = list(shape)
        rows.append(row)
    (folder / "clips").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "clips/a.parquet")


def make_config(folder: pathlib.Path, name: str, workdir: str):
    c = tiny.make_config(str(folder / "model"), workdir, algorithm=name)
    c.sampling.batch = c.micro_samples = 8
    c.save_every = 1
    c.steps, c.lora.targets = STEPS, tiny.TARGETS
    if name != "grpo":
        c.guidance.high = c.guidance.low = 1.0
    if name in ("sft", "dmd2"):
        c.prompts = c.eval.prompts = ""
        c.data.path, c.data.batch, c.data.holdout = str(folder / "clips"), 8, 0.0
        del c.reward["tests.tiny:brightness"]
    if name == "dmd2":
        c.data.batch, c.group_size = 2, 4
        c.sampling.grid, c.sampling.sigmas, c.sampling.shift = "explicit", (1.0, 0.75, 0.5), 3.0
        c.dmd2.rollout, c.dmd2.gan_weight, c.dmd2.gan_penalty = "data_latent", 0.5, 0.1
        c.dmd2.student_every = 2
    return c


def child(folder: str, workdir: str, name: str, port: str, number: str, rank: str) -> None:
    """One process of a training."""
    try:
        if int(number) > 1:
            distributed.start(f"127.0.0.1:{port}", int(number), int(rank))
        else:
            distributed.start()
        trainer.main(make_config(pathlib.Path(folder), name, workdir))
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, str(error))


def train(folder: pathlib.Path, name: str, number: int, devices: int, stop: bool) -> pathlib.Path:
    """Train to the end, stopped once after its first step if `stop`; the run's folder."""
    run = folder.absolute() / f"{name}-{devices}" / f"{number}" / "run"
    while True:
        processes = start(folder.absolute(), run.parent, name, number, devices)
        if stop:
            while not lines(run) and all(process.poll() is None for process in processes):
                time.sleep(0.05)
            processes[-1].send_signal(signal.SIGTERM)
        codes = [process.wait() for process in processes]
        if codes != [42 if stop else 0] * number:
            sys.exit(f"{name} as {number} processes ended with {codes}")
        if not stop:
            return run
        stop = False


def start(folder, workdir, name: str, number: int, devices: int) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices // number), "NPROC": "16",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": "--xla_backend_optimization_level=0", "XDG_CACHE_HOME": str(folder / "cache"),
        "WANDB_MODE": "offline",
    }  # fmt: skip
    own = [
        sys.executable,
        "-m",
        "tests.processes",
        "child",
        str(folder),
        str(workdir),
        name,
        port,
        str(number),
    ]
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "log").open("a") as log:
        return [
            subprocess.Popen([*own, str(rank)], cwd=ROOT, env=env, stdout=log, stderr=log)
            for rank in range(number)
        ]


def lines(run: pathlib.Path) -> list[dict]:
    """Metrics of a run without times."""
    timed = ("time/", "perf/")
    return [{k: v for k, v in line.items() if k[:5] not in timed} for line in metrics.read(run)]


def compare(one: pathlib.Path, other: pathlib.Path) -> dict:
    """How many values of two runs there are, and how many differ."""
    a, b = ({(n, k): v for n, x in enumerate(lines(r)) for k, v in x.items()} for r in (one, other))
    differ = [key for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
    abstract = checkpoint.abstract(one, STEPS)
    x, y = (checkpoint.restore(run, STEPS, abstract)[0] for run in (one, other))
    arrays = [path for path in x if not np.array_equal(np.asarray(x[path]), np.asarray(y[path]))]
    file = f"evals/step_{STEPS:06d}.json"
    evals = [run / file for run in (one, other) if (run / file).exists()]
    texts = {json.dumps(json.loads(path.read_text()), sort_keys=True) for path in evals}
    apart = [
        abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]))
        for key in differ
        if key[1].startswith(("reward/", "grad_norm/"))
    ]
    count = {"metrics": len(a), "arrays": len(x), "evaluations": len(evals) // 2}
    differing = len(differ) + len(arrays) + (len(texts) > 1)
    return count | {"differ": differing, "apart": float(f"{max(apart, default=0):.1e}")}


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        sys.exit(main())
