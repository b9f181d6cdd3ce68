"""DMD2 distillation (2405.14867) of one or two experts into a few-step student; see losses.dmd2.

The student's steps are the run's schedule. An expert of the student owns its steps of it and ends
at the level σ_s where the next expert begins, 0 for the last one (and for students that sample with
fresh noise, whose clip at σ_s is a noised x0 anyhow). Experts are distilled one after the other
(config.experts names one, the other is frozen) or together (Phased DMD, 2510.27684).

collect, per expert and pass (student, critic): an exit step i is drawn among the expert's steps,
and clips are taken down to σ_i without gradient, from noise (simulate) or by noising real latents
(data_latent); for the critic's pass also from σ_i to σ_s.
update: the student's one call at σ_i predicts x0, which is noised by way of x_s to a level at which
critic and guided teacher are compared; the critic learns velocities of the student's clips. The
student moves at every `student_every`-th step, the critic at every step, `ema` with the student.
The first `warm_steps` steps instead regress the student on x_s of the teacher's own ODE from the
same x_i (Self-Forcing, 2506.08009), and leave the critic alone.

gan_weight or a divergence other than rkl adds a GAN head on the critic's blocks (see
models.discriminator): it learns in the critic's pass to tell the student's clips from real ones,
which the data must then give; the student's pass pulls towards its "real", and a divergence weighs
samples by the density ratio that it implies. Head and critic are trained as one tree.

Exit steps and score regions are drawn on the host from (seed, step, expert, pass); levels and noise
of a sample are functions of the same and its number.

Shapes: P prompts, K group, B samples (P·K), n micro-batches of M samples.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampler, sampling, schedule, trees
from wanjax import state as states
from wanjax.algorithms import Program, Tools, distill, phases, steps
from wanjax.data import Item, text
from wanjax.losses import dmd2, flow
from wanjax.models import condition, discriminator, wan
from wanjax.parallel import distributed, sharding
from wanjax.settings import Setup

DATA = "either"  # prompts, or clips where the config names some
ROLES = ("teacher", "critic")  # beside the student
EVALUATED = "ema"
ROLLOUTS = ("simulate", "data_latent")
SOLVERS = ("euler", "renoise")  # ODE and SDE form of the few-step sampler
RATIO_BINS, RATIO_DECAY = 10, 0.99  # of the density ratios' running mean over time


@dataclass(frozen=True, eq=False)
class Batch:
    """What collect hands to update: pass -> expert -> latents [B, ...] by name."""

    latents: dict
    ctx_PSE: jax.Array
    uncond_1SE: jax.Array
    cond: Any  # {name: [P, ...]} or None
    version: int
    metrics: dict


def make_config(config, roles: dict) -> distill.Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    if config.updates != 1:
        raise ValueError(f"config.updates is {config.updates}; DMD2 takes one a step, set it to 1")
    own, usual = config.dmd2.to_dict(), roles["teacher"].sampling.guidance
    own["guidance"] = {e: w or getattr(usual, e) for e, w in own["guidance"].items()}
    items = config.data.batch if config.data.path else config.prompts_per_step
    return distill.Config(
        items=items, group_size=config.group_size, micro_samples=config.micro_samples, **own
    )


def check(setup: Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: distill.Config = setup.algorithm
    guidance = {getattr(setup.sampling.guidance, expert) for expert in setup.model.experts}
    if guidance != {1.0}:
        raise ValueError(
            f"a few-step student runs without guidance but config.guidance is {sorted(guidance)}; "
            "set config.guidance.high and low to 1 (the teacher's is config.dmd2.guidance)"
        )
    if setup.sampling.solver not in SOLVERS:
        raise ValueError(
            f"config.sampling.solver is {setup.sampling.solver!r}; DMD2 needs one of {SOLVERS}"
        )
    if config.rollout not in ROLLOUTS:
        raise ValueError(f"config.dmd2.rollout is {config.rollout!r}; expected one of {ROLLOUTS}")
    if not 0 < config.t_lo < config.t_hi < 1000:
        raise ValueError(
            f"config.dmd2.t_lo and t_hi are {config.t_lo}, {config.t_hi}; expected 0 < t_lo < t_hi "
            "< 1000"
        )
    if config.divergence not in dmd2.F_WEIGHTS:
        raise ValueError(
            f"config.dmd2.divergence is {config.divergence!r}; expected one of {[*dmd2.F_WEIGHTS]}"
        )
    if config.samples % setup.sampling.batch:
        raise ValueError(
            f"{config.samples} samples a step do not divide into parts of config.sampling.batch = "
            f"{setup.sampling.batch}; set it to a divisor of {config.samples}"
        )
    for expert in setup.experts:
        if not phases.phase(setup, expert).steps:
            raise ValueError(
                f"expert {expert} has none of the {setup.sampling.schedule.steps} steps; change "
                "config.sampling.sigmas or shift, or leave it out of config.experts"
            )
        for region in phases.regions(setup, expert):
            if region.critic not in setup.training.optim["critic"]:
                raise ValueError(
                    f"expert {expert} is scored where the critic's expert {region.critic} serves, "
                    "which is not trained; give both experts steps by config.sampling.sigmas"
                )
    for role, model in setup.roles.items():
        ours = setup.model.wan.out_channels, setup.model.wan.text_dim, setup.model.vae
        if ours != (model.wan.out_channels, model.wan.text_dim, model.vae):
            raise ValueError(
                f"the {role} {model.name} has other latents or text rows than the student "
                f"{setup.model.name}; set config.roles.{role}.path to a model of the same VAE"
            )


def batches(setup: Setup) -> set[int]:
    """Sizes of the micro-batches of an update."""
    (*parts,) = optim.parts(np.arange(setup.algorithm.samples), setup.algorithm.micro_samples)
    return {ids.shape[1] for (ids,) in parts}


def describe(setup: Setup) -> str:
    """What one step works on."""
    config: distill.Config = setup.algorithm
    return (
        f"{config.items} items x {config.group_size} = {config.samples} samples, "
        f"one student update every {config.student_every} steps"
    )


def init(key, setup: Setup, params: dict) -> states.State:
    """State at step 0: critic and teacher are the weights given, or the student's."""
    state = states.init(key, setup.training, params["student"], keep_reference=False)
    for number, role in enumerate(ROLES):
        role_key = jax.random.fold_in(key, 100 + number)
        state = states.with_role(role_key, state, setup.training, role, params.get(role))
    if setup.algorithm.adversarial:
        stages = sharding.mesh_shape().get("stage", 1)
        if stages > 1:
            raise ValueError(
                f"a GAN head reads single blocks of the critic, mesh.stage = {stages} splits them; "
                "set config.mesh.stage to 1, or dmd2.gan_weight = 0 and divergence = 'rkl'"
            )
        state = _with_heads(jax.random.fold_in(key, 200), state, setup)
    copy = jax.tree.map(jnp.copy, states.trainable(state, setup.training))
    return states.average(state, "ema", copy)


