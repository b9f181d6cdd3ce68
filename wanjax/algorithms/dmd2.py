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
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampler, schedule, trees
from wanjax import state as states
from wanjax.data import text
from wanjax.losses import dmd2, flow
from wanjax.models import condition, discriminator
from wanjax.parallel import sharding

DATA = "either"  # prompts, or clips where the config names some
SAMPLED, EVALUATED = "default", "ema"
ROLES = ("teacher", "critic")  # beside the student
ROLLOUTS = ("simulate", "data_latent")
SOLVERS = ("euler", "renoise")  # ODE and SDE form of the few-step sampler
PASSES = ("student", "critic", "warm")
HEAD = "gan_head"  # beside the critic's own weights in the tree that is trained
RATIO_BINS, RATIO_DECAY = 10, 0.99  # of the density ratios' running mean over time
MARGIN = 0.02  # of the unshifted time between σ_s and the levels scored, where v* has a pole


@dataclass(frozen=True, eq=False)
class Config:
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    prompts_per_step: int
    group_size: int = 1  # samples per prompt
    micro_samples: int = 8
    updates: int = 1  # as the other algorithms have it
    rollout: str = "simulate"  # see ROLLOUTS
    student_every: int = 5
    guidance: dict = field(default_factory=lambda: dict(high=4.0, low=4.0))  # of the teacher
    floor: float = 1e-4  # of the normaliser
    t_lo: float = 20.0  # scored timesteps are clamped to [t_lo, t_hi]
    t_hi: float = 980.0
    ema_decay: float = 0.99
    ema_start: int = 200  # student updates before averaging begins
    warm_steps: int = 0
    warm_substeps: int = 12  # of the teacher's ODE in each step of the student
    gan_weight: float = 0.0  # of the GAN loss beside the student's
    gan_critic_weight: float = 1e-2  # of the GAN loss beside the critic's
    gan_penalty: float = 0.0  # of the approximate R1 penalty beside the critic's GAN loss
    divergence: str = "rkl"  # see losses.dmd2.F_WEIGHTS

    @property
    def adversarial(self) -> bool:
        """Whether there is a GAN head."""
        return self.gan_weight > 0 or self.divergence != "rkl"


@dataclass(frozen=True, eq=False)
class Batch:
    """What collect hands to update: pass -> expert -> latents [B, ...] by name."""

    latents: dict
    ctx_BSE: jax.Array
    uncond_1SE: jax.Array
    cond: Any  # {name: [B, ...]} or None
    version: int
    metrics: dict


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    own, usual = config.dmd2.to_dict(), roles["teacher"].sampling.guidance
    own["guidance"] = {e: w or getattr(usual, e) for e, w in own["guidance"].items()}
    items = config.data.batch if config.data.path else config.prompts_per_step
    shared = {key: config[key] for key in ("group_size", "micro_samples", "updates")}
    return Config(items, **shared, **own)


def sde_steps(setup: states.Setup, epoch: int):
    """None beside those of the sampler itself."""
    del setup, epoch
    return ()


@dataclass(frozen=True)
class Phase:
    """The part of the trajectory that one expert of the student owns."""

    steps: range
    sigma_s: float  # level at which it ends
    u: tuple[float, float]  # unshifted times that are scored


@dataclass(frozen=True)
class Region:
    """Unshifted times that teacher and critic serve with one expert each."""

    u: tuple[float, float]
    teacher: str
    critic: str


