"""Train: config -> mesh -> model -> algorithm -> loop, resuming by itself.

    python -m wanjax.train --config configs/quickstart.py
    python -m wanjax.train --config configs/grpo_wan22.py:small --config.name=trial --dry_run

The loop is: prompts of the step -> collect (rollout, decode, reward, advantage) -> update ->
metrics -> checkpoint. A run lives in runs/<name>/ and continues from its last good checkpoint
when it is started again; interrupted anywhere, it ends with the same bits as one that was not.
"""

import dataclasses
import difflib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import multihost_utils
from ml_collections import config_flags

from configs import default
from convert import lora as convert_lora
from wanjax import (
    checkpoint,
    distributed,
    metrics,
    optim,
    report,
    rewards,
    sample,
    schedule,
    sharding,
    trees,
)
from wanjax import state as states
from wanjax.algorithms import grpo, nft
from wanjax.data import prompts as prompt_files
from wanjax.data import video
from wanjax.models import presets
from wanjax.rewards import shapes

ALGORITHMS = {"grpo": grpo, "nft": nft}


def main(config, dry_run: bool = False) -> pathlib.Path:
    """Run the whole job of a ConfigDict; returns the run folder. Raises ValueError before
    compiling."""
    started = time.time()
    check_keys(config.to_dict(), default.get_config().to_dict())
    run_dir = pathlib.Path(config.workdir) / config.name
    algorithm = _pick(ALGORITHMS, config.algorithm, "config.algorithm")
    train_prompts, eval_prompts = distributed.everywhere(
        lambda: (_prompts(config.prompts), _prompts(config.eval.prompts))
    )
    facts = {"prompts": train_prompts, "eval.prompts": eval_prompts}
    facts = {name: distributed.fingerprint(texts) for name, texts in facts.items()}
    distributed.agree({"config": config.to_dict(), **facts})
    mesh = sharding.make_mesh(dict(config.mesh))
    stream = prompt_files.PromptStream(train_prompts, config.prompts_per_step, config.seed)

    print(f"model    {config.model.path}", flush=True)
    params, model = sample.load_model(**dict(config.model), mesh=mesh)
    setup = make_setup(config, model)
    states.latent_shape(setup)
    algorithm.check(setup)
    with sharding.use_mesh(mesh):
        state = algorithm.init(
            jax.random.key(config.seed), setup, {"student": {e: params[e] for e in model.experts}}
        )
        window = schedule.sde_steps(
            setup.sampling.schedule, setup.sde.strategy, epoch=0, seed=config.seed
        )
        table = schedule.describe(
            setup.sampling.schedule, dataclasses.asdict(setup.sampling.guidance), window
        )
        banner = _banner(config, setup, state, mesh, table)
        print(banner, flush=True)
        if dry_run:
            print("dry run: config, model and shapes fit; nothing was written", flush=True)
            return run_dir
        checkpoint.claim(run_dir, config.to_dict(), config.resume)
        if jax.process_index() == 0:
            (run_dir / "schedule.txt").write_text(table + "\n", encoding="utf-8")
            checkpoint.write_json(run_dir / "facts.json", _facts(config, setup, state, mesh))
        state = _restore(run_dir, state, setup, stream)
        negative = config.negative_prompt
        negative = model.sampling.negative_prompt if negative == "default" else negative
        encode = sample.make_encoder(model, params, [negative, *train_prompts, *eval_prompts])
        uncond_1SE = jnp.asarray(encode([negative]))
        tools = states.Tools(params["vae"], uncond_1SE, rewards.combine(config.reward))
        chosen = eval_prompts[: config.eval.number]
        job = _Job(config, setup, run_dir, encode, tools, chosen, algorithm.EVALUATED)
        state = _loop(job, algorithm, state, stream)
        _finish(job, state, started)
    return run_dir


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """What the loop and its reports share."""

    config: Any
    setup: states.Setup
    run_dir: pathlib.Path
    encode: Callable  # prompts -> ctx_PSE
    tools: states.Tools
    eval_prompts: tuple[str, ...]
    evaluated: str  # policy that is evaluated and exported