def _with_heads(key, state: states.State, setup: Setup) -> states.State:
    """State with a GAN head for every expert of the critic."""
    model = setup.roles.get("critic", setup.model)
    for expert, tree in states.trainable(state, setup.training, "critic").items():
        head = discriminator.init(jax.random.fold_in(key, phases.number(expert)), model.wan)
        tree = {**tree, distill.HEAD: head}
        opt = optim.make(setup.training.optim["critic"][expert]).init(tree)
        state = states.replace_trainable(state, setup.training, {expert: tree}, "critic")
        state = states.replace_optimizers(state, {expert: opt}, "critic")
    return state.replace(running={e: jnp.ones(RATIO_BINS) for e in model.experts})


def collect(state, setup, item: Item, tools: Tools) -> Batch:
    """Clips of every trained expert and pass of this step; returns a Batch."""
    config: distill.Config = setup.algorithm
    if config.rollout == "data_latent" and item.x0_PTHWC is None:
        raise ValueError(
            "config.dmd2.rollout is 'data_latent' but the data are texts alone; set "
            "config.data.path to cached clips, or config.dmd2.rollout to 'simulate'"
        )
    if config.adversarial and item.x0_PTHWC is None:
        raise ValueError(
            "config.dmd2.gan_weight or divergence asks for a GAN head but the data are texts "
            "alone; set config.data.path to cached clips, or gan_weight = 0 and divergence = 'rkl'"
        )
    step, reads_clips = int(state.step), config.adversarial or config.rollout == "data_latent"
    ctx_PSE, uncond_1SE = text.align(item.ctx_PSE, tools.uncond_1SE)
    rows = {"ctx": ctx_PSE, "cond": item.cond, "x0": item.x0_PTHWC if reads_clips else None}
    latents, metrics = {}, {}
    for name in _passes(setup, step):
        latents[name] = {}
        for expert in setup.experts:
            exit_step, _ = phases.draw(setup, step, expert, name)
            latents[name][expert] = _clips(
                state, setup, rows, uncond_1SE, step, expert, name, exit_step
            )
            metrics[f"{name}/exit/{expert}"] = float(exit_step)
    return Batch(latents, ctx_PSE, uncond_1SE, item.cond, step, metrics)


