"""Train TinyWan2.2 with every method and write the success of each into one table.

    python scripts/bench/learning.py --out scripts/bench/learning.md            all rows, one GPU
    python scripts/bench/learning.py --out scripts/bench/quickstart.md \
        --rows quickstart "quickstart, shuffled rewards"                        two CPU cores

A row is a config (ROWS) trained with every seed. Success is strict, on captions not trained on,
from fixed noise. The 95 % interval is Wilson's, over the clips of all seeds that differ. A run with
a summary.json is not repeated, so a long table can be made in several calls, or by several copies
of the command at once, on one or more cards; --minutes stops between runs. Rows of --out for which
a call has no runs are left as they are.
Controls carry no information and must not gain: shuffled rewards, constant rewards, a frozen
student.
"""

import argparse
import fcntl
import itertools
import json
import math
import pathlib
import platform
import shutil
import time
import zlib

import jax
import numpy as np

from configs import default, quickstart
from wanjax import export, train
from wanjax.data import __main__ as data
from wanjax.data import video
from wanjax.parallel import distributed
from wanjax.rewards import shapes

GPU = {
    "model.path": "tinywan22", "model.dtype": "float32", "model.param_dtype": "float32",
    "model.vae_dtype": "float32", "model.text_dtype": "float32",
    "model.remat": "none", "lora.rank": 8, "lora.alpha": 16.0, "steps": 60, "save_every": 60,
    "sample_every": 0, "sampling.height": 64, "sampling.width": 64, "sampling.frames": 17,
    "sampling.steps": 4, "sampling.batch": 64, "prompts_per_step": 8, "group_size": 8,
    "guidance.high": 1.0, "guidance.low": 1.0, "micro_samples": 64,
    "sde.eta": 0.5, "same_noise": True, "advantage": "flow_grpo_global", "clip.high": 1e-3,
    "optim.high.lr": 1e-3, "optim.low.lr": 1e-3, "optim.high.decay": 60, "optim.low.decay": 60,
    "prompts": "shapes:train:1:0/2", "eval.prompts": "shapes:train:1:1/2", "eval.number": 78,
}  # fmt: skip
NFT = {
    "algorithm": "nft", "kl.high": 1e-4, "kl.low": 1e-4,
    "optim.high.lr": 2e-4, "optim.low.lr": 2e-4,
}  # fmt: skip
PLAIN = {"steps": 0, "algorithm": "nft", "nft.timesteps": 1}  # nft: any number of sampler steps
TEACHER = {"guidance.high": 0.0, "guidance.low": 0.0, "nft.train_guidance": True}  # the model's own
DMD2 = {
    "algorithm": "dmd2", "prompts_per_step": 64, "group_size": 1, "steps": 600,
    "optim.high.decay": 600, "optim.low.decay": 600, "dmd2.ema_start": 20,
    "roles.critic.optim.high.lr": 1e-3, "roles.critic.optim.low.lr": 1e-3,
}  # fmt: skip
TWO_STEPS = {
    "sampling.steps": 2, "sampling.grid": "explicit", "sampling.sigmas": (1.0, 0.5),
}  # fmt: skip
HIGH = {"experts": ("high",), "sde.strategy": "high_window"}
LOW = {"experts": ("low",)}
DANCE, CPS = {"sde.kind": "dance", "sde.eta": 0.3}, {"sde.kind": "cps", "sde.eta": 0.7}
FULL = {"lora.rank": 0, "optim.high.lr": 1e-4, "optim.low.lr": 1e-4}
SHUFFLED, CONSTANT = {"reward": "shuffled"}, {"reward": "constant"}
STILL = {"optim.high.lr": 0.0, "optim.low.lr": 0.0}
ROWS: dict[str, dict] = {
    "base": GPU | PLAIN,
    "base, 2 steps": GPU | PLAIN | TWO_STEPS,
    "teacher, 40 steps, CFG": GPU | PLAIN | TEACHER | {"sampling.steps": 40},
    "SFT": GPU | {
        "algorithm": "sft", "data.path": "clips", "data.batch": 64,
        "optim.high.lr": 3e-4, "optim.low.lr": 3e-4,
    },
    "GRPO flow, both": GPU,
    "GRPO flow, both, four times the videos": GPU | {
        "steps": 240, "save_every": 240, "optim.high.decay": 240, "optim.low.decay": 240,
    },
    "GRPO dance, both": GPU | DANCE,
    "GRPO cps, both": GPU | CPS,
    "GRPO flow, high": GPU | HIGH,
    "GRPO flow, low": GPU | LOW,
    "GRPO dance, high": GPU | HIGH | DANCE,
    "GRPO dance, low": GPU | LOW | DANCE,
    "GRPO cps, high": GPU | HIGH | CPS,
    "GRPO cps, low": GPU | LOW | CPS,
    "GRPO flow, shuffled rewards": GPU | SHUFFLED,
    "NFT": GPU | NFT,
    "NFT, half as many videos": GPU | NFT | {
        "steps": 30, "optim.high.decay": 30, "optim.low.decay": 30,
    },
    "NFT, constant reward": GPU | NFT | CONSTANT,
    "AWM": GPU | NFT | {"nft.loss": "awm", "nft.old_decay": 0, "nft.ema_decay": 0.3},
    "Flow-DPO": GPU | NFT | {"nft.loss": "dpo", "micro_samples": 8},
    "DMD2 4 steps, LoRA, joint": GPU | DMD2,
    "DMD2 2 steps, LoRA, joint": GPU | DMD2 | TWO_STEPS,
    "DMD2 4 steps, full, joint": GPU | DMD2 | FULL,
    "DMD2 2 steps, full, joint": GPU | DMD2 | FULL | TWO_STEPS,
    "DMD2 4 steps, LoRA, high": GPU | DMD2 | HIGH,
    "DMD2 4 steps, LoRA, then low": GPU | DMD2 | LOW | {
        "start": "DMD2 4 steps, LoRA, high",
    },
    "DMD2 4 steps, full, high": GPU | DMD2 | FULL | HIGH,
    "DMD2 4 steps, full, then low": GPU | DMD2 | FULL | LOW | {
        "start": "DMD2 4 steps, full, high",
    },
    "DMD2 2 steps, full, high": GPU | DMD2 | FULL | TWO_STEPS | HIGH,
    "DMD2 2 steps, full, then low": GPU | DMD2 | FULL | TWO_STEPS | LOW | {
        "start": "DMD2 2 steps, full, high",
    },
    "DMD2 2 steps, LoRA, high": GPU | DMD2 | TWO_STEPS | HIGH,
    "DMD2 2 steps, LoRA, then low": GPU | DMD2 | TWO_STEPS | LOW | {
        "start": "DMD2 2 steps, LoRA, high",
    },
    "DMD2 4 steps, frozen student": GPU | DMD2 | STILL,
    "quickstart": {},
    "quickstart, shuffled rewards": SHUFFLED,
}  # fmt: skip