def check(setup: states.Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
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
    if config.updates != 1:
        raise ValueError(f"config.updates is {config.updates}; DMD2 takes one a step, set it to 1")
    samples = config.prompts_per_step * config.group_size
    if samples % setup.sampling.batch:
        raise ValueError(
            f"{samples} samples a step do not divide into parts of config.sampling.batch = "
            f"{setup.sampling.batch}; set it to a divisor of {samples}"
        )
    for expert in setup.experts:
        if not _phase(setup, expert).steps:
            raise ValueError(
                f"expert {expert} has none of the {setup.sampling.schedule.steps} steps; change "
                "config.sampling.sigmas or shift, or leave it out of config.experts"
            )
        for region in _regions(setup, expert):
            if region.critic not in setup.role_optim["critic"]:
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


def share(setup: states.Setup) -> int:
    """Samples of one optimizer step."""
    config: Config = setup.algorithm
    return config.group_size * config.prompts_per_step


def init(key, setup: states.Setup, params: dict) -> states.State:
    """State at step 0: critic and teacher are the weights given, or the student's."""
    state = states.init(key, setup, params["student"], keep_reference=False)
    for number, role in enumerate(("teacher", "critic")):
        role_key = jax.random.fold_in(key, 100 + number)
        state = states.with_role(role_key, state, setup, role, params.get(role))
    if setup.algorithm.adversarial:
        stages = sharding.mesh_shape().get("stage", 1)
        if stages > 1:
            raise ValueError(
                f"a GAN head reads single blocks of the critic, mesh.stage = {stages} splits them; "
                "set config.mesh.stage to 1, or dmd2.gan_weight = 0 and divergence = 'rkl'"
            )
        state = _with_heads(jax.random.fold_in(key, 200), state, setup)
    return states.average(state, "ema", jax.tree.map(jnp.copy, states.trainable(state, setup)))


def _with_heads(key, state: states.State, setup: states.Setup) -> states.State:
    """State with a GAN head for every expert of the critic."""
    model = setup.roles.get("critic", setup.model)
    for expert, tree in states.trainable(state, setup, "critic").items():
        head = discriminator.init(jax.random.fold_in(key, _number(expert)), model.wan)
        tree = {**tree, HEAD: head}
        opt = optim.make(setup.role_optim["critic"][expert]).init(tree)
        state = states.replace_trainable(state, setup, {expert: tree}, "critic")
        state = states.replace_optimizers(state, {expert: opt}, "critic")
    return state.replace(running={e: jnp.ones(RATIO_BINS) for e in model.experts})


def collect(state, setup, item: states.Item, tools: states.Tools) -> Batch:
    """Clips of every trained expert and pass of this step; returns a Batch."""
    config: Config = setup.algorithm
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
    repeat = lambda a: jnp.repeat(jnp.asarray(a), config.group_size, axis=0)
    ctx_PSE, uncond_1SE = text.align(item.ctx_PSE, tools.uncond_1SE)
    rows = {
        "ctx": repeat(ctx_PSE),
        "cond": jax.tree.map(repeat, item.cond),
        "x0": repeat(item.x0_PTHWC) if reads_clips else None,
    }
    latents, metrics = {}, {}
    for name in _passes(setup, step):
        latents[name] = {}
        for expert in setup.experts:
            exit_step, _ = _draw(setup, step, expert, name)
            latents[name][expert] = _clips(
                state, setup, rows, uncond_1SE, step, expert, name, exit_step
            )
            metrics[f"{name}/exit/{expert}"] = float(exit_step)
    return Batch(latents, rows["ctx"], uncond_1SE, rows["cond"], step, metrics)


def forwards(setup: states.Setup) -> dict[str, int]:
    """Nothing: steps differ in length, and roles in size."""
    return {}


def update(state, setup, batch: Batch):
    """Take the optimizer steps of this step's passes; returns (state at step + 1, metrics)."""
    config: Config = setup.algorithm
    step = batch.version
    if step != int(state.step):
        raise ValueError(f"batch of policy {step} given to policy {int(state.step)}")
    collected = [_critic_gaps(state)] if step == 0 else []
    for name in batch.latents:  # the student comes first: critic and clips are those of the start
        for expert in setup.experts:
            state, metrics = _take(state, setup, batch, expert, name)
            collected.append(metrics)
    if set(batch.latents) != {"critic"}:
        count = (step + 1 - config.warm_steps) // config.student_every  # student updates so far
        decay = dmd2.student_ema_decay(count, config.ema_decay, config.ema_start)
        moved = trees.lerp(states.trainable(state, setup), states.averaged(state, "ema"), decay)
        state = states.average(state, "ema", moved)
    return state.replace(step=state.step + 1), optim.merge_metrics(collected)


def _critic_gaps(state) -> dict:
    """The largest weight by which the critic of an expert differs from its teacher, an adapter by
    its B; {} where they are different variants. Alarms of the first step expect 0."""
    teacher, critic = (states.role_params(state, role) for role in ("teacher", "critic"))
    gaps = {}
    for expert in sorted(teacher.keys() & critic.keys()):
        base, own = (trees.flatten(role[expert][0]) for role in (teacher, critic))
        low_rank = trees.flatten(critic[expert][1])
        if all(path in own and own[path].shape == x.shape for path, x in base.items()):
            pairs = [(own[path], x) for path, x in base.items() if own[path] is not x]
            moved = [x for path, x in low_rank.items() if path.endswith("/b")]
            gaps[f"dmd2/critic_gap/{expert}"] = _largest(pairs, moved)
    return gaps


@jax.jit
def _largest(pairs, moved):
    wide = lambda x: x.astype(jnp.float32)
    parts = [jnp.abs(wide(a) - wide(b)).max() for a, b in pairs]
    return jnp.max(jnp.stack([jnp.float32(0), *parts, *[jnp.abs(wide(x)).max() for x in moved]]))


def _clips(state, setup, rows, uncond_1SE, step: int, expert: str, name: str, exit_step: int):
    """Latents {name: [B, ...]} of an expert's pass, sampled in parts of sampling.batch."""
    key, size, parts = _key(setup, step, expert, name, 0), setup.sampling.batch, []
    for first in range(0, len(rows["ctx"]), size):
        ids = jnp.arange(first, first + size)
        part = jax.tree.map(lambda a, ids=ids: a[ids], rows)
        if name == "warm":
            teacher = states.role_params(state, "teacher")
            parts.append(
                _teacher_pair(
                    teacher, part, uncond_1SE, key, ids, exit_step, setup=setup, expert=expert
                )
            )
            continue
        policy = states.rollout_params(state, SAMPLED)
        level = _level(setup, expert, exit_step)
        if setup.algorithm.rollout == "data_latent":
            noise = _noise(key, ids, part["x0"].shape[1:])
            x = flow.add_noise(part["x0"], noise, level["sigma"])
        else:
            used = {e: policy[e] for e in policy if expert == "low" or e == "high"}
            x = _rollout(used, part, uncond_1SE, key, ids, exit_step, setup=setup)
        if name == "critic":
            x = _last_call(policy[expert], part, x, level, setup=setup)
        parts.append({"x": x} | ({"real": part["x0"]} if setup.algorithm.adversarial else {}))
    return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _take(state, setup, batch: Batch, expert: str, name: str):
    """One optimizer step of an expert's pass; returns (state, metrics)."""
    config: Config = setup.algorithm
    role = "critic" if name == "critic" else "student"
    exit_step, region = _draw(setup, batch.version, expert, name)
    moved = region.critic if role == "critic" else expert
    judges = {}
    if name == "student":
        for judge, serving in (("teacher", region.teacher), ("critic", region.critic)):
            judges[judge] = states.role_params(state, judge)[serving]
    rows = optim.parts(np.arange(len(batch.ctx_BSE)), config.micro_samples)
    optims = setup.optim if role == "student" else setup.role_optim[role]
    trained, opt, metrics = _optimize(
        states.trainable(state, setup, role)[moved], states.optimizers(state, role)[moved],
        states.frozen(state, setup, role)[moved], judges,
        _data(state, setup, batch, expert, name, exit_step, region), rows,
        setup=setup, task=name, scale=config.guidance[region.teacher], config=optims[moved],
    )  # fmt: skip
    if config.adversarial and name == "student":
        sum_N, count_N = (metrics.pop(f"ratio_{kind}").sum(0) for kind in ("sum", "count"))
        mean_N = dmd2.ratio_mean(state.running[region.critic], sum_N, count_N, RATIO_DECAY)
        state = state.replace(running={**state.running, region.critic: mean_N})
    state = states.replace_trainable(state, setup, {moved: trained}, role)
    state = states.replace_optimizers(state, {moved: opt}, role)
    prefix = {"student": "", "critic": "critic/", "warm": ""}[name]
    return state, {f"{prefix}{key}/{moved}": value for key, value in metrics.items()}


@functools.partial(jax.jit, static_argnames=("setup",))
def _rollout(policy, rows, uncond_1SE, key, ids, exit_step, *, setup):
    """The student's clips at the level of its exit step, from noise."""
    plan = setup.sampling
    velocities = states.policy_velocities(
        policy, rows["ctx"], uncond_1SE, rows["cond"], setup=setup
    )
    x = _noise(key, ids, states.latent_shape(setup))
    return sampler.few_step(
        velocities, x, key, ids, plan.schedule, renoise=plan.solver == "renoise", stop=exit_step
    )


@functools.partial(jax.jit, static_argnames=("setup",))
def _last_call(policy, rows, x, level, *, setup):
    """The student's clips at σ_s."""
    params, adapter = policy
    run = states.velocity(
        setup, "high", params, adapter, rows["ctx"], None, rows["cond"], scale=1.0
    )
    return flow.euler(x, run(x, jnp.full(len(x), level["t"])), level["sigma"], level["sigma_s"])


@functools.partial(jax.jit, static_argnames=("setup", "expert"))
def _teacher_pair(teacher, rows, uncond_1SE, key, ids, exit_step, *, setup, expert):
    """{"x", "end"}: points of the guided teacher's ODE at σ_exit and σ_s."""
    config, phase = setup.algorithm, _phase(setup, expert)
    plan, n = _fine(setup), config.warm_substeps
    uncond = jnp.broadcast_to(uncond_1SE, (len(ids), *uncond_1SE.shape[1:]))
    velocities = {
        name: states.velocity(
            setup, name, params, adapter, rows["ctx"], uncond, rows["cond"], role="teacher",
            scale=config.guidance[name],
        )
        for name, (params, adapter) in teacher.items()
    }  # fmt: skip

    def run(x, start, stop):
        return sampler.few_step(
            velocities, x, key, ids, plan, renoise=False, start=start, stop=stop
        )

    x = run(_noise(key, ids, states.latent_shape(setup)), 0, exit_step * n)
    stop = phase.steps.stop if phase.sigma_s else setup.sampling.schedule.steps
    return {"x": x, "end": run(x, exit_step * n, stop * n)}


@functools.partial(
    jax.jit, static_argnames=("setup", "task", "scale", "config"), donate_argnames=("opt",)
)
def _optimize(trained, opt, frozen, judges, data, rows, *, setup, task, scale, config):
    """One optimizer step of one expert of a role; experts alike in shape share the program."""

    def loss(_, tree, rows):
        (ids,) = rows
        own = (frozen, tree) if setup.lora.rank else (tree, {})
        part = {name: jax.tree.map(lambda a: a[ids], data[name]) for name in ("x", "ctx", "cond")}
        part["x"] = {k: _constrain(x) for k, x in part["x"].items()}
        micro = _Micro(
            part["x"],
            data["level"],
            functools.partial(_velocity, part, data["uncond_1SE"], setup=setup),
            functools.partial(_logits, part, setup=setup),
            functools.partial(_scored, data["level"], data["keys"], ids, setup=setup),
            functools.partial(_real, data["level"], data["keys"], ids, part["x"], setup=setup),
            first=1 if part["cond"] and "first" in part["cond"] else 0,
        )
        if task == "critic":
            return _critic_loss(own, micro, setup.algorithm)
        if task == "warm":
            return _warm_loss(own, micro)
        return _student_loss(own, judges, micro, scale, data["ratio_mean_N"], setup.algorithm)

    moved, opts, metrics = optim.step(
        loss, {task: trained}, {task: opt}, {task: rows}, {task: config}
    )
    return moved[task], opts[task], {k.removesuffix(f"/{task}"): v for k, v in metrics.items()}


@dataclass(frozen=True, eq=False)
class _Micro:
    """A micro-batch as the losses read it."""

    x: dict  # latents by name
    level: dict
    velocity: Any  # (weights, role, guidance) -> (x, t_B) -> v
    logits: Any  # (critic's weights, x_t, t_B) -> logits of its GAN head
    scored: Any  # clips -> (x_t, velocity target, σ, t)
    real: Any  # () -> (real clips at the levels of `scored`, the same with 0.1·ε more)
    first: int  # frames that are given and not made

    def made(self, *arrays):
        """The frames that are made."""
        return [a[:, self.first :] for a in arrays]


def _student_loss(own, judges: dict, micro: _Micro, scale: float, mean_N, config: Config):
    x, level = micro.x["x"], micro.level
    v = micro.velocity(own, "student")(x, jnp.full(len(x), level["t"]))
    x0 = flow.x0_from_velocity(x, v, level["sigma"])
    x_s = flow.euler(x, v, level["sigma"], level["sigma_s"])
    moving_t, _, sigma_M, t_M = micro.scored(x_s)
    x_t, weight_M, gan, more = jax.lax.stop_gradient(moving_t), None, 0.0, {}
    if config.adversarial:
        logit_ML = micro.logits(judges["critic"], moving_t, t_M)
        ratio_M, (sum_N, count_N) = dmd2.density_ratio(logit_ML, t_M, mean_N)
        weight_M = dmd2.f_weight(config.divergence, ratio_M)
        gan, _ = dmd2.gan_generator_loss(logit_ML)
        more = {"dmd2/gan": gan, "dmd2/ratio": ratio_M.mean()}
        more |= {"ratio_sum": sum_N, "ratio_count": count_N}
    real_v = micro.velocity(judges["teacher"], "teacher", scale)(x_t, t_M)
    fake_v = micro.velocity(judges["critic"], "critic")(x_t, t_M)
    fake, real = (flow.x0_from_velocity(x_t, v, sigma_M) for v in (fake_v, real_v))
    made = micro.made(x0, fake, real)
    value, aux = dmd2.generator_loss(*made, floor=config.floor, weight_B=weight_M)
    aux |= {"x0_std": x0.std(), "t": t_M.mean()}
    return value + config.gan_weight * gan, {f"dmd2/{name}": a for name, a in aux.items()} | more


def _critic_loss(own, micro: _Micro, config: Config):
    x_t, target, _, t_M = micro.scored(micro.x["x"])
    v = micro.velocity(own, "critic")(x_t, t_M)
    value, aux = dmd2.phased_critic_loss(*micro.made(v, target))
    aux |= {"t": t_M.mean()}
    if config.adversarial:
        real_t, shaken_t = micro.real()
        real_ML = micro.logits(own, real_t, t_M)
        gan, found = dmd2.gan_critic_loss(micro.logits(own, x_t, t_M), real_ML)
        if config.gan_penalty:
            penalty = dmd2.gan_penalty(real_ML, micro.logits(own, shaken_t, t_M))
            gan, found = gan + config.gan_penalty * penalty, found | {"penalty": penalty}
        value += config.gan_critic_weight * gan
        aux |= {f"gan_{name}": a for name, a in found.items()}
    return value, aux


def _warm_loss(own, micro: _Micro):
    x, level = micro.x["x"], micro.level
    v = micro.velocity(own, "student")(x, jnp.full(len(x), level["t"]))
    value = dmd2.ode_pair_loss(
        x, v, micro.x["end"], level["sigma"], level["sigma_s"], first=micro.first
    )
    return value, {"warm/loss": value}


def _velocity(part, uncond_1SE, tree, role: str, scale: float = 1.0, *, setup):
    params, adapter = tree
    ctx = part["ctx"]
    uncond = jnp.broadcast_to(uncond_1SE, (len(ctx), *uncond_1SE.shape[1:]))
    return states.velocity(  # the expert only names a guidance, which is given
        setup, "high", params, adapter, ctx, uncond, part["cond"], role=role, scale=scale
    )


def _logits(part, tree, x_t, t_M, *, setup):
    """Logits of the critic's GAN head on clips x_t; tree: the critic's weights as of _velocity."""
    params, adapter = tree
    config = setup.roles.get("critic", setup.model).wan
    h = condition.features(
        params, adapter, x_t, t_M, part["ctx"], part["cond"], config=config,
        layers=discriminator.taps(config),
    )  # fmt: skip
    return discriminator.logits({**params, **adapter}[HEAD], h)


def _scored(level, keys, ids, x_s, *, setup, noise=1):
    """(x_t, velocity target, σ, t): clips x_s noised to their scored levels."""
    u = level["u_lo"] + (level["u_hi"] - level["u_lo"]) * flow.uniform(keys[0], ids)
    shift = setup.sampling.schedule.shift
    t = dmd2.score_timesteps(1000 * u, shift, t_lo=level["t_lo"], t_hi=level["t_hi"])
    noise = sampler.initial_noise(keys[noise], ids, x_s.shape[1:])
    x_t, target = dmd2.phased_noise(x_s, noise, t / 1000, level["sigma_s"])
    return x_t, target, t / 1000, t


def _real(level, keys, ids, x, *, setup):
    """Real clips at the levels of `_scored`, by way of σ_s as the student's, and with 0.1·ε."""
    draw = lambda number: sampler.initial_noise(keys[number], ids, x["real"].shape[1:])
    x_s = flow.add_noise(x["real"], draw(2), level["sigma_s"])
    x_t = _scored(level, keys, ids, x_s, setup=setup, noise=3)[0]
    return x_t, x_t + 0.1 * draw(4)


def _level(setup, expert: str, exit_step: int) -> dict:
    """Levels of an exit step as float32 scalars, so that draws recompile nothing."""
    plan = setup.sampling.schedule
    level = {
        "sigma": plan.sigmas[exit_step],
        "t": plan.timesteps[exit_step],
        "sigma_s": _phase(setup, expert).sigma_s,
    }
    return {key: jnp.float32(value) for key, value in level.items()}


def _data(state, setup, batch: Batch, expert: str, name: str, exit_step: int, region: Region):
    """The arrays of one optimizer step."""
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
        "x": batch.latents[name][expert],
        "ctx": batch.ctx_BSE,
        "cond": batch.cond,
        "uncond_1SE": batch.uncond_1SE,
        "level": level | {key: jnp.float32(value) for key, value in scores.items()},
        "keys": [_key(setup, batch.version, expert, name, purpose) for purpose in range(1, 6)],
        "ratio_mean_N": state.running.get(region.critic),
    }


