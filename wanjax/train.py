"""Train: config -> mesh -> model -> algorithm -> loop, resuming by itself.

    python -m wanjax.train --config configs/quickstart.py
    python -m wanjax.train --config configs/grpo_wan22.py:small --dry_run \\
        --config.model.path=wan2.2_t2v_a14b     # a preset's name: no weights needed

The loop is: prompts or clips of the step -> collect (rollout, decode, reward, advantage; clips as
they are) -> update -> metrics -> checkpoint. A run lives in runs/<name>/ and continues from its
last good checkpoint when it is started again; interrupted anywhere, it ends with the same bits as
one that was not.
"""

import dataclasses
import difflib
import fnmatch
import functools
import json
import math
import pathlib
import re
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
from wanjax import optim, report, rewards, sample, sampler, schedule, trees
from wanjax import state as states
from wanjax.algorithms import dmd2, grpo, nft, sft
from wanjax.data import latents, text, video
from wanjax.data import prompts as prompt_files
from wanjax.models import blocks, condition, presets, quant, wan
from wanjax.parallel import distributed, sharding
from wanjax.rewards import shapes
from wanjax.run import alarms, checkpoint, metrics

ALGORITHMS = {"grpo": grpo, "nft": nft, "sft": sft, "dmd2": dmd2}
_WORDS = {  # that the keys of these patterns take
    "algorithm": ALGORITHMS, "alarms.action": alarms.ACTIONS, "wandb": metrics.WANDB,
    "reward_failure": rewards.FAILURE, "guidance.mode": sampler.GUIDANCE_MODES,
    "model.remat": blocks.REMAT, "model.dtype": sample.DTYPES,
    "*.param_dtype": (*sample.DTYPES, *quant.DTYPES),
}  # fmt: skip
_HOLDS = {  # the rules of default.NUMBERS; nothing holds for nan
    "at least 1": lambda x: x >= 1,
    "at least 0": lambda x: x >= 0,
    "above 0": lambda x: x > 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
}


