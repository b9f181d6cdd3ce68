"""Write what a run has trained: adapter files in any dialect, or a whole model folder.

    python -m wanjax.export runs/quickstart --format comfyui --out adapters
    python -m wanjax.export runs/full --format diffusers --out model      (a run of full weights)

The newest good checkpoint is read; of algorithms that keep an evaluation average, the average is
written.
"""

import argparse
import dataclasses
import json
import sys

import jax.numpy as jnp
import numpy as np

from convert import disk, files, layouts, load, lora, save, weights
from convert.lora import adapter as lora_trees
from convert.lora import write as lora_files
from wanjax import paths, schedule, trees
from wanjax.run import checkpoint


def export(run_dir, dialect: str, out, step: int | None = None) -> list[paths.Path]:
    """Write a run's adapters, or its full weights as a diffusers folder; returns the paths. No
    dialect: see convert.lora.write.

    Raises ValueError when the folder holds no run or no good checkpoint.
    """
    run_dir, out = paths.resolve(run_dir), paths.resolve(out)
    for name in ("config.json", "sampler.json"):
        if not (run_dir / name).is_file():
            raise ValueError(f"{run_dir} holds no run (no {name}); give a folder such as runs/NAME")
    read = lambda name: json.loads((run_dir / name).read_text(encoding="utf-8"))
    config, sampler = read("config.json"), read("sampler.json")
    step = checkpoint.latest_good(run_dir) if step is None else step
    if step is None:
        raise ValueError(f"{run_dir} has no good checkpoint yet; let the run reach its first one")
    flat = checkpoint.read(run_dir, step, "ema") or checkpoint.read(run_dir, step, "trained")
    trained = trees.unflatten(flat)
    if config["lora"]["rank"]:
        note = {"step": str(step), "run": run_dir.name, "wanjax.sampler": json.dumps(sampler)}
        start = config["lora"]["start"]
        return write_adapters(trained, note, start, out, dialect, stem=run_dir.name)
    if dialect not in ("", "diffusers"):
        raise ValueError(
            f"the run trained full weights: they become a diffusers folder, not {dialect}; "
            "use --format diffusers, then python -m convert.weights for other layouts"
        )
    listed = sampler["grid"] == "explicit" and sampler["solver"] in ("euler", "renoise")
    few = {"few_step": _few_step(sampler)} if listed or config["algorithm"] == "dmd2" else {}
    with paths.local_folder(out) as folder:
        _write_model(config["model"]["path"], trained, folder)
        save.write_sampler(folder, {"sampler": sampler, **few})
    return [out]


def write_adapters(
    adapters: dict, note: dict, start: list, out, dialect: str = "", *, stem: str = "lora"
) -> list[paths.Path]:
    """Write adapter trees {expert: tree}, with what the files that they started from have beside
    them; returns the paths (none on processes > 0).

    note: further metadata; dialect: see lora.write.
    """
    adapter = lora.with_start(lora_trees.of_trees(adapters, note), start)
    out = paths.resolve(out)
    with paths.local_folder(out) as folder:
        written = lora_files.write(adapter, folder, dialect, stem=stem)
    return [out / file.name for file in written]


def _write_model(path, trained: dict, out) -> None:
    """Write the diffusers folder of the checkpoint at `path` with trained experts {expert: tree} in
    place of its own; all else passes from file to file, range by range."""
    weights.model_config(path)  # accounts for every tensor
    base, tensors = disk.read(path), {}
    for part in base.tensors:
        own = [trained[expert] for expert in trained if disk.EXPERTS[expert] == part]
        groups = map(save.of_tree, own) if own else load.stored(base, part)
        kept = {name: tensor for group in groups for name, tensor in group.items()}
        # the run had plain fp8 as bfloat16
        tensors[part] = {
            name: files.cast(t, jnp.bfloat16) if t.dtype in disk.FP8 else t
            for name, t in kept.items()
        }
    # a sampler that the base was exported with is not this run's
    said = {k: v for k, v in base.extra.items() if k not in ("sampler", "few_step")}
    model = dataclasses.replace(base, tensors=tensors, extra=said, arrays=None)
    layouts.write(model, out, "diffusers")


def _few_step(sampler: dict) -> dict:
    """Settings of convert/few_step.py, the scheduler of diffusers for this sampler.

    None of diffusers' own schedulers keeps a list of levels.
    """
    levels = sampler["sigmas"] if sampler["grid"] == "explicit" else None
    boundary, shift = sampler["boundary"], 1.0 if levels else sampler["shift"]
    plan = schedule.make_schedule(sampler["grid"], sampler["steps"], shift, boundary, levels)
    # diffusers picks the expert in float32, where a t just below the boundary would be on it
    below = np.nextafter(np.float32(1000 * (boundary or 1)), np.float32(0))
    t_I = plan.timesteps.astype(np.float32)
    t_I = np.where(plan.expert, t_I, np.minimum(t_I, below))
    return {
        "_class_name": "FewStepScheduler",
        "num_train_timesteps": 1000,
        "sigmas": plan.sigmas[:-1].tolist(),
        "timesteps": t_I.tolist(),
        "stochastic_sampling": sampler["solver"] == "renoise",
    }


def main(argv=None) -> None:
    """Command line: RUN --format F --out DIR [--step N]."""
    parser = argparse.ArgumentParser(prog="python -m wanjax.export", description="Export a run.")
    parser.add_argument("run", help="run folder, such as runs/quickstart")
    parser.add_argument(
        "--format", default="", choices=sorted(lora_files.DIALECTS),
        help="default: diffusers, or comfyui for changes that are not low-rank",
    )  # fmt: skip
    parser.add_argument(
        "--out", help="folder to write; default: RUN/export/FORMAT, or RUN/export/model"
    )
    parser.add_argument("--step", type=int, help="checkpoint to read; default: the newest good one")
    args = parser.parse_args(argv)
    try:
        out = args.out or paths.resolve(args.run) / "export" / (args.format or "model")
        written = export(args.run, args.format, out, args.step)
    except ValueError as error:
        sys.exit(f"wanjax.export: {error}")
    print("\n".join(map(str, written)), flush=True)


if __name__ == "__main__":
    main()