def _loop(job: _Job, algorithm, state, stream):
    """The training loop: the visible order of work."""
    config, setup, first = job.config, job.setup, int(state.step)
    trackers = metrics.make_trackers(
        job.run_dir, config.to_dict(), start=first,
        wandb=config.wandb, project=config.project, tensorboard=config.tensorboard,
    )  # fmt: skip
    writer = metrics.MetricsWriter(job.run_dir, total=config.steps, start=first, trackers=trackers)
    saved, previous, save_times = first, None, {}
    try:
        for step in range(first, config.steps):
            times: dict[str, float] = {}
            if step == 0 or _due(config.eval_every, step) or _due(config.sample_every, step):
                with metrics.phase(times, "eval"):
                    _evaluate(job, state, step, writer)
            texts = stream.at(step)
            with metrics.phase(times, "encode"):
                ctx_PSE = job.encode(texts)
            with metrics.phase(times, "collect"):  # rollout, decode and reward overlap
                batch = algorithm.collect(state, setup, states.Item(texts, ctx_PSE), job.tools)
            with metrics.phase(times, "update"):
                state, values = algorithm.update(state, setup, batch)
                jax.block_until_ready(state.step)
            _check_finite(previous, saved)
            previous = (step, values)
            writer.write(step, {**batch.metrics, **values, **times, **save_times})
            save_times = {}
            stop = distributed.preempted(step) and step + 1 < config.steps
            if stop or step + 1 == config.steps or _due(config.save_every, step + 1):
                _check_finite(previous, saved)
                writer.flush()  # before the checkpoint: a kill in between must not lose lines
                with metrics.phase(save_times, "checkpoint"):  # told with the next step
                    kept = {"data": stream.state(step + 1)}
                    checkpoint.save(job.run_dir, step + 1, states.saved(state, setup), kept)
                    checkpoint.prune(job.run_dir, config.keep_last, config.keep_every)
                saved = step + 1
            if stop:
                raise distributed.NeedsRestart(f"asked to stop; checkpoint {saved} is kept")
    except KeyboardInterrupt:
        writer.say(
            f"stopped; checkpoint {saved} of {config.steps} is kept, "
            "the same command continues from it"
        )
        raise
    finally:
        writer.close()
    return state


def _evaluate(job: _Job, state, step: int, writer=None) -> None:
    """Score the fixed evaluation prompts from fixed noise; write sample videos and
    evals/step.json once."""
    if not job.eval_prompts:
        return
    config, texts = job.config, list(job.eval_prompts)
    path = job.run_dir / "evals" / f"step_{step:06d}.json"
    done = multihost_utils.broadcast_one_to_all(np.array(path.exists()))  # one answer for all
    if done:  # before the run was interrupted
        if writer:
            writer.write(step, json.loads(path.read_text(encoding="utf-8")))
        return
    policy = states.rollout_params(state, job.evaluated)
    ctx_PSE = job.encode(texts)
    videos = sample.generate(
        job.setup, policy, job.tools.vae, ctx_PSE, job.tools.uncond_1SE, seed=config.eval.seed
    )
    scores, info = job.tools.reward(videos, texts)
    total = np.sum([config.reward[name] * scores[name] for name in scores], axis=0)
    result = {"eval/reward": float(total.mean())}
    result |= {f"eval/{name}": float(np.mean(values)) for name, values in info.items()}
    if jax.process_index() != 0:
        return
    shown = config.eval.samples
    per_video = [
        {"reward": float(total[i]), **{n.split("/")[-1]: float(v[i]) for n, v in info.items()}}
        for i in range(shown)
    ]
    folder = video.write_samples(
        job.run_dir, step, videos[:shown], texts[:shown], job.setup.model.sampling.fps, per_video
    )
    checkpoint.write_json(path, result)
    line = f"eval at step {step}: reward {result['eval/reward']:.3f}"
    if "eval/success" in result:
        line += f", success {result['eval/success']:.1%}"
    (writer.say if writer else print)(f"{line} on {len(texts)} prompts, videos in {folder}")
    if writer:
        writer.write(step, result)
        for i in range(shown):
            writer.video(step, f"samples/{i}", folder / f"{i:03d}.mp4", texts[i])