def main(config, dry_run: bool = False) -> pathlib.Path:
    """Run the whole job of a ConfigDict; returns the run folder. Raises ValueError before
    compiling."""
    started = time.time()
    check(config.to_dict())
    run_dir = pathlib.Path(config.workdir) / config.name
    algorithm = ALGORITHMS[config.algorithm]
    # what a step trains on; else prompts
    clips = algorithm.DATA == "latents" or algorithm.DATA == "either" and bool(config.data.path)
    train_prompts, eval_prompts, source = distributed.everywhere(
        lambda: (
            () if clips else _prompts(config.prompts),
            _prompts(config.eval.prompts),
            _clips(config) if clips and not (dry_run and not config.data.path) else None,
        )
    )
    alarms.watch(config.alarms.limits, config.alarms.patience)
    alarms.watch(config.alarms.start, 1)
    if config.lora.start and not config.lora.rank:
        raise ValueError(
            "config.lora.start names adapters but config.lora.rank is 0; set the rank they were "
            "trained with, or start from a folder that convert.weights --lora merged them into"
        )
    reward = None
    if config.reward:  # missing packages and folders show here
        make = lambda: rewards.combine(config.reward, config.reward_deadline)
        reward = distributed.everywhere(make)
    facts = {"prompts": train_prompts, "eval.prompts": eval_prompts}
    facts = {name: distributed.fingerprint(texts) for name, texts in facts.items()}
    facts["data"] = source.digest if source else ""
    distributed.agree({"config": config.to_dict(), **facts})
    abstract = dry_run and config.model.path in presets.MODELS  # shapes instead of weights
    mesh = _mesh(config, abstract)
    stream: Any = None
    if not clips:
        stream = prompt_files.PromptStream(train_prompts, config.prompts_per_step, config.seed)

    print(f"model    {config.model.path}", flush=True)
    load = _shapes if abstract else sample.load_model
    start = [(list(config.lora.start), None, 1.0)] if config.lora.start and not abstract else []
    params, model = load(**dict(config.model), mesh=mesh, adapters=start)
    roles, role_models = _load_roles(config, model, mesh, load)
    setup = make_setup(config, model, role_models)
    algorithm.check(setup)
    eval_setup = _evaluation_setup(config, setup)
    _check_mesh(setup, mesh, algorithm)
    if source:
        stream = _latent_stream(config, source, params, model)
    with sharding.use_mesh(mesh):
        student = {e: params[e] for e in model.experts}
        init = functools.partial(algorithm.init, jax.random.key(config.seed), setup)
        run = functools.partial(jax.eval_shape, init) if abstract else init
        state = run({"student": student, **roles})
        if config.lora.start and not abstract:
            begun = convert_lora.load(list(config.lora.start), model, dense_merged=True)
            state = states.start_from(state, setup, jax.tree.map(jnp.asarray, begun))
        state = _placed(state, mesh) if abstract else states.place(state, mesh)
        sampling = setup.sampling
        table = schedule.describe(
            sampling.schedule, dataclasses.asdict(sampling.guidance),
            range(sampling.schedule.steps) if sampling.solver == "renoise"
            else algorithm.sde_steps(setup, 0),
        )  # fmt: skip
        banner = _banner(config, setup, state, mesh, table)
        if source:
            banner += "\n" + stream.describe()
        print(banner, flush=True)
        if dry_run:
            print("dry run: config, model and shapes fit; nothing was written", flush=True)
            return run_dir
        checkpoint.claim(run_dir, config.to_dict(), config.resume, default.get_config().to_dict())
        if jax.process_index() == 0:
            (run_dir / "schedule.txt").write_text(table + "\n", encoding="utf-8")
            checkpoint.write_json(run_dir / "facts.json", _facts(config, setup, state, mesh))
            checkpoint.write_json(run_dir / "sampler.json", sample.sampler_note(setup))
        state = _restore(run_dir, state, setup, stream)
        negative = config.negative_prompt
        negative = model.sampling.negative_prompt if negative == "default" else negative
        encode = sample.make_encoder(model, params, [negative, *train_prompts, *eval_prompts])
        uncond_1SE = jnp.asarray(encode([negative]))
        tools = states.Tools(params["vae"], uncond_1SE, reward)
        of_texts = lambda texts: states.Item(texts, encode(texts))
        shown = config.eval.number if config.reward else config.eval.samples
        chosen, preview = list(eval_prompts[:shown]), None
        if chosen:
            preview = of_texts(chosen)
        elif source:
            preview = stream.preview(shown, states.latent_shape(setup))
        job = _Job(
            config, setup, eval_setup, run_dir, tools, preview, algorithm.EVALUATED,
            item=stream.at if source else lambda step: of_texts(stream.at(step)),
            validate=_validation(algorithm, setup, stream, tools)
            if algorithm.DATA == "latents" else None,
        )  # fmt: skip
        state = _loop(job, algorithm, state, stream)
        _finish(job, state, started)
    return run_dir


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    """What the loop and its reports share."""

    config: Any
    setup: states.Setup
    eval_setup: states.Setup  # samples as config.eval says
    run_dir: pathlib.Path
    tools: states.Tools
    preview: states.Item | None  # what evaluation makes videos of
    evaluated: str  # policy that is evaluated and exported
    item: Callable  # step -> states.Item
    validate: Callable | None  # state -> {name: mean over held-out clips}