def _passes(setup, step: int) -> list[str]:
    """The passes of a step, a pure function of it."""
    config: Config = setup.algorithm
    if step < config.warm_steps:
        return ["warm"]
    student, critic = dmd2.turns(step + 1 - config.warm_steps, config.student_every)
    return ["student"] * student + ["critic"] * critic


def _phase(setup, expert: str) -> Phase:
    """The phase of an expert of the student.

    The first of two experts is scored inside its range and above σ_s, the second inside its range,
    and an expert that owns every step everywhere.
    """
    plan = setup.sampling.schedule
    split, steps = plan.high_steps, plan.steps
    own = range(split) if expert == "high" else range(split, steps)
    if split in (0, steps):
        return Phase(own, 0.0, (0.0, 1.0))
    u_b = schedule.unshift_map(plan.boundary, plan.shift)
    if expert == "low":
        return Phase(own, 0.0, (0.0, u_b))
    sigma_s = 0.0 if setup.sampling.solver == "renoise" else float(plan.sigmas[split])
    end = schedule.unshift_map(plan.sigmas[split], plan.shift)
    return Phase(own, sigma_s, (max(u_b, end + MARGIN), 1.0))


def _regions(setup, expert: str) -> list[Region]:
    """The times that an expert is scored at, cut where teacher or critic change experts."""
    lo, hi = _phase(setup, expert).u
    shift = setup.sampling.schedule.shift
    models = [setup.roles.get(role, setup.model) for role in ("teacher", "critic")]
    edges = {schedule.unshift_map(m.boundary, shift) for m in models if m.boundary}
    cuts = [lo, *sorted(u for u in edges if lo < u < hi), hi]

    def serving(model, u):
        low = model.boundary and schedule.shift_map(sum(u) / 2, shift) < model.boundary
        return "low" if low else "high"

    parts = zip(cuts[:-1], cuts[1:], strict=True)
    return [Region(u, *(serving(model, u) for model in models)) for u in parts]


