"""Train: config -> mesh -> model -> algorithm -> loop, resuming by itself.

    python -m wanjax.train --config configs/quickstart.py
    python -m wanjax.train --config configs/grpo_wan22.py:small --dry_run \\
        --config.model.path=wan2.2_t2v_a14b     # a preset's name: no weights needed

The loop is: prompts or clips of the step -> collect (rollout, decode, reward, advantage; clips as
they are) -> update -> metrics -> checkpoint. A run lives in runs/<name>/ and continues from its
last good checkpoint when it is started again; interrupted anywhere, it ends with the same bits as
one that was not.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging

from configs import default
from convert import lora
from wanjax import (
    command,
    console,
    evaluate,
    export,
    optim,
    paths,
    report,
    rewards,
    sampling,
    schedule,
    settings,
    setup,
    trees,
)
from wanjax import state as states
from wanjax.algorithms import Algorithm, Tools
from wanjax.data import Item, latents, text
from wanjax.data import prompts as prompt_files
from wanjax.models import presets, wan
from wanjax.parallel import distributed, runtime, sharding
from wanjax.run import alarms, checkpoint, disk, guard, metrics, profiling


def main(config, dry_run: bool = False) -> paths.Path:
    """Run the whole job of a ConfigDict; returns the run folder.

    Raises ValueError for what cannot run, before weights are read or anything compiles; a dry run
    ends there.
    """
    started = time.time()
    setup.check(config.to_dict())
    run_dir = paths.resolve(config.workdir) / config.name
    checkpoint.check(run_dir)
    algorithm = setup.ALGORITHMS[config.algorithm]
    by_name = dry_run and config.model.path in presets.MODELS  # a model without weights
    model, roles = distributed.everywhere(lambda: setup.models(config, by_name=by_name))
    data = distributed.everywhere(functools.partial(_read_data, config, model, dry_run))
    reward = distributed.everywhere(functools.partial(_reward, config, data))
    distributed.agree({"config": config.to_dict(), **data.facts()})
    run = setup.make(config, model, roles)
    algorithm.check(run)
    eval_plan = setup.evaluation_sampling(config, run)
    mesh = setup.make_mesh(config, by_name=by_name)
    setup.check_mesh(run, algorithm, mesh)
    stream = _stream(config, data, model)
    start = {}
    if config.lora.start:
        start = lora.load(list(config.lora.start), model, dense_merged=True)
    print(f"model    {config.model.path}", flush=True)
    held = contextlib.nullcontext() if dry_run else guard.hold(run_dir)
    with held, sharding.use_mesh(mesh):
        state = setup.abstract_state(config, run, algorithm, mesh)
        states.check_start(state, run.training, start)
        print(_banner(config, run, algorithm, state, mesh), flush=True)
        if isinstance(stream, latents.LatentStream):
            print(stream.describe(), flush=True)
        if dry_run:
            print("dry run: config, model and shapes fit; nothing was written", flush=True)
            return run_dir
        guard.claim(
            run_dir, config.to_dict(), config.resume, default.get_config().to_dict(),
            allow=config.allow_changes,
        )  # fmt: skip
        if data.source:
            latents.check_encoders(data.source, config.model.path)
        encode = _encoder(config, run, mesh, data, stream)
        vae = setup.load_vae(config, mesh)
        cond = setup.first_frames(config, mesh, model, eval_plan, vae, data.eval_images)
        tools = Tools(vae, jnp.asarray(encode([_negative(config, model)])), reward)
        job = _job(config, run, algorithm, run_dir, data, stream, encode, cond, tools, eval_plan)
        # nothing but the loop holds the first state: what is trained would exist twice
        state = _loop(job, _begin(job, mesh, start))
        _finish(job, state, started)
    return run_dir


@dataclass(frozen=True, eq=False)
class _Data:
    """What a run reads before its weights."""

    prompts: tuple[str, ...]
    eval_prompts: tuple[str, ...]
    eval_images: tuple[pathlib.Path, ...]  # the first frames of their videos; () for text alone
    source: latents.Source | None  # of clips, which then take the place of prompts

    def facts(self) -> dict[str, str]:
        """What all processes must agree on."""
        texts = {"prompts": self.prompts, "eval.prompts": self.eval_prompts}
        found = {name: distributed.fingerprint(lines) for name, lines in texts.items()}
        return found | {"data": self.source.digest if self.source else ""}


@dataclass(frozen=True, eq=False)
class _Job:
    """What the loop and the end of a run share."""

    config: Any
    setup: settings.Setup
    algorithm: Algorithm
    run_dir: paths.Path
    tools: Tools
    evaluation: evaluate.Evaluation
    stream: Any  # data.prompts.PromptStream or data.latents.LatentStream
    item: Callable[[int], Item]  # data of a step
    base: dict[str, str]  # digests of the weights that it starts from
    outside: dict[str, int] = field(default_factory=dict)  # of alarms.watch


def _read_data(config, model: presets.ModelConfig, dry_run: bool) -> _Data:
    """Prompts, and the headers of the clips that the run trains on."""
    texts, images = setup.eval_prompts(config, model)
    shown = texts[: _shown(config)], images[: _shown(config)]
    if not setup.trains_on_clips(config):
        return _Data(setup.prompts(config.prompts), *shown, None)
    absent = dry_run and not config.data.path
    return _Data((), *shown, None if absent else setup.clips(config))


def _shown(config) -> int:
    """How many evaluation prompts become videos."""
    return config.eval.number if config.reward else config.eval.samples


def _reward(config, data: _Data) -> Callable | None:
    """The reward function; missing packages and folders show here, and evaluation prompts that it
    cannot score."""
    if not config.reward:
        return None
    reward = rewards.combine(config.reward, config.reward_deadline)
    try:
        reward.check(data.eval_prompts)
    except ValueError as error:
        raise ValueError(
            f"config.eval.prompts is {config.eval.prompts!r}; set it to prompts that the reward "
            f"can score, as config.prompts has, or to '' for no evaluation: {error}"
        ) from None
    return reward


def _stream(config, data: _Data, model: presets.ModelConfig):
    """The stream of prompts or clips."""
    if data.source:
        return setup.clip_stream(config, data.source, model)
    if setup.trains_on_clips(config):
        return None  # a dry run without data
    return prompt_files.PromptStream(data.prompts, config.prompts_per_step, config.seed)


def _encoder(config, run: settings.Setup, mesh, data: _Data, stream) -> text.Encoder:
    """The encoder of all prompts that the run will ask for."""
    trained = () if data.source else stream.within(config.steps)
    negative = _negative(config, run.model)
    return setup.contexts(config, mesh, run.model, [negative, *trained, *data.eval_prompts])


def _negative(config, model: presets.ModelConfig) -> str:
    own = config.negative_prompt
    return model.sampling.negative_prompt if own == "default" else own


def _begin(job: _Job, mesh, start: dict) -> states.State:
    """The state that the run starts or continues with; the run folder says what it is."""
    config, run, run_dir = job.config, job.setup, job.run_dir
    weights = setup.load(config, mesh, run.model, run.roles)
    state = job.algorithm.init(jax.random.key(config.seed), run, weights)
    if start:
        state = states.start_from(state, run.training, jax.tree.map(jnp.asarray, start))
    state = _restore(job, states.place(state, mesh))
    if jax.process_index() == 0:
        table = _schedule_table(run, job.algorithm)
        (run_dir / "schedule.txt").write_text(table + "\n", encoding="utf-8")
        disk.write_json(run_dir / "facts.json", _facts(config, run, state, mesh))
        disk.write_json(run_dir / "sampler.json", sampling.note(run.sampling))
    return state


def _job(
    config, run, algorithm, run_dir, data: _Data, stream, encode, cond, tools: Tools, eval_plan
) -> _Job:
    """Bring together what the loop needs; cond: of the evaluation prompts."""

    def of_texts(texts: list[str], cond=None) -> Item:
        return Item(texts, encode(texts), cond=cond)

    preview = None
    if data.eval_prompts:
        preview = of_texts(list(data.eval_prompts), cond)
    elif data.source and not config.eval.prompts:
        preview = stream.preview(_shown(config), sampling.latent_shape(run.model, run.sampling))
    evaluation = evaluate.Evaluation(
        run_dir, run.model, eval_plan, algorithm.EVALUATED, run.rewards, tools, preview,
        seed=config.eval.seed, shown=config.eval.samples,
        static=_evaluation_static(run, algorithm, eval_plan),
        validate=evaluate.validation(algorithm, run, stream, tools) if data.source else None,
    )  # fmt: skip
    item = stream.at if data.source else lambda step: of_texts(stream.at(step))
    base = setup.identify(config, run.model, run.roles)
    return _Job(config, run, algorithm, run_dir, tools, evaluation, stream, item, base)


def _evaluation_static(run: settings.Setup, algorithm: Algorithm, eval_plan) -> dict:
    """Static arguments of an evaluation's rollouts: those of training where the sampler is the
    same, so that nothing is compiled twice."""
    own = getattr(algorithm, "rollout_static", None)
    if own is None or eval_plan is not run.sampling:
        return {}
    return {name: value for name, value in own(run).items() if name not in ("model", "plan")}


def _loop(job: _Job, state: states.State) -> states.State:
    """The training loop: the visible order of work."""
    config, run, algorithm, first = job.config, job.setup, job.algorithm, int(state.step)
    trackers = metrics.make_trackers(
        job.run_dir, config.to_dict(), start=first,
        wandb=config.wandb, project=config.project, tensorboard=config.tensorboard,
    )  # fmt: skip
    writer = metrics.MetricsWriter(job.run_dir, total=config.steps, start=first, trackers=trackers)
    look = alarms.watch(config.alarms.limits, config.alarms.patience, job.outside)
    saver = checkpoint.Saver(job.run_dir, functools.partial(_prune, job))
    saved, previous, save_times = first, None, {}
    traced = profiling.steps_of(config.profile, config.steps)
    steps = profiling.profiled(range(first, config.steps), traced, job.run_dir, writer.say)

    def keep(step: int):
        """Save the checkpoint that continues with `step`; it counts the steps before it."""
        nonlocal saved, previous
        _check_finite(previous, saved)
        _report_alarms(job, previous, look, writer, last=step == config.steps)
        previous = None
        writer.flush()  # before the checkpoint: a kill in between must not lose lines
        with metrics.phase(save_times, "checkpoint"):  # reported with the next step
            _save(job, saver, state, step)
        saved = step  # or NotSaved ends the run: whatever ends the loop waits for the save

    try:
        for step in steps:
            times: dict[str, float] = {}
            try:
                if step == 0 or _due(config.eval_every, step) or _due(config.sample_every, step):
                    with metrics.phase(times, "eval"):
                        evaluate.run(job.evaluation, state, step, writer)
                with metrics.phase(times, "data"):  # text rows, or reading latents
                    item = job.item(step)
                with metrics.phase(times, "collect"):  # rollout, decode and reward overlap
                    batch = algorithm.collect(state, run, item, job.tools)
            except distributed.Stopped:  # the state is still that of the step before
                if saved != step:
                    keep(step)
                raise distributed.NeedsRestart(_stopped(saved)) from None
            with metrics.phase(times, "update"):
                state, updated = algorithm.update(state, run, batch)
                jax.block_until_ready(state.step)
            times |= metrics.speed(_flops(job, item), times)
            values = {**batch.metrics, **updated}
            _check_lost(job, batch.metrics, step, saved)
            del batch, item  # gone before the next ones are made
            saver.check()
            _check_finite(previous, saved)
            _report_alarms(job, previous, look, writer)
            previous = (step, values)
            writer.write(step, {**values, **times, **save_times})
            save_times.clear()
            stop = distributed.preempted() and step + 1 < config.steps
            if stop or step + 1 == config.steps or _due(config.save_every, step + 1):
                keep(step + 1)
            if stop:
                raise distributed.NeedsRestart(_stopped(saved))
    except KeyboardInterrupt:
        saver.wait()
        writer.say(
            f"stopped; checkpoint {saved} of {config.steps} is kept, the same command continues "
            "from it"
            if saved
            else "stopped before the first checkpoint"
        )
        raise
    finally:
        writer.close()
        saver.close()
    return state


def _stopped(saved: int) -> str:
    return f"asked to stop; checkpoint {saved} is kept" if saved else "asked to stop before step 1"


def _save(job: _Job, saver: checkpoint.Saver, state: states.State, step: int) -> None:
    """Begin to write the checkpoint that continues with `step`."""
    kept = {**_content(job, step), "alarms": dict(job.outside)}
    saver.save(step, states.saved(state, job.setup.training), kept)


def _prune(job: _Job) -> None:
    """Remove checkpoints that need not stay; process 0 only."""
    best = evaluate.best(job.run_dir)
    checkpoint.prune(job.run_dir, job.config.keep_last, job.config.keep_every, best)


def _content(job: _Job, step: int) -> dict[str, dict]:
    """What a checkpoint knows about the data it was made with, and their cursor."""
    preview = job.evaluation.preview
    texts = distributed.fingerprint(preview.texts if preview else [])
    return {
        "data": job.stream.state(step),
        "eval": {"step": step, "prompts": texts},
        "base": {"step": step, **job.base},
    }


def _restore(job: _Job, state: states.State) -> states.State:
    """The state of the last good checkpoint, or the given one; the run folder gets the config that
    it continues with."""
    config, run_dir, training = job.config, job.run_dir, job.setup.training
    step, content = checkpoint.latest_good(run_dir), {}
    if step is not None:
        wanted = checkpoint.vacate(states.saved(state, training))
        tree, meta = checkpoint.restore(run_dir, step, wanted)
        now = _content(job, step)
        then = {part: meta.get(part, now[part]) for part in now}
        job.stream.resume(then["data"], config.allow_changes)
        for part, what, restore in (
            ("eval", "evaluation prompts", "the file of config.eval.prompts"),
            ("base", "base weights", "config.model.path, or that of the role"),
        ):
            prompt_files.next_step(then[part], now[part], what, restore, config.allow_changes)
        for part in now:
            found = prompt_files.differences(then[part], now[part])
            own = {"seed", "batch"}  # of the config, where their changes are noted
            content |= {f"{part}.{key}": found[key] for key in found if key not in own}
        state = states.with_saved(state, training, tree)
        job.outside.update(meta.get("alarms", {}))
        print(f"resume   step {step} of {run_dir}", flush=True)
    usual = default.get_config().to_dict()
    guard.record(run_dir, config.to_dict(), usual, step or 0, content)
    if step is not None:  # a lower keep_last makes room before the next checkpoint needs it
        disk.on_first_process(lambda: _prune(job))
    return state


def _flops(job: _Job, item: Item) -> dict[str, float]:
    """Model FLOPs of a step by phase; {} where the algorithm does not count them."""
    model, clips = job.setup.model, item.x0_PTHWC
    shape = sampling.latent_shape(model, job.setup.sampling) if clips is None else clips.shape[1:]
    one = wan.forward_flops(model.wan, sampling.token_grid(model, shape))
    forwards = getattr(job.algorithm, "forwards", lambda run: {})(job.setup)
    return {name: one * count for name, count in forwards.items()}


def _check_finite(previous, saved: int) -> None:
    """Stop a run whose losses are not finite, one step late; nothing bad has been saved by then."""
    if previous is None:
        return
    step, values = previous
    for name, value in jax.device_get(values).items():
        if not math.isfinite(value):
            kept = f"checkpoint {saved} is kept, continue from it"
            kept = kept if saved else "no checkpoint has been saved, start again"
            role, expert = "roles.critic." * name.startswith("critic/"), metrics.split_name(name)[1]
            names = [f"config.{role}optim.{e}.lr" for e in metrics.EXPERTS if expert in ("", e)]
            raise FloatingPointError(
                f"step {step}, phase update: {name} is {value}; {kept} with "
                f"--config.allow_changes=True and a lower {' and '.join(names)}, or another "
                "config.seed"
            )


def _check_lost(job: _Job, values, step: int, saved: int) -> None:
    """Stop a run that has had no reward for too long: it would train to its end on nothing."""
    most, name = job.config.reward_lost_steps, "steps without a reward"
    job.outside[name] = job.outside.get(name, 0) + 1 if values.get("reward/lost") == 1 else 0
    if most and job.outside[name] >= most:
        kept = f"checkpoint {saved} is kept" if saved else "no checkpoint has been saved"
        raise rewards.RewardError(
            f"step {step}, phase reward: all scores of the last {most} steps were lost for the "
            f"reasons above; {kept}. Mend the reward, or set config.reward_lost_steps to 0 to go on"
        )


def _report_alarms(job: _Job, previous, look: Callable, writer, last: bool = False) -> None:
    """Report alarms from the previous step, or stop; after the last step nothing is left to
    stop."""
    action = job.config.alarms.action
    if previous is None or action == "off":
        return
    step, values = previous[0], jax.device_get(previous[1])
    lines = look(values)
    if step == 0 and not job.config.lora.start:  # nothing has moved yet
        first = {k.removeprefix(optim.START): v for k, v in values.items() if optim.START in k}
        lines += alarms.watch(job.config.alarms.start, 1)(first or values)
    for line in lines:
        best = evaluate.best(job.run_dir)
        kept = "" if best is None else f"; the best evaluation was at step {best}"
        if action == "stop" and not last:
            raise alarms.Collapsed(f"step {step}: {line}{kept}")
        writer.say(f"alarm at step {step}: {line}{kept}")


def _finish(job: _Job, state: states.State, started: float) -> None:
    """After the last step: evaluate, export the adapters, write summary and report, say where
    they are."""
    step = int(state.step)
    times: dict[str, float] = {}
    with metrics.phase(times, "eval"):
        evaluate.run(job.evaluation, state, step)
    if job.setup.training.lora.rank:
        note = {"step": step, "wanjax.sampler": json.dumps(sampling.note(job.setup.sampling))}
        policy = states.rollout_params(state, job.algorithm.EVALUATED)
        adapters = {expert: tree for expert, (_, tree) in policy.items() if tree}
        start = list(job.config.lora.start)
        files = export.write_adapters(adapters, note, start, job.run_dir / "export")
        if files:
            print("adapters " + "  ".join(str(file) for file in files), flush=True)
    if jax.process_index() != 0:
        return
    summary = evaluate.write_summary(
        job.evaluation, step, seconds=time.time() - started, evaluated=times["time/eval"]
    )
    report.write_report([job.run_dir], job.run_dir / "report.html")
    for line in (*evaluate.describe(summary), f"report   {summary['report']}"):
        print(line, flush=True)


def _schedule_table(run: settings.Setup, algorithm: Algorithm) -> str:
    """The step table; a sampler with fresh noise is stochastic at every step."""
    plan = run.sampling
    steps = range(plan.schedule.steps) if plan.solver == "renoise" else ()
    steps = steps or getattr(algorithm, "sde_steps", lambda run, epoch: ())(run, 0)
    return schedule.describe(plan.schedule, dataclasses.asdict(plan.guidance), steps)


def _banner(config, run: settings.Setup, algorithm: Algorithm, state, mesh) -> str:
    plan, shape = run.sampling, sampling.latent_shape(run.model, run.sampling)
    return "\n".join(
        [
            f"mesh     {dict(mesh.shape)}, {wan.describe(run.model.wan, dict(mesh.shape))}",
            f"video    {plan.frames} frames of {plan.height}x{plan.width}, latents {shape}",
            f"step     {algorithm.describe(run)}; {config.steps} steps",
            states.describe(state, run.training, run.roles),
            _schedule_table(run, algorithm),
        ]
    )


def _facts(config, run: settings.Setup, state: states.State, mesh) -> dict:
    """What the report says about the run beside its config."""
    sizes = {expert: trees.count(tree) for expert, tree in state.params["student"].items()}
    trained = {e: trees.count(tree) for e, tree in states.trainable(state, run.training).items()}
    return {
        "model": {
            "path": config.model.path,
            "name": run.model.name,
            **{f"parameters {e}": f"{n:,}" for e, n in sizes.items()},
            **{f"trained {e}": f"{n:,}" for e, n in trained.items()},
        },
        "mesh": dict(mesh.shape),
        "environment": metrics.environment(),
    }


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


_COORDINATOR = flags.DEFINE_string("coordinator", "", "host:port of process 0, or auto")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "processes of the run")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this is, from 0")
_LOCAL_DEVICES = flags.DEFINE_string("local_devices", "", "GPUs of this process, as 0,1; all")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "check config, model and shapes, then stop")


def _command_line() -> None:
    logging.set_verbosity(logging.WARNING)  # the libraries' own chatter hides the progress line
    config = setup.CONFIG.value
    runtime.set_flags(config.model.remat, config.mesh.to_dict())
    place = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _LOCAL_DEVICES.value)
    try:
        distributed.start(*place)
        if jax.default_backend() != "cpu":
            runtime.use_compile_cache(config.compile_cache, config.workdir)
        main(config, _DRY_RUN.value)
    except (
        ValueError, FloatingPointError, rewards.RewardError, alarms.Collapsed, checkpoint.NotSaved,
    ) as error:  # fmt: skip
        if command.DEBUG.value:
            raise
        distributed.leave(1, f"wanjax.train: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"wanjax.train: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    console.steady()
    command.parse("wanjax.train", __doc__ or "", ("config",))
    _command_line()