def _loop(job: _Job, algorithm, state, stream):
    """The training loop: the visible order of work."""
    config, setup, first = job.config, job.setup, int(state.step)
    trackers = metrics.make_trackers(
        job.run_dir, config.to_dict(), start=first,
        wandb=config.wandb, project=config.project, tensorboard=config.tensorboard,
    )  # fmt: skip
    writer = metrics.MetricsWriter(job.run_dir, total=config.steps, start=first, trackers=trackers)
    look = alarms.watch(config.alarms.limits, config.alarms.patience)
    saved, previous, save_times = first, None, {}
    try:
        for step in range(first, config.steps):
            times: dict[str, float] = {}
            if step == 0 or _due(config.eval_every, step) or _due(config.sample_every, step):
                with metrics.phase(times, "eval"):
                    _evaluate(job, state, step, writer)
            with metrics.phase(times, "data"):  # text encoding, or reading latents
                item = job.item(step)
            with metrics.phase(times, "collect"):  # rollout, decode and reward overlap
                batch = algorithm.collect(state, setup, item, job.tools)
            with metrics.phase(times, "update"):
                state, values = algorithm.update(state, setup, batch)
                jax.block_until_ready(state.step)
            times |= metrics.speed(_flops(algorithm, setup, item), times)
            _check_finite(previous, saved)
            _sound(job, previous, look, writer)
            previous = (step, {**batch.metrics, **values})
            writer.write(step, {**batch.metrics, **values, **times, **save_times})
            save_times = {}
            stop = distributed.preempted(step) and step + 1 < config.steps
            if stop or step + 1 == config.steps or _due(config.save_every, step + 1):
                _check_finite(previous, saved)
                writer.flush()  # before the checkpoint: a kill in between must not lose lines
                with metrics.phase(save_times, "checkpoint"):  # told with the next step
                    kept = {"data": stream.state(step + 1)}
                    checkpoint.save(job.run_dir, step + 1, states.saved(state, setup), kept)
                    best = _best(job.run_dir)
                    checkpoint.prune(job.run_dir, config.keep_last, config.keep_every, best)
                saved = step + 1
            if stop:
                raise distributed.NeedsRestart(f"asked to stop; checkpoint {saved} is kept")
        _sound(job, previous, look, writer, last=True)
    except KeyboardInterrupt:
        writer.say(
            f"stopped; checkpoint {saved} of {config.steps} is kept, "
            "the same command continues from it"
        )
        raise
    finally:
        writer.close()
    return state


def _flops(algorithm, setup, item: states.Item) -> dict[str, float]:
    """Model FLOPs of a step by phase."""
    clips = item.x0_PTHWC
    grid = states.token_grid(setup, None if clips is None else clips.shape[1:])
    one = wan.forward_flops(setup.model.wan, grid)
    return {name: one * count for name, count in algorithm.forwards(setup).items()}


def _evaluate(job: _Job, state, step: int, writer=None) -> None:
    """Make, score and write videos of fixed prompts from fixed noise, measure held-out clips, and
    write evals/step.json once."""
    if not (job.preview or job.validate):
        return
    config = job.config
    path = job.run_dir / "evals" / f"step_{step:06d}.json"
    done = multihost_utils.broadcast_one_to_all(np.array(path.exists()))  # one answer for all
    if done:  # before the run was interrupted
        if writer:
            writer.write(step, json.loads(path.read_text(encoding="utf-8")))
        return
    result, films = (job.validate(state) if job.validate else {}), []
    videos, scores = _previews(job, job.preview, state) if job.preview else ((), {})
    result |= {f"eval/{name}": float(np.nanmean(values)) for name, values in scores.items()}
    if jax.process_index() != 0:
        return
    line = f"eval at step {step}: {_in_words(result)}"
    if job.preview:
        shown, texts = videos[: config.eval.samples], job.preview.texts
        names = {name: name.split("/")[-1] for name in scores}
        rows = [{names[n]: float(v[i]) for n, v in scores.items()} for i in range(len(shown))]
        folder = video.write_samples(
            job.run_dir, step, shown, texts[: len(shown)], job.setup.model.sampling.fps,
            rows if scores else None,
        )  # fmt: skip
        films = [(f"samples/{i}", folder / f"{i:03d}.mp4", texts[i]) for i in range(len(shown))]
        line += f" on {len(texts)} prompts, videos in {folder}"
    checkpoint.write_json(path, result)
    (writer.say if writer else print)(line)
    if writer:
        writer.write(step, result)
        for film in films:
            writer.video(step, *film)