def update(state, setup, batch: Batch):
    """Take the optimizer steps of this step's passes; returns (state at step + 1, metrics)."""
    config: distill.Config = setup.algorithm
    steps.check_version(batch, state)
    step = batch.version
    collected = [distill.critic_gaps(state)] if step == 0 else []
    for name in batch.latents:  # the student comes first: critic and clips are those of the start
        for expert in setup.experts:
            state, metrics = _take(state, setup, batch, expert, name)
            collected.append(metrics)
    if set(batch.latents) != {"critic"}:
        count = (step + 1 - config.warm_steps) // config.student_every  # student updates so far
        decay = dmd2.student_ema_decay(count, config.ema_decay, config.ema_start)
        student = states.trainable(state, setup.training)
        ema = trees.lerp(student, states.averaged(state, "ema"), decay)
        state = states.average(state, "ema", ema)
    return state.replace(step=state.step + 1), optim.merge_metrics(collected)


def programs(state: states.State, setup: Setup, tools: Tools) -> dict[str, Program]:
    """The jitted functions of a step, see algorithms.Program: each trained expert's longest
    rollout, its student and its critic update."""
    config, plan, found = setup.algorithm, setup.sampling, {}
    size, samples = plan.batch, config.samples
    row = tools.uncond_1SE.shape[1:]
    clips = steps.shape(samples, *sampling.latent_shape(setup.model, plan))
    policy, grid = states.rollout_params(state), steps.grid(setup)
    forward = wan.forward_flops(setup.model.wan, grid)
    for expert in setup.experts:
        own, region = phases.phase(setup, expert).steps, phases.regions(setup, expert)[0]
        ctx = steps.shape(size, *row, dtype=tools.uncond_1SE.dtype)
        rows = {"ctx": ctx, "cond": None, "x0": None}
        given = (
            _leading(policy, expert), rows, tools.uncond_1SE, steps.key_shape(),
            steps.shape(size, dtype=jnp.int32), steps.shape(dtype=jnp.int32),
        )  # fmt: skip
        found[f"rollout {expert}"] = Program(
            _rollout, lambda made, given=given: given, {"setup": setup},
            forward * size * (own.stop - 1), samples // size,
        )  # fmt: skip
        for name in ("student", "critic"):
            latents = {"x": clips} | ({"real": clips} if config.adversarial else {})
            ctx = steps.shape(config.items, *row, dtype=tools.uncond_1SE.dtype)
            batch = Batch({name: {expert: latents}}, ctx, tools.uncond_1SE, None, 0, {})
            draws = jax.eval_shape(
                functools.partial(_draws, setup, 0, expert, name, own.start, region)
            )
            given, static = _call(state, setup, batch, expert, name, region, steps.whole(draws))
            found[f"{name} {expert}"] = Program(
                distill.optimize, lambda made, given=given: given, static,
                samples * _flops(setup, name, grid),
            )  # fmt: skip
    return found


def _flops(setup: Setup, name: str, grid) -> int:
    """FLOPs of one sample of a pass: its update, and the judges of the student's."""
    lora = bool(setup.training.lora.rank)
    teacher, critic = (setup.roles[role].wan for role in ROLES)
    if name == "critic":
        return steps.training_flops(critic, grid, lora=lora)
    judged = 2 * wan.forward_flops(teacher, grid) + wan.forward_flops(critic, grid)
    return steps.training_flops(setup.model.wan, grid, lora=lora) + judged