def _finish(job: _Job, state, started: float) -> None:
    """After the last step: evaluate, export the adapters, write summary and report, say where
    they are."""
    step = int(state.step)
    times: dict[str, float] = {}
    with metrics.phase(times, "eval"):
        _evaluate(job, state, step)
    if job.setup.lora.rank:
        note = {"step": step, "grid": job.config.sampling.grid, "steps": job.config.sampling.steps,
                "shift": job.setup.sampling.schedule.shift}  # fmt: skip
        adapters = jax.tree.map(sharding.fetch, state.adapters[job.evaluated])
        files = convert_lora.to_diffusers(adapters, job.run_dir / "export", note)
        if files:
            print("adapters " + "  ".join(str(file) for file in files), flush=True)
    if jax.process_index() != 0:
        return
    for record in metrics.read(job.run_dir):
        for name, value in record.items():
            if name.startswith("time/") and name != "time/wall":
                times[name] = times.get(name, 0.0) + value
    page = job.run_dir / "report.html"
    summary = {
        "steps": step,
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in times.items()},
        "seconds_this_process": round(time.time() - started, 2),
        "report": str(page),
    }
    for when, at in (("before", 0), ("after", step)):
        path = job.run_dir / "evals" / f"step_{at:06d}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            for name in ("reward", "success"):
                if f"eval/{name}" in result:
                    summary[f"{name}_{when}"] = result[f"eval/{name}"]
    if job.eval_prompts:
        summary["eval_prompts"] = len(job.eval_prompts)
    checkpoint.write_json(job.run_dir / "summary.json", summary)
    report.write_report([job.run_dir], page)
    for name in ("reward", "success"):
        if f"{name}_after" in summary:
            before, after = summary[f"{name}_before"], summary[f"{name}_after"]
            print(
                f"{name:8} {before:.3f} -> {after:.3f} on {len(job.eval_prompts)} prompts",
                flush=True,
            )
    print(f"report   {page}", flush=True)


def make_setup(config, model: presets.ModelConfig) -> states.Setup:
    """The frozen Setup of a checked config; raises ValueError naming the key to change."""
    for expert in config.experts:
        if expert not in model.experts:
            raise ValueError(
                f"config.experts names {expert!r} but the model has {model.experts}; "
                "set config.experts to some of those"
            )
    defaults, plan, sde = model.sampling, config.sampling, config.sde.to_dict()
    scale = lambda expert: config.guidance[expert] or getattr(defaults.guidance, expert)
    sampling = states.SamplingConfig(
        schedule=schedule.make_schedule(
            plan.grid, plan.steps, plan.shift or defaults.shift, model.boundary
        ),
        guidance=presets.Guidance(scale("high"), scale("low")),
        guidance_mode=config.guidance.mode,
        **{key: plan[key] for key in ("height", "width", "frames", "solver", "batch")},
    )
    kind, eta = sde.pop("kind"), sde.pop("eta")
    sde["range"] = tuple(sde["range"]) or None
    strategy = schedule.Strategy(sde.pop("strategy"), **sde)
    if not config.reward:
        raise ValueError("config.reward is empty; set for example config.reward.shapes = 1.0")
    return states.Setup(
        model=model,
        sampling=sampling,
        sde=states.SdeConfig(strategy, kind, eta),
        lora=states.LoraConfig(config.lora.rank, config.lora.alpha, tuple(config.lora.targets)),
        experts=tuple(config.experts),
        optim={e: optim.OptimConfig(**config.optim[e].to_dict()) for e in config.experts},
        seed=config.seed,
        algorithm=_algorithm_config(config),
        rewards={name: weight for name, weight in config.reward.items()},
    )


def _algorithm_config(config):
    """The frozen config of the chosen algorithm: common keys, then its own section."""
    fields = ("group_size", "prompts_per_step", "advantage", "adv_clip_max", "updates")
    fields += ("micro_samples", "micro_steps", "mix_experts")
    common = {key: config[key] for key in fields}
    beta = {expert: config.kl[expert] for expert in ("high", "low")}
    if config.algorithm == "nft":
        return nft.Config(
            **common, kl_beta=beta, **config.nft.to_dict(),
            awm=config.awm.to_dict(), dpo_beta=config.dpo.beta,
        )  # fmt: skip
    return grpo.Config(
        **common, kl_beta=beta, kl_kind=config.kl.kind, clip=config.clip.to_dict(),
        guard=config.guard, recompute_old_logp=config.recompute_old_logp,
    )  # fmt: skip