def _previews(job: _Job, item: states.Item, state):
    """(videos of the fixed prompts, {score: value of each}); no scores without a reward."""
    config, policy = job.config, states.rollout_params(state, job.evaluated)
    ctx_PSE, uncond_1SE = text.align(item.ctx_PSE, job.tools.uncond_1SE)
    videos = sample.generate(
        job.eval_setup, policy, job.tools.vae, ctx_PSE, uncond_1SE,
        seed=config.eval.seed, cond=item.cond,
    )  # fmt: skip
    if not job.tools.reward:
        return videos, {}
    scores, info = rewards.run(
        [videos], item.texts, job.tools.reward, config.reward, failure=config.reward_failure
    )
    total = np.sum([config.reward[name] * scores[name] for name in scores], axis=0)
    return videos, {"reward": total, **info}


def _in_words(result: dict) -> str:
    """The main values of an evaluation: losses of held-out clips, reward, success."""
    losses = [n.removeprefix("eval/") for n in result if n.startswith("eval/loss/")]
    parts = [f"{name} {result[f'eval/{name}']:.4g}" for name in losses]
    if "eval/reward" in result:
        parts.append(f"reward {result['eval/reward']:.3f}")
    if "eval/success" in result:
        parts.append(f"success {result['eval/success']:.1%}")
    return ", ".join(parts) or "no scores"


def _validation(algorithm, setup, stream, tools) -> Callable:
    """A function state -> {name: mean over the held-out clips}."""

    def run(state):
        found: dict[str, list] = {}
        for item, count in stream.heldout():
            for name, value_P in algorithm.validate(state, setup, item, tools).items():
                found.setdefault(name, []).append(value_P[:count])
        return {name: float(np.concatenate(parts).mean()) for name, parts in found.items()}

    return run


def _finish(job: _Job, state, started: float) -> None:
    """After the last step: evaluate, export the adapters, write summary and report, say where
    they are."""
    step = int(state.step)
    times: dict[str, float] = {}
    with metrics.phase(times, "eval"):
        _evaluate(job, state, step)
    if job.setup.lora.rank:
        note = {"step": step, "wanjax.sampler": json.dumps(sample.sampler_note(job.setup))}
        policy = states.rollout_params(state, job.evaluated)
        adapters = {e: jax.tree.map(sharding.fetch, tree) for e, (_, tree) in policy.items()
                    if tree}  # fmt: skip
        adapter = convert_lora.of_trees(adapters, note)
        adapter = convert_lora.with_start(adapter, job.config.lora.start)
        files = convert_lora.write(adapter, job.run_dir / "export")
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
            losses = [v for name, v in result.items() if name.startswith("eval/loss/")]
            if losses:  # of held-out clips, mean over the experts
                summary[f"loss_{when}"] = sum(losses) / len(losses)
    if job.preview and job.tools.reward:
        summary["eval_prompts"] = len(job.preview.texts)
    checkpoint.write_json(job.run_dir / "summary.json", summary)
    report.write_report([job.run_dir], page)
    for name in ("reward", "success", "loss"):
        if f"{name}_after" in summary:
            before, after = summary[f"{name}_before"], summary[f"{name}_after"]
            on = "held-out clips" if name == "loss" else f"{summary['eval_prompts']} prompts"
            print(f"{name:8} {before:.3f} -> {after:.3f} on {on}", flush=True)
    print(f"report   {page}", flush=True)


def _mesh(config, abstract: bool):
    """The mesh of the config; for shapes alone, of as many devices as its sizes name."""
    sizes = dict(config.mesh)
    named = math.prod(size for size in sizes.values() if size > 0)
    return sharding.make_mesh(sizes, jax.devices()[:named] if abstract else None)


