"""Write what a run has trained: adapter files in any dialect, or a whole model folder.

    python -m wanjax.export runs/quickstart --format comfyui --out adapters
    python -m wanjax.export runs/full --format diffusers --out model      (a run of full weights)

The newest good checkpoint is read; of algorithms that keep an evaluation average, the average is
written.
"""

import argparse
import json
import pathlib
import sys

from convert import lora, weights
from wanjax import checkpoint, trees


def export(run_dir, dialect: str, out, step: int | None = None) -> list[pathlib.Path]:
    """Write a run's adapters, or its full weights as a diffusers folder; returns the paths. No
    dialect: see lora.write.

    Raises ValueError when the folder holds no run or no good checkpoint.
    """
    run_dir = pathlib.Path(run_dir)
    for name in ("config.json", "sampler.json"):
        if not (run_dir / name).is_file():
            raise ValueError(f"{run_dir} holds no run (no {name}); give a folder such as runs/NAME")
    read = lambda name: json.loads((run_dir / name).read_text(encoding="utf-8"))
    config, sampler = read("config.json"), read("sampler.json")
    step = checkpoint.latest_good(run_dir) if step is None else step
    if step is None:
        raise ValueError(f"{run_dir} has no good checkpoint yet; let the run reach its first one")
    flat, _ = checkpoint.restore(run_dir, step, checkpoint.abstract(run_dir, step))
    state = trees.unflatten(flat)
    trained = state.get("ema", state["trained"])
    if config["lora"]["rank"]:
        note = {"step": str(step), "run": run_dir.name, "wanjax.sampler": json.dumps(sampler)}
        adapter = lora.with_start(lora.of_trees(trained, note), config["lora"]["start"])
        return lora.write(adapter, out, dialect, stem=run_dir.name)
    if dialect not in ("", "diffusers"):
        raise ValueError(
            f"the run trained full weights: they become a diffusers folder, not {dialect}; "
            "use --format diffusers, then python -m convert.weights for other layouts"
        )
    params, model = weights.load(config["model"]["path"])
    weights.save_diffusers({**params, **trained}, model, out)
    _set_sampler(pathlib.Path(out), sampler)
    return [pathlib.Path(out)]


def _set_sampler(folder: pathlib.Path, sampler: dict) -> None:
    """Say in a diffusers folder how the run samples; a few-step student also gets its scheduler.

    A scheduler of diffusers keeps no list of levels; it takes "sigmas" of wanjax.json by
    scheduler.set_timesteps = functools.partial(scheduler.set_timesteps, sigmas=sigmas).
    """
    extra = json.loads((folder / "wanjax.json").read_text(encoding="utf-8"))
    weights.dump_json(folder / "wanjax.json", extra | {"sampler": sampler})
    if "sigmas" not in sampler:
        return
    euler, lcm = "FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"
    name = lcm if sampler["solver"] == "renoise" else euler
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index |= {"scheduler": ["diffusers", name], "boundary_ratio": sampler["boundary"]}
    weights.dump_json(folder / "model_index.json", index)
    scheduler = {"_class_name": name, "num_train_timesteps": 1000, "shift": 1.0}
    weights.dump_json(folder / "scheduler/scheduler_config.json", scheduler)


def main(argv=None) -> None:
    """Command line: RUN --format F --out DIR [--step N]."""
    parser = argparse.ArgumentParser(prog="python -m wanjax.export", description="Export a run.")
    parser.add_argument("run", help="run folder, such as runs/quickstart")
    parser.add_argument(
        "--format", default="", choices=sorted(lora.DIALECTS),
        help="default: diffusers, or comfyui for changes that are not low-rank",
    )  # fmt: skip
    parser.add_argument(
        "--out", help="folder to write; default: RUN/export/FORMAT, or RUN/export/model"
    )
    parser.add_argument("--step", type=int, help="checkpoint to read; default: the newest good one")
    args = parser.parse_args(argv)
    out = args.out or pathlib.Path(args.run) / "export" / (args.format or "model")
    try:
        paths = export(args.run, args.format, out, args.step)
    except ValueError as error:
        sys.exit(f"wanjax.export: {error}")
    print("\n".join(map(str, paths)), flush=True)


if __name__ == "__main__":
    main()