def shuffled(video_BTHWC, prompts, meta=None):
    """The shapes reward with scores permuted over the batch; the parts stay with their clips."""
    scores, info = shapes.reward(video_BTHWC, prompts, meta)
    seed = zlib.crc32(np.ascontiguousarray(video_BTHWC))
    return np.random.default_rng(seed).permutation(scores), info


def constant(video_BTHWC, prompts, meta=None):
    """The same score for every clip; the parts stay with their clips."""
    scores, info = shapes.reward(video_BTHWC, prompts, meta)
    return np.full_like(scores, 0.5), info


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to write")
    parser.add_argument("--runs", type=pathlib.Path, default="runs/learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no runs after this")
    parser.add_argument("--note", default="", help="note for the table header")
    parser.add_argument("--together", type=int, default=1, help="runs sharing the card")
    parser.add_argument("--short", action="store_true", help="smoke test: one step, few clips")
    args = parser.parse_args()
    distributed.start()
    rows = args.rows or [name for name in ROWS if not name.startswith("quickstart")]
    deadline = time.time() + 60 * args.minutes
    for seed, name in itertools.product(args.seeds, rows):
        folder = _folder(args, name, seed)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # another copy of this script is on it
            if folder.joinpath("summary.json").is_file():
                continue
            if time.time() > deadline:
                print(f"out of time before {name}, seed {seed}: run it again", flush=True)
                break
            train.main(config_of(args, name, seed))
            jax.clear_caches()
    write(args, rows)


def config_of(args, name: str, seed: int):
    """The config of one run."""
    config = (quickstart if name.startswith("quickstart") else default).get_config()
    folder = _folder(args, name, seed)
    config.name, config.workdir, config.seed = folder.name, str(folder.parent), seed
    changes = dict(ROWS[name])
    reward = changes.pop("reward", "shapes")
    if reward != "shapes":
        reward = f"{pathlib.Path(__file__).stem}:{reward}"
    for old in list(config.reward):
        del config.reward[old]
    config.reward[reward] = 1.0
    if (first := changes.pop("start", None)) is not None:
        changes |= _started(_folder(args, first, seed), changes["lora.rank"])
    if "data.path" in changes:
        changes["data.path"] = str(_clips(args))
    if args.short:
        changes |= {"prompts_per_step": 2, "group_size": 2, "sampling.batch": 4, "data.batch": 4}
        changes |= {"micro_samples": 2, "eval.number": 4}
        changes |= {"steps": min(changes.get("steps", 1), 1)}
        if changes.get("algorithm") == "dmd2":
            changes |= {"prompts_per_step": 4, "group_size": 1}
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