def _shapes(path, *, param_dtype, mesh, experts_only=False, adapters=(), offload=False, **run):
    """What sample.load_model gives, with shapes for weights, of a model by its preset's name."""
    if path not in presets.MODELS:
        raise ValueError(f"model {path!r} has no shapes here; expected one of {[*presets.MODELS]}")
    model = presets.MODELS[path]
    model = dataclasses.replace(model, wan=dataclasses.replace(model.wan, **run))
    make = lambda: wan.store(wan.init(jax.random.key(0), model.wan), param_dtype)
    return {expert: jax.eval_shape(make) for expert in model.experts}, model


def _placed(state, mesh):
    """Shapes with the shardings that a run gives."""
    at = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return jax.tree.map(at, state, states.shardings(state, mesh))


def _check_mesh(setup, mesh, algorithm) -> None:
    """Raise ValueError when a batch that occurs cannot run on the mesh."""
    tokens = math.prod(states.token_grid(setup))
    micro, share = setup.algorithm.micro_samples, algorithm.share(setup)
    for size in sorted({setup.sampling.batch, min(micro, share), share % micro} - {0}):
        wan.check_mesh(setup.model.wan, dict(mesh.shape), size, tokens)


def _load_roles(config, model: presets.ModelConfig, mesh, load) -> tuple[dict, dict]:
    """(weights {role: {expert: tree}}, {role: ModelConfig}) of the roles beside the student.

    A role without a path has the student's model and no weights of its own; equal paths are loaded
    once.
    """
    loaded, weights, models = {}, {}, {}
    for role in ALGORITHMS[config.algorithm].ROLES:
        own = config.roles[role]
        source = (own.path, own.param_dtype)
        if own.path and source not in loaded:
            print(f"{role:8} {own.path}", flush=True)
            run = {**config.model.to_dict(), "path": own.path, "param_dtype": own.param_dtype}
            loaded[source] = load(**run, mesh=mesh, experts_only=True)
        if own.path:
            weights[role], models[role] = loaded[source]
        else:
            models[role] = model
    return weights, models


def make_setup(config, model: presets.ModelConfig, roles: dict) -> states.Setup:
    """The frozen Setup of a checked config; raises ValueError naming the key to change.

    roles: ModelConfig of each role beside the student, of which the critic is trained.
    """
    for expert in config.experts:
        if expert not in model.experts:
            raise ValueError(
                f"config.experts names {expert!r} but the model has {model.experts}; "
                "set config.experts to some of those"
            )
    if not config.lora.rank and config.model.param_dtype in quant.DTYPES:
        raise ValueError(
            f"config.model.param_dtype {config.model.param_dtype!r} is for frozen weights; set "
            "config.lora.rank above 0, or param_dtype to float32"
        )
    algorithm = ALGORITHMS[config.algorithm]
    if config.model.offload and (not config.lora.rank or algorithm.ROLES):
        found = f"algorithm {config.algorithm!r}, whose roles share them"
        raise ValueError(
            "config.model.offload keeps frozen experts in host memory, but found "
            + (found if config.lora.rank else "lora.rank 0")
            + "; set it to False"
        )
    sde = config.sde.to_dict()
    kind, eta = sde.pop("kind"), sde.pop("eta")
    for name in ("range", "candidates", "decay"):  # empty: the strategy's own default
        sde[name] = sde[name] or None
    strategy = schedule.Strategy(sde.pop("strategy"), **sde)
    role_optim = {}
    if "critic" in roles:
        whole = roles["critic"].experts
        critics = config.experts if whole == model.experts else whole
        own = config.roles.critic.optim
        role_optim = {"critic": {e: optim.OptimConfig(**own[e].to_dict()) for e in critics}}
    return states.Setup(
        model=model,
        sampling=_sampling(config.sampling, config.guidance, model),
        sde=states.SdeConfig(strategy, kind, eta),
        lora=states.LoraConfig(config.lora.rank, config.lora.alpha, tuple(config.lora.targets)),
        experts=tuple(config.experts),
        optim={e: optim.OptimConfig(**config.optim[e].to_dict()) for e in config.experts},
        seed=config.seed,
        algorithm=algorithm.make_config(config, roles),
        rewards={name: weight for name, weight in config.reward.items()},
        reward_failure=config.reward_failure,
        steps=config.steps,
        roles=roles,
        role_optim=role_optim,
    )