def _clips(state, setup, rows, uncond_1SE, step: int, expert: str, name: str, exit_step: int):
    """Latents {name: [B, ...]} of an expert's pass, sampled in parts of sampling.batch."""
    config, key = setup.algorithm, _key(setup, step, expert, name, 0)
    size, parts = setup.sampling.batch, []
    for first in range(0, config.samples, size):
        distributed.check_stop()
        ids = jnp.arange(first, first + size)
        part = jax.tree.map(lambda a, of=ids // config.group_size: jnp.asarray(a)[of], rows)
        if name == "warm":
            teacher = states.role_params(state, "teacher")
            made = _teacher_pair(
                teacher, part, uncond_1SE, key, ids, exit_step, setup=setup, expert=expert
            )
        else:
            policy = states.rollout_params(state)
            made = _student_clips(
                policy, part, uncond_1SE, key, ids, exit_step,
                setup=setup, expert=expert, name=name,
            )  # fmt: skip
        parts.append(made)
    return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _student_clips(policy, part, uncond_1SE, key, ids, exit_step, *, setup, expert, name):
    """One part of `_clips`: at the exit's level for the student, at σ_s for the critic."""
    level = _level(setup, expert, exit_step)
    if setup.algorithm.rollout == "data_latent":
        noise = sampling.initial_noise(key, ids, part["x0"].shape[1:])
        x = flow.add_noise(part["x0"], noise, level["sigma"])
    else:
        used = _leading(policy, expert)
        x = _rollout(used, part, uncond_1SE, key, ids, exit_step, setup=setup)
    if name == "critic":
        x = _last_call(policy[expert], part, x, level, config=setup.model.wan)
    return {"x": x} | ({"real": part["x0"]} if setup.algorithm.adversarial else {})


def _leading(policy: dict, expert: str) -> dict:
    """The experts of a policy that a rollout down to this one's steps runs."""
    return {e: own for e, own in policy.items() if expert == "low" or e == "high"}


def _take(state, setup, batch: Batch, expert: str, name: str):
    """One optimizer step of an expert's pass; returns (state, metrics)."""
    exit_step, region = phases.draw(setup, batch.version, expert, name)
    draws = _draws(setup, batch.version, expert, name, exit_step, region)
    given, static = _call(state, setup, batch, expert, name, region, draws)
    trained, opt, metrics = distill.optimize(*given, **static)
    if setup.algorithm.adversarial and name == "student":
        sum_N, count_N = (metrics.pop(f"ratio_{kind}").sum(0) for kind in ("sum", "count"))
        mean_N = dmd2.ratio_mean(state.running[region.critic], sum_N, count_N, RATIO_DECAY)
        state = state.replace(running={**state.running, region.critic: mean_N})
    role, moved = _moved(expert, name, region)
    state = states.replace_trainable(state, setup.training, {moved: trained}, role)
    state = states.replace_optimizers(state, {moved: opt}, role)
    prefix = {"student": "", "critic": "critic/", "warm": ""}[name]
    return state, {f"{prefix}{key}/{moved}": value for key, value in metrics.items()}


def _moved(expert: str, name: str, region: phases.Region) -> tuple[str, str]:
    """(role, its expert) that a pass trains."""
    return ("critic", region.critic) if name == "critic" else ("student", expert)


def _call(state, setup, batch: Batch, expert: str, name: str, region: phases.Region, draws: dict):
    """(positional, keyword arguments) of `distill.optimize` for an expert's pass."""
    config, training = setup.algorithm, setup.training
    role, moved = _moved(expert, name, region)
    judges = {}
    if name == "student":
        for judge, serving in (("teacher", region.teacher), ("critic", region.critic)):
            judges[judge] = states.role_params(state, judge)[serving]
    data = {
        "x": batch.latents[name][expert],
        "ctx": batch.ctx_PSE,
        "cond": batch.cond,
        "uncond_1SE": batch.uncond_1SE,
        "ratio_mean_N": state.running.get(region.critic),
        **draws,
    }
    given = (
        states.trainable(state, training, role)[moved], states.optimizers(state, role)[moved],
        states.frozen(state, training, role)[moved], judges, data,
        optim.parts(np.arange(len(data["x"]["x"])), config.micro_samples),
    )  # fmt: skip
    static = {
        "setup": setup, "task": name, "scale": config.guidance[region.teacher],
        "config": training.optim[role][moved],
    }  # fmt: skip
    return given, static


@functools.partial(jax.jit, static_argnames=("setup",))
def _rollout(policy, rows, uncond_1SE, key, ids, exit_step, *, setup):
    """The student's clips at the level of its exit step, from noise."""
    plan = setup.sampling
    velocities = sampling.velocities(
        policy, rows["ctx"], uncond_1SE, rows["cond"], config=setup.model.wan, plan=plan
    )
    x = sampling.initial_noise(key, ids, sampling.latent_shape(setup.model, plan))
    return sampler.few_step(
        velocities, x, key, ids, plan.schedule, renoise=plan.solver == "renoise", stop=exit_step
    )


@functools.partial(jax.jit, static_argnames=("config",))
def _last_call(policy, rows, x, level, *, config):
    """The student's clips at σ_s."""
    params, adapter = policy
    t_B = jnp.full(len(x), level["t"])
    v = condition.denoise(params, adapter, x, t_B, rows["ctx"], rows["cond"], config=config)
    return flow.euler(x, v, level["sigma"], level["sigma_s"])


@functools.partial(jax.jit, static_argnames=("setup", "expert"))
def _teacher_pair(teacher, rows, uncond_1SE, key, ids, exit_step, *, setup, expert):
    """{"x", "end"}: points of the guided teacher's ODE at σ_exit and σ_s."""
    config, phase = setup.algorithm, phases.phase(setup, expert)
    plan, n = phases.teacher_schedule(setup), config.warm_substeps
    velocities = {
        name: sampling.velocity(
            own, rows["ctx"], uncond_1SE, rows["cond"], config=setup.roles["teacher"].wan,
            scale=config.guidance[name], mode=setup.sampling.guidance_mode,
        )
        for name, own in teacher.items()
    }  # fmt: skip

    def run(x, start, stop):
        return sampler.few_step(
            velocities, x, key, ids, plan, renoise=False, start=start, stop=stop
        )

    noise = sampling.initial_noise(key, ids, sampling.latent_shape(setup.model, setup.sampling))
    x = run(noise, 0, exit_step * n)
    stop = phase.steps.stop if phase.sigma_s else setup.sampling.schedule.steps
    return {"x": x, "end": run(x, exit_step * n, stop * n)}


def _level(setup, expert: str, exit_step: int) -> dict:
    """Levels of an exit step as float32 scalars, so that draws recompile nothing."""
    plan = setup.sampling.schedule
    level = {
        "sigma": plan.sigmas[exit_step],
        "t": plan.timesteps[exit_step],
        "sigma_s": phases.phase(setup, expert).sigma_s,
    }
    return {key: jnp.float32(value) for key, value in level.items()}


def _draws(setup, step: int, expert: str, name: str, exit_step: int, region) -> dict:
    """Levels and keys of one optimizer step."""
    config, shift = setup.algorithm, setup.sampling.schedule.shift
    lo, hi = (1000 * schedule.shift_map(u, shift) for u in region.u)
    scores = {
        "u_lo": region.u[0],
        "u_hi": region.u[1],
        "t_lo": max(config.t_lo, lo),
        "t_hi": max(min(config.t_hi, hi), lo),
    }
    level = _level(setup, expert, exit_step)
    return {
        "level": level | {key: jnp.float32(value) for key, value in scores.items()},
        "keys": [_key(setup, step, expert, name, purpose) for purpose in range(1, 6)],
    }


def _passes(setup, step: int) -> list[str]:
    """The passes of a step, a pure function of it."""
    config: distill.Config = setup.algorithm
    if step < config.warm_steps:
        return ["warm"]
    student = dmd2.turns(step + 1 - config.warm_steps, config.student_every)
    return ["student"] * student + ["critic"]


def _key(setup, step: int, expert: str, name: str, purpose: int):
    """Purposes: 0 sampling, 1 scored levels, 2 their noise; 3, 4, 5 noise of real clips."""
    key = jax.random.key(setup.seed)
    for number in (step, phases.number(expert), phases.PASSES.index(name), purpose):
        key = jax.random.fold_in(key, number)
    return key