def check_keys(config: dict, known: dict, where: str = "config") -> None:
    """Raise ValueError for a key that no default has, with the nearest one."""
    for key, value in config.items():
        if where == "config.reward":
            continue  # free: names and import paths
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"; did you mean {where}.{near[0]}?" if near else f"; {where} has {sorted(known)}"
            )
            raise ValueError(f"{where}.{key} is unknown{hint}")
        if isinstance(known[key], dict):
            check_keys(value, known[key], f"{where}.{key}")


def _prompts(source: str) -> tuple[str, ...]:
    """Prompts of a file, or of the embedded grammar as shapes:<train|heldout>:<1|2>; () for ""."""
    if not source:
        return ()
    if source.startswith("shapes:"):
        _, split, count = source.split(":")
        everything = shapes.prompts(split, int(count))
        return tuple(shapes.prompts(split, int(count), len(everything), seed=0))
    return prompt_files.load_prompts(source)


def _restore(run_dir, state, setup, stream):
    """The state of the last good checkpoint, or the given one."""
    step = checkpoint.latest_good(run_dir)
    if step is None:
        return state
    tree, meta = checkpoint.restore(run_dir, step, states.saved(state, setup))
    stream.resume(meta["data"])
    print(f"resume   step {step} of {run_dir}", flush=True)
    return states.with_saved(state, setup, tree)


def _check_finite(previous, saved: int) -> None:
    """Stop a run whose losses are not finite, one step late; nothing bad has been saved by then."""
    if previous is None:
        return
    step, values = previous
    for name, value in jax.device_get(values).items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"step {step}, phase update: {name} is {value}; checkpoint {saved} is kept, "
                "continue from it with a lower learning rate or another seed"
            )


def _banner(config, setup, state, mesh, table) -> str:
    a, s = setup.algorithm, setup.sampling
    samples = a.group_size * a.prompts_per_step
    return "\n".join(
        [
            f"mesh     {dict(mesh.shape)}",
            f"video    {s.frames} frames of {s.height}x{s.width}, "
            f"latents {states.latent_shape(setup)}",
            f"step     {a.prompts_per_step} prompts x {a.group_size} = {samples} samples, "
            f"{a.updates} updates per rollout; {config.steps} steps",
            states.describe(state, setup),
            table,
        ]
    )


def _facts(config, setup, state, mesh) -> dict:
    """What the report says about the run beside its config."""
    model = setup.model
    sizes = {expert: trees.count(tree) for expert, tree in state.params["student"].items()}
    trained = {e: trees.count(tree) for e, tree in states.trainable(state, setup).items()}
    return {
        "model": {
            "path": config.model.path,
            "name": model.name,
            **{f"parameters {e}": f"{n:,}" for e, n in sizes.items()},
            **{f"trained {e}": f"{n:,}" for e, n in trained.items()},
        },
        "mesh": dict(mesh.shape),
        "environment": metrics.environment(),
    }


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


def _pick(table: dict, name: str, key: str):
    if name not in table:
        raise ValueError(f"{key} is {name!r}; expected one of {tuple(table)}")
    return table[name]


_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:preset]")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "host:port of process 0, or auto")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "processes of the run")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this is, from 0")
_LOCAL_DEVICES = flags.DEFINE_string("local_devices", "", "GPUs of this process, as 0,1; all")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "check config, model and shapes, then stop")


def _command_line(argv) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # the libraries' own chatter hides the progress line
    place = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _LOCAL_DEVICES.value)
    try:
        distributed.start(*place)
        main(_CONFIG.value, _DRY_RUN.value)
    except (ValueError, FloatingPointError) as error:
        distributed.leave(1, f"wanjax.train: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"wanjax.train: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(_command_line)