def _sampling(plan, guidance, model: presets.ModelConfig) -> states.SamplingConfig:
    """The sampler of config.sampling and config.guidance; what they leave open is the model's."""
    scale = lambda expert: guidance[expert] or getattr(model.sampling.guidance, expert)
    levels, solvers = tuple(plan["sigmas"]) or None, (*sampler.SOLVERS, "renoise")
    if plan["solver"] not in solvers:
        raise ValueError(
            f"the solver is {plan['solver']!r}; set config.sampling.solver, or config.eval.solver, "
            f"to one of {', '.join(solvers)}"
        )
    return states.SamplingConfig(
        schedule=schedule.make_schedule(
            plan["grid"],
            len(levels or ()) or plan["steps"],
            plan["shift"] or model.sampling.shift,
            model.boundary,
            levels,
        ),  # fmt: skip
        guidance=presets.Guidance(scale("high"), scale("low")),
        guidance_mode=guidance["mode"],
        **{key: plan[key] for key in ("height", "width", "frames", "solver", "batch", "vae_tile")},
    )


def _evaluation_setup(config, setup: states.Setup) -> states.Setup:
    """The setup with the sampler that config.eval asks for; the run's own where it asks nothing."""
    own = {key: config.eval[key] for key in ("steps", "grid", "solver") if config.eval[key]}
    scales = {e: scale for e, scale in config.eval.guidance.items() if scale}
    if not own and not scales:
        return setup
    plan, guidance = config.sampling.to_dict() | own, config.guidance.to_dict() | scales
    plan["sigmas"] = () if {"steps", "grid"} & own.keys() else plan["sigmas"]
    try:
        return dataclasses.replace(setup, sampling=_sampling(plan, guidance, setup.model))
    except ValueError as error:
        asked = ", ".join(f"{key} {value!r}" for key, value in own.items())
        raise ValueError(f"config.eval with its own {asked}: {error}") from None


def check(config: dict) -> None:
    """Raise ValueError for unknown keys, words that a key does not take and numbers outside its
    range; what depends on the model or on several keys is checked where it is used."""
    check_keys(config, default.get_config().to_dict())
    values = {path.replace("/", "."): x for path, x in trees.flatten(config).items()}
    for pattern, words in _WORDS.items():
        for key in fnmatch.filter(values, pattern):
            if values[key] not in words:
                raise ValueError(f"config.{key} is {values[key]!r}; expected one of {(*words,)}")
    for expected, patterns in default.NUMBERS.items():
        for key in (key for pattern in patterns for key in fnmatch.filter(values, pattern)):
            if not _HOLDS[expected](values[key]):
                raise ValueError(f"config.{key} is {values[key]}; expected {expected}")
    if not config["name"]:
        raise ValueError("config.name is empty; expected the name of the run's folder")
    experts = config["experts"]
    if not experts or len(set(experts)) < len(experts):
        raise ValueError(f"config.experts is {experts}; expected high, low, or both, each once")
    if config["lora"]["rank"] and not config["lora"]["targets"]:
        raise ValueError("config.lora.targets is empty; expected patterns of layers to adapt")


def check_keys(config: dict, known: dict, where: str = "config") -> None:
    """Raise ValueError for a key that no default has, with the nearest one."""
    for key, value in config.items():
        if where in ("config.reward", "config.alarms.limits", "config.alarms.start"):
            continue  # free: names and import paths, or metrics
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"; did you mean {where}.{near[0]}?" if near else f"; {where} has {sorted(known)}"
            )
            raise ValueError(f"{where}.{key} is unknown{hint}")
        if isinstance(known[key], dict):
            check_keys(value, known[key], f"{where}.{key}")