def _draw(setup, step: int, expert: str, name: str) -> tuple[int, Region]:
    """Exit step of an expert's pass, and the region that is scored, drawn by its length."""
    steps, regions = _phase(setup, expert).steps, _regions(setup, expert)
    rng = np.random.default_rng((setup.seed, step, _number(expert), PASSES.index(name)))
    exit_step = int(rng.integers(steps.start, steps.stop))
    lengths = np.array([region.u[1] - region.u[0] for region in regions])
    return exit_step, regions[rng.choice(len(regions), p=lengths / lengths.sum())]


def _fine(setup) -> schedule.Schedule:
    """The teacher's schedule for pairs: every step of the student in warm_substeps parts."""
    plan, n = setup.sampling.schedule, setup.algorithm.warm_substeps
    u = np.minimum(schedule.unshift_map(plan.sigmas, plan.shift), 1.0)  # σ_0 = 1 may round up
    levels = [np.linspace(a, b, n, endpoint=False) for a, b in zip(u[:-1], u[1:], strict=True)]
    boundary = setup.roles.get("teacher", setup.model).boundary
    return schedule.make_schedule(
        "explicit", n * plan.steps, plan.shift, boundary, np.concatenate(levels)
    )


def _noise(key, ids, shape):
    return _constrain(sampler.initial_noise(key, ids, shape))


def _constrain(x_BTHWC):
    return sharding.constrain(x_BTHWC, "batch", None, None, None, None)


def _key(setup, step: int, expert: str, name: str, purpose: int):
    """Purposes: 0 sampling, 1 scored levels, 2 their noise; 3, 4, 5 noise of real clips."""
    key = jax.random.key(setup.seed)
    for number in (step, _number(expert), PASSES.index(name), purpose):
        key = jax.random.fold_in(key, number)
    return key


def _number(expert: str) -> int:
    return ("high", "low").index(expert)
