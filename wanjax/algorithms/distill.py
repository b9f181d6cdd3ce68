"""One optimizer step of DMD2: the losses of a micro-batch of the student, the critic and the warm
start, over the pure functions of losses.dmd2.

Shapes: M samples of a micro-batch, L logits of the GAN head, N bins of time.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wanjax import optim, sampler, sampling, trees
from wanjax import state as states
from wanjax.losses import dmd2, flow
from wanjax.models import condition, discriminator
from wanjax.parallel import sharding
from wanjax.settings import Setup

HEAD = "gan_head"  # beside the critic's own weights in the tree that is trained


@dataclass(frozen=True, eq=False)
class Config:
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    items: int  # prompts or clips a step
    group_size: int  # samples of each
    micro_samples: int
    rollout: str  # see ROLLOUTS
    student_every: int
    guidance: dict  # of the teacher
    floor: float  # of the normaliser
    t_lo: float  # scored timesteps are clamped to [t_lo, t_hi]
    t_hi: float
    ema_decay: float
    ema_start: int  # student updates before averaging begins
    warm_steps: int
    warm_substeps: int  # of the teacher's ODE in each step of the student
    gan_weight: float  # of the GAN loss beside the student's
    gan_critic_weight: float  # of the GAN loss beside the critic's
    gan_penalty: float  # of the approximate R1 penalty beside the critic's GAN loss
    divergence: str  # see losses.dmd2.F_WEIGHTS

    @property
    def samples(self) -> int:
        """Samples a step."""
        return self.items * self.group_size

    @property
    def adversarial(self) -> bool:
        """Whether there is a GAN head."""
        return self.gan_weight > 0 or self.divergence != "rkl"


@functools.partial(sharding.InPlace, 2, static_argnames=("setup", "task", "scale", "config"))
def optimize(trained, opt, frozen, judges, data, rows, *, setup, task, scale, config):
    """One optimizer step of one expert of a role, in place of its trees and optimizer states;
    experts alike in shape share the program."""

    def loss(_, tree, rows):
        (ids,) = rows
        own, micro = states.policy(setup.training, tree, frozen), _micro(data, ids, setup)
        if task == "critic":
            return _critic_loss(own, micro)
        if task == "warm":
            return _warm_loss(own, micro)
        return _student_loss(own, judges, micro, scale)

    moved, opts, metrics = optim.step(
        loss, {task: trained}, {task: opt}, {task: rows}, {task: config}
    )
    return moved[task], opts[task], {k.removesuffix(f"/{task}"): v for k, v in metrics.items()}


@dataclass(frozen=True, eq=False)
class _Micro:
    """A micro-batch as the losses read it: the rows `ids` of a step's data."""

    x: dict  # latents by name
    ctx: jax.Array
    cond: Any
    ids: jax.Array
    data: dict  # of the whole step
    setup: Setup

    @property
    def first(self) -> int:
        """How many frames are given, not made."""
        return 1 if self.cond and "first" in self.cond else 0

    def made(self, *arrays):
        """The frames that are made."""
        return [a[:, self.first :] for a in arrays]

    def config(self, role: str):
        """WanConfig of a role."""
        return self.setup.roles.get(role, self.setup.model).wan

    def velocity(self, policy, role: str, scale: float = 1.0):
        """The velocity (x, t_B) -> v of one expert of a role."""
        inputs = policy, self.ctx, self.data["uncond_1SE"], self.cond
        config, mode = self.config(role), self.setup.sampling.guidance_mode
        return sampling.velocity(*inputs, config=config, scale=scale, mode=mode)

    def logits(self, policy, x_t, t_M):
        """Logits of the critic's GAN head on clips x_t."""
        (params, adapter), config = policy, self.config("critic")
        inputs = params, adapter, x_t, t_M, self.ctx, self.cond
        h = condition.features(*inputs, config=config, layers=discriminator.taps(config))
        return discriminator.logits({**params, **adapter}[HEAD], h)

    def scored(self, x_s, noise=1):
        """(x_t, velocity target, σ, t): clips x_s noised to their scored levels."""
        level = self.data["level"]
        u = flow.uniform(self.data["keys"][0], self.ids)
        u = level["u_lo"] + (level["u_hi"] - level["u_lo"]) * u
        shift = self.setup.sampling.schedule.shift
        t = dmd2.score_timesteps(1000 * u, shift, t_lo=level["t_lo"], t_hi=level["t_hi"])
        drawn = self.noise(noise, x_s.shape[1:])
        x_t, target = dmd2.phased_noise(x_s, drawn, t / 1000, level["sigma_s"])
        return x_t, target, t / 1000, t

    def real(self):
        """Real clips at the levels of `scored`, by way of σ_s as the student's, and with 0.1·ε."""
        x = self.x["real"]
        x_s = flow.add_noise(x, self.noise(2, x.shape[1:]), self.data["level"]["sigma_s"])
        x_t = self.scored(x_s, noise=3)[0]
        return x_t, x_t + 0.1 * self.noise(4, x.shape[1:])

    def noise(self, number: int, shape):
        """Noise of one purpose, see dmd2._key."""
        return sampler.initial_noise(self.data["keys"][number], self.ids, shape)


def _micro(data: dict, ids, setup: Setup) -> _Micro:
    """The rows `ids` of a step's data, latents split over the mesh."""
    items = ids // setup.algorithm.group_size
    ctx, cond = jax.tree.map(lambda a: jnp.asarray(a)[items], (data["ctx"], data["cond"]))
    x = {name: sampling.constrain(latents[ids]) for name, latents in data["x"].items()}
    return _Micro(x, ctx, cond, ids, data, setup)


def _student_loss(own, judges: dict, micro: _Micro, scale: float):
    config, x, level = micro.setup.algorithm, micro.x["x"], micro.data["level"]
    v = micro.velocity(own, "student")(x, jnp.full(len(x), level["t"]))
    x0 = flow.x0_from_velocity(x, v, level["sigma"])
    x_s = flow.euler(x, v, level["sigma"], level["sigma_s"])
    moving_t, _, sigma_M, t_M = micro.scored(x_s)
    x_t, weight_M, gan, more = jax.lax.stop_gradient(moving_t), None, 0.0, {}
    if config.adversarial:
        logit_ML = micro.logits(judges["critic"], moving_t, t_M)
        ratio_M, (sum_N, count_N) = dmd2.density_ratio(logit_ML, t_M, micro.data["ratio_mean_N"])
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


def _critic_loss(own, micro: _Micro):
    config = micro.setup.algorithm
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
    x, level = micro.x["x"], micro.data["level"]
    v = micro.velocity(own, "student")(x, jnp.full(len(x), level["t"]))
    value = dmd2.ode_pair_loss(
        x, v, micro.x["end"], level["sigma"], level["sigma_s"], first=micro.first
    )
    return value, {"warm/loss": value}


def critic_gaps(state) -> dict:
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
    pairs, moved = trees.cast((pairs, moved), jnp.float32)
    gaps = [jnp.abs(a - b).max() for a, b in pairs] + [jnp.abs(x).max() for x in moved]
    return jnp.max(jnp.stack([jnp.float32(0), *gaps]))