def _prompts(source: str) -> tuple[str, ...]:
    """Prompts of a file, or in a fixed random order of the embedded grammar as
    shapes:<train|heldout>:<1|2>, or one of n equal parts of them with :<part>/<n>; () for ""."""
    if not source:
        return ()
    if source.startswith("shapes:"):
        found = re.fullmatch(r"shapes:(train|heldout):([12])(?::(\d+)/([1-9]\d*))?", source)
        if found is None or found[3] and int(found[3]) >= int(found[4]):
            raise ValueError(
                f"prompts {source!r} are unknown; expected a file, shapes:train:2, or one part of "
                "two as shapes:heldout:1:0/2"
            )
        split, count, part, parts = found[1], int(found[2]), int(found[3] or 0), int(found[4] or 1)
        everything = shapes.prompts(split, count, len(shapes.specs(split, count)), seed=0)
        return tuple(everything[part::parts])
    return prompt_files.load_prompts(source)


def _clips(config) -> latents.Source:
    if not config.data.path:
        raise ValueError(
            "config.data.path is empty; set it to a folder that python -m wanjax.data cache wrote"
        )
    return latents.read(config.data.path)


def _latent_stream(config, source, params, model) -> latents.LatentStream:
    """The stream of clips; raises ValueError where data, model and config do not fit."""
    if config.eval.prompts and condition.kind(model) == "latents":
        raise ValueError(
            f"config.eval.prompts has no first frames, which model {model.name} needs; set it to "
            "'' to sample from clips"
        )
    data = config.data
    stream = latents.LatentStream(
        source, data.batch, config.seed, data.holdout, model, data.first_frame
    )
    latents.check_encoders(source, params)
    return stream


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


def _sound(job: _Job, previous, look: Callable, writer, last: bool = False) -> None:
    """Tell, or stop for, the alarms that the step before rings; after the last, nothing is left to
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
        best = _best(job.run_dir)
        kept = "" if best is None else f"; the best evaluation was at step {best}"
        if action == "stop" and not last:
            raise alarms.Collapsed(f"step {step}: {line}{kept}")
        writer.say(f"alarm at step {step}: {line}{kept}")


def _best(run_dir) -> int | None:
    """The step with the highest reward in an evaluation."""
    found = {}
    for path in sorted((run_dir / "evals").glob("step_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "eval/reward" in result:
            found[int(path.stem.removeprefix("step_"))] = result["eval/reward"]
    return max(found, key=found.__getitem__) if found else None


def _banner(config, setup, state, mesh, table) -> str:
    a, s, model = setup.algorithm, setup.sampling, setup.model.wan
    samples = a.group_size * a.prompts_per_step
    return "\n".join(
        [
            f"mesh     {dict(mesh.shape)}, {wan.describe(model, dict(mesh.shape))}",
            f"video    {s.frames} frames of {s.height}x{s.width}, "
            f"latents {states.latent_shape(setup)}",
            f"step     {a.prompts_per_step} items x {a.group_size} = {samples} samples, "
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


_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:preset]")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "host:port of process 0, or auto")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "processes of the run")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "which of them this is, from 0")
_LOCAL_DEVICES = flags.DEFINE_string("local_devices", "", "GPUs of this process, as 0,1; all")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "check config, model and shapes, then stop")


def _command_line(argv) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)  # the libraries' own chatter hides the progress line
    config = _CONFIG.value
    blocks.set_xla_flags(config.model.remat, config.mesh.stage)
    place = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _LOCAL_DEVICES.value)
    try:
        distributed.start(*place)
        if config.compile_cache and jax.default_backend() != "cpu":
            cache = pathlib.Path(config.compile_cache).expanduser()
            jax.config.update("jax_compilation_cache_dir", str(cache))
        main(config, _DRY_RUN.value)
    except (ValueError, FloatingPointError, rewards.RewardError, alarms.Collapsed) as error:
        distributed.leave(1, f"wanjax.train: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"wanjax.train: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(_command_line)