def _started(run, rank: int) -> dict:
    """Changes that start the student where an earlier run's ended."""
    if not (run / "summary.json").is_file():
        raise ValueError(f"{run} has not finished; run that row for this seed first")
    if rank:
        return {"lora.start": tuple(str(p) for p in sorted(run.glob("export/*high_noise*")))}
    if not (model := run / "export" / "model").is_dir():
        export.export(run, "diffusers", model)
    own = {"path": GPU["model.path"], "param_dtype": GPU["model.param_dtype"]}
    roles = {f"roles.{r}.{k}": v for r in ("teacher", "critic") for k, v in own.items()}
    return {"model.path": str(model), **roles}


def write(args, rows) -> None:
    """Write the table of all finished runs, keeping the rows that were there before."""
    note = f"; {args.note}" if args.note else ""
    lines = [
        "# What each training method reaches", "",
        f"{jax.devices()[0].device_kind}, {platform.machine()}, jax {jax.__version__}; made by "
        f"`python scripts/bench/learning.py`, seeds {args.seeds}{note}.",
        "The intervals treat the seeds as independent, although their prompts and starting noise",
        "are the same; seeds with equal results count once.", "",
        "DiT evaluations: per clip, sampled as it was evaluated. GPU-seconds: collects and updates",
        "of a run, divided by the number of runs on the card; ≤ if at least that many were.", "",
        "| row | success before | success after, 95 % | gain, points | DiT evaluations "
        "| videos made | GPU-seconds |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    table = {}
    if args.out.is_file():
        for line in args.out.read_text(encoding="utf-8").splitlines():
            table[line.strip("| ").split(" |")[0].split(" (")[0]] = line
    for name in rows:
        runs = [_folder(args, name, seed) for seed in args.seeds]
        found = [json.loads((r / "summary.json").read_text()) for r in runs
                 if (r / "summary.json").is_file()]  # fmt: skip
        if not found:
            continue
        config = json.loads((runs[0] / "config.json").read_text())
        made = config["steps"] * config["prompts_per_step"] * config["group_size"]
        made = 0 if config["algorithm"] == "sft" else made
        guided = {config["guidance"][expert] for expert in ("high", "low")} != {1.0}
        evaluations = config["sampling"]["steps"] * (1 + guided)
        before, after = (np.mean([s[f"success_{w}"] for s in found]) for w in ("before", "after"))
        distinct = {s["success_after"]: s["eval_prompts"] for s in found}  # equal seeds count once
        low, high = wilson(after, sum(distinct.values()))
        seconds = np.mean([s["seconds"].get("collect", 0) + s["seconds"].get("update", 0)
                           for s in found])  # fmt: skip
        cells = [
            name if len(found) == len(runs) else f"{name} ({len(found)} of {len(runs)} seeds)",
            f"{100 * before:.1f} %", f"{100 * after:.1f} % [{100 * low:.1f}, {100 * high:.1f}]",
            f"{100 * (after - before):+.1f}", f"{evaluations}", f"{made:,}",
            f"{seconds / args.together:.0f}",
        ]  # fmt: skip
        table[name] = f"| {' | '.join(cells)} |"
    lines += [table[name] for name in ROWS if name in table]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)


def wilson(share: float, number: int) -> tuple[float, float]:
    """The 95 % interval for a share of `number` clips."""
    z = 1.96
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    spread = share * (1 - share) / number + z * z / (4 * number * number)
    half = z / (1 + z * z / number) * math.sqrt(spread)
    return middle - half, middle + half


def _folder(args, name: str, seed: int) -> pathlib.Path:
    return args.runs / f"{name.replace(', ', '-').replace(' ', '_')}_{seed}"


def _clips(args, number: int = 512) -> pathlib.Path:
    """A latent cache of clips rendered from training captions, made once."""
    cache, folder = args.runs / "cache", args.runs / "rendered"
    if cache.is_dir():
        return cache
    number = 8 if args.short else number
    captions = shapes.prompts("train", 2, number, seed=7)
    packed = shapes.pack([shapes.parse(caption) for caption in captions])
    frames = np.asarray(jax.jit(shapes.render)(jax.random.key(7), packed))
    for i, (clip, caption) in enumerate(zip(frames, captions, strict=True)):
        video.write_mp4(folder / f"{i:04d}.mp4", np.round(clip * 255).astype(np.uint8), 8)
        (folder / f"{i:04d}.txt").write_text(caption + "\n")
    size, count = f"{shapes.SIZE}x{shapes.SIZE}", str(shapes.FRAMES)
    data.main(["cache", str(folder), "--model", "tinywan22", "--out", str(cache),
               "--fps", "keep", "--size", size, "--frames", count])  # fmt: skip
    shutil.rmtree(folder)
    return cache


if __name__ == "__main__":
    main()
