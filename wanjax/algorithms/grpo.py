"""GRPO on the denoising transitions of one or two experts (Flow-GRPO 2505.05470, DanceGRPO
2505.07818).

collect: K samples per prompt by the current policy with SDE steps at the epoch's window -> decode
-> reward -> advantage.
update: for each of `updates` optimizer steps, replay the stored transitions of a share of the
samples through the expert that made them, score them, and take one clipped policy-gradient step
per expert.

Shapes: P prompts, K group, B samples (P·K), W stored transitions a sample, M pairs (sample,
transition) a micro-batch.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import advantages, optim, rewards, sampler, schedule
from wanjax import state as states
from wanjax.losses import flow
from wanjax.losses import grpo as losses
from wanjax.parallel import sharding
from wanjax.run import metrics

DATA = "prompts"
ROLES = ()  # beside the student
SAMPLED = EVALUATED = "default"


@dataclass(frozen=True, eq=False)
class Config:
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    group_size: int
    prompts_per_step: int
    advantage: str = "flow_grpo"
    adv_clip_max: float = 5.0
    updates: int = 1  # optimizer steps per rollout, each on its own share of the samples
    micro_samples: int = 8  # samples per micro-batch
    micro_steps: int = 1  # transitions of each of these samples per micro-batch
    mix_experts: bool = False  # a micro-batch holds all transitions of its samples, both experts
    clip: dict = field(default_factory=lambda: dict(high=1e-4, low=1e-4))  # range per expert
    kl_kind: str = "g2h"
    kl_beta: dict = field(default_factory=lambda: dict(high=0.0, low=0.0))  # 0: no reference pass
    guard: bool = False  # GRPO-Guard ratio normalisation
    same_noise: bool = False  # a group starts from one initial noise (DanceGRPO)
    best_of: int = 0  # train on this many of each group, half its best, half its worst; 0 = all
    recompute_old_logp: bool = (
        False  # score under the trainer's own forward instead of the rollout's
    )


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    del roles
    return Config(
        **{key: config[key] for key in states.GROUP_KEYS}, kl_kind=config.kl.kind,
        kl_beta={expert: config.kl[expert] for expert in ("high", "low")},
        clip=config.clip.to_dict(), guard=config.guard, best_of=config.best_of,
        same_noise=config.same_noise, recompute_old_logp=config.recompute_old_logp,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """What collect hands to update; arrays over B samples, transitions over W."""

    trajectory: sampler.Trajectory
    ctx_BSE: jax.Array
    uncond_1SE: jax.Array
    adv_B: jax.Array
    steps_W: np.ndarray  # sampler step of each stored transition
    version: int  # policy that sampled
    metrics: dict


def check(setup: states.Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
    if config.best_of < 0 or config.best_of % 2 or config.best_of > config.group_size:
        raise ValueError(
            f"config.best_of is {config.best_of}; expected 0, or an even number up to "
            f"config.group_size = {config.group_size}"
        )
    kept = (config.best_of or config.group_size) * config.prompts_per_step
    states.check_batches(setup, "samples", kept)
    if config.kl_kind not in losses.KL_KINDS:
        raise ValueError(f"config.kl.kind is {config.kl_kind!r}; expected one of {losses.KL_KINDS}")
    sampler.check_kernel(setup.sde.kind, setup.sde.eta)
    for epoch in range(setup.steps):  # windows are drawn, or walk on
        groups = _slots(setup, sde_steps(setup, epoch))
        if not any(groups.values()):
            raise ValueError(
                f"sde.strategy {setup.sde.strategy.name!r} picks no step of the trained experts "
                f"{setup.experts} in epoch {epoch}; change config.experts or the sde section"
            )


def share(setup: states.Setup) -> int:
    """Samples of one optimizer step."""
    config: Config = setup.algorithm
    return (config.best_of or config.group_size) * config.prompts_per_step // config.updates


def init(key, setup: states.Setup, params: dict) -> states.State:
    """State at step 0; full weights keep a frozen reference only where a KL penalty reads it."""
    keep = any(setup.algorithm.kl_beta.values())
    return states.init(key, setup, params["student"], keep_reference=keep)


def collect(state, setup, item: states.Item, tools: states.Tools) -> Batch:
    """Sample K clips per prompt, score them and form advantages; returns a Batch.

    All device work is queued before the first video is fetched, so host rewards overlap with
    sampling and decoding. Raises FloatingPointError with step and sample for a reward that is not
    finite.
    """
    config: Config = setup.algorithm
    step, K = int(state.step), config.group_size
    samples = len(item.texts) * K
    steps_W = sde_steps(setup, step)
    slot_I = jnp.asarray(schedule.slot_table(setup.sampling.schedule, steps_W))
    key = jax.random.fold_in(jax.random.key(setup.seed), step)
    policy = states.rollout_params(state, SAMPLED)
    ctx_BSE = jnp.repeat(jnp.asarray(item.ctx_PSE), K, axis=0)
    pending = []
    for first in range(0, samples, setup.sampling.batch):
        ids = jnp.arange(first, first + setup.sampling.batch)
        x0, trajectory = _rollout(
            policy, ctx_BSE[first : first + len(ids)], tools.uncond_1SE, key, ids, slot_I,
            setup=setup, slots=len(steps_W),
        )  # fmt: skip
        video = states.decode(tools.vae, x0, setup=setup)
        pending.append((trajectory, x0, video))
    times: dict[str, float] = {}
    videos = metrics.ready([(x0, video) for _, x0, video in pending], times)
    reward = metrics.clocked(tools.reward, times, "collect/reward")
    texts = [prompt for prompt in item.texts for _ in range(K)]
    scores_MPK, found = rewards.score(
        videos, texts, reward, setup.rewards,
        group=K, step=step, failure=setup.reward_failure,
    )  # fmt: skip
    weights = list(setup.rewards.values())
    adv_PK = advantages.group_advantages(scores_MPK, config.advantage, weights=weights)
    join = lambda *chunks: jnp.concatenate(chunks, axis=1)
    return Batch(
        jax.tree.map(join, *[trajectory for trajectory, _, _ in pending]),
        ctx_BSE,
        tools.uncond_1SE,
        jnp.asarray(adv_PK.reshape(-1), jnp.float32),
        steps_W,
        step,
        found | times,
    )


def forwards(setup: states.Setup) -> dict[str, int]:
    """Forward passes of one sample that a step takes, by phase; a backward pass counts two, and
    what remat repeats counts nothing."""
    config: Config = setup.algorithm
    passes = {e: 1 + (getattr(setup.sampling.guidance, e) != 1) for e in setup.model.experts}
    plan = setup.sampling.schedule
    steps = {"high": plan.high_steps, "low": plan.steps - plan.high_steps}
    collect = sum(steps[e] * passes[e] for e in passes)
    rescored = config.recompute_old_logp and config.updates > 1
    update = sum(
        len(slots) * passes[e] * (3 + (config.kl_beta[e] != 0) + rescored)
        for e, slots in _slots(setup, sde_steps(setup, 0)).items()
    )
    kept = config.best_of or config.group_size
    prompts = config.prompts_per_step
    return {"collect": prompts * config.group_size * collect, "update": prompts * kept * update}


def update(state, setup, batch: Batch):
    """Take config.updates optimizer steps per expert on the batch; returns (state at step + 1,
    metrics)."""
    config: Config = setup.algorithm
    if batch.version != int(state.step):
        raise ValueError(f"batch of policy {batch.version} given to policy {int(state.step)}")
    samples = _kept(config, batch.adv_B)
    order = np.random.default_rng((setup.seed, batch.version)).permutation(samples)
    groups = _slots(setup, batch.steps_W)
    data = _replay_data(setup, batch)
    if config.recompute_old_logp and config.updates > 1:
        data["logp_WB"] = _rescore(state, setup, batch, data, groups)
    collected, first = [], 0
    for number, share in enumerate(np.split(order, config.updates)):
        # before the first optimizer step the policy is the one that sampled: its own score is the
        # old one
        on_policy = config.recompute_old_logp and number == 0
        for index in _micro_batches(config, groups, np.sort(share)):
            trained, opt, aux = _minibatch(
                {e: states.trainable(state, setup)[e] for e in index},
                {e: state.opt[e] for e in index},
                {e: states.frozen(state, setup)[e] for e in index},
                data, index, setup=setup, on_policy=on_policy,
            )  # fmt: skip
            state = states.replace_trainable(state, setup, trained)
            state = state.replace(opt={**state.opt, **opt})
            collected.append(aux)
        first = first or len(collected)
    first = first if batch.version == 0 else 0
    return state.replace(step=state.step + 1), optim.merge_metrics(collected, first)


@functools.partial(jax.jit, static_argnames=("setup", "slots"))
def _rollout(policy, ctx_BSE, uncond_1SE, key, ids, slot_I, *, setup, slots):
    velocities = states.policy_velocities(policy, ctx_BSE, uncond_1SE, setup=setup)
    config: Config = setup.algorithm
    first = ids // config.group_size * config.group_size if config.same_noise else ids
    x = sampler.initial_noise(key, first, states.latent_shape(setup))
    return sampler.rollout(
        velocities, sharding.constrain(x, "batch", None, None, None, None), key, ids,
        setup.sampling.schedule, slot_I, slots=slots, kind=setup.sde.kind, eta=setup.sde.eta,
        solver=setup.sampling.solver, keep_mean=setup.algorithm.guard,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("setup", "on_policy"), donate_argnames=("opt",))
def _minibatch(trained, opt, frozen, data, index, *, setup, on_policy):
    """One optimizer step for each expert in `index`."""
    frozen = sharding.to_device(frozen)

    def loss(expert, tree, pairs):
        return _pair_loss(
            tree, frozen[expert], data, *pairs, setup=setup, expert=expert, on_policy=on_policy
        )

    return optim.step(loss, trained, opt, index, setup.optim)


def _pair_loss(trained, frozen, data, slot_M, sample_M, *, setup, expert, on_policy):
    """Loss and scalar statistics of M (transition, sample) pairs, all of one expert."""
    config: Config = setup.algorithm
    x, x_next = data["x_WB"][slot_M, sample_M], data["x_next_WB"][slot_M, sample_M]
    sigma, sigma_next, t = (data[name][slot_M] for name in ("sigma_W", "sigma_next_W", "t_W"))
    score = functools.partial(_score, setup, expert, x, x_next, sigma, sigma_next, t,
                              data["ctx_BSE"][sample_M], data["uncond_1SE"])  # fmt: skip
    params, adapter = (frozen, trained) if setup.lora.rank else (trained, {})
    v, mean, std, logp = score(params, adapter)
    old = jax.lax.stop_gradient(logp) if on_policy else data["logp_WB"][slot_M, sample_M]
    clip, adv = config.clip[expert], data["adv_B"][sample_M]
    h = sigma - sigma_next
    if config.guard:
        mean_old = data["mean_WB"][slot_M, sample_M]
        loss, aux = losses.guard_loss(
            logp, old, adv, mean, mean_old,
            std_B=std, h_B=h, clip=clip, adv_clip_max=config.adv_clip_max,
        )  # fmt: skip
    else:
        loss, aux = losses.grpo_loss(logp, old, adv, clip=clip, adv_clip_max=config.adv_clip_max)
    if config.kl_beta[expert]:
        base = (params, {}) if setup.lora.rank else (frozen, {})
        v_ref, mean_ref, _, _ = jax.lax.stop_gradient(score(*base))
        pair = (v, v_ref) if config.kl_kind == "v_mse" else (mean, mean_ref)
        kl = losses.kl_loss(config.kl_kind, *pair, std_B=std, h_B=h)
        loss = loss + config.kl_beta[expert] * kl
        aux |= {"kl": kl, "loss": loss, "v_norm_ratio": flow.norm_ratio(v, v_ref)}
    aux["v_rms"] = jnp.sqrt(jnp.square(v).mean())
    aux["logp_gap"] = jnp.abs(
        jax.lax.stop_gradient(logp) - data["logp_WB"][slot_M, sample_M]
    ).mean()
    return loss, {f"grpo/{name}": value for name, value in aux.items()}


def _score(setup, expert, x, x_next, sigma, sigma_next, t, ctx, uncond_1SE, params, adapter):
    """(velocity, transition mean, std, log-prob) of stored transitions under given weights."""
    uncond = jnp.broadcast_to(uncond_1SE, (x.shape[0], *uncond_1SE.shape[1:]))
    v = states.velocity(setup, expert, params, adapter, ctx, uncond)(x, t)
    logp, mean, std = sampler.sde_logp(
        x, x_next, v, sigma, sigma_next, kind=setup.sde.kind, eta=setup.sde.eta,
        sigma_max=setup.sampling.schedule.sigmas[1],
    )  # fmt: skip
    return v, mean, std, logp


def _kept(config: Config, adv_B) -> np.ndarray:
    """The samples that updates train on."""
    if not config.best_of:
        return np.arange(len(adv_B))
    adv_PK = np.asarray(adv_B).reshape(-1, config.group_size)
    index_PN = advantages.best_of_n(adv_PK, config.best_of)
    return (np.arange(len(adv_PK))[:, None] * config.group_size + index_PN).ravel()


def _rescore(state, setup, batch, data, groups):
    """Log-probs [W, B] of the batch under the current weights, by the trainer's forward."""
    logp_WB = data["logp_WB"]
    samples = np.arange(batch.adv_B.shape[0])
    for index in _micro_batches(setup.algorithm, groups, samples):
        for expert, pairs in ((e, pairs) for e, blocks in index.items() for pairs in blocks):
            scored = _score_pairs(
                states.trainable(state, setup)[expert], states.frozen(state, setup)[expert],
                data, pairs, setup=setup, expert=expert,
            )  # fmt: skip
            logp_WB = logp_WB.at[pairs].set(scored)
    return logp_WB


@functools.partial(jax.jit, static_argnames=("setup", "expert"))
def _score_pairs(trained, frozen, data, pairs, *, setup, expert):
    frozen = sharding.to_device(frozen)

    def one(pair):
        slot_M, sample_M = pair
        params, adapter = (frozen, trained) if setup.lora.rank else (trained, {})
        return _score(
            setup, expert, data["x_WB"][pair], data["x_next_WB"][pair], data["sigma_W"][slot_M],
            data["sigma_next_W"][slot_M], data["t_W"][slot_M], data["ctx_BSE"][sample_M],
            data["uncond_1SE"], params, adapter,
        )[3]  # fmt: skip

    return jax.lax.map(one, pairs)


def _replay_data(setup, batch):
    """The arrays that a replay gathers from, by name; levels are float32 as in the rollout."""
    plan, steps_W = setup.sampling.schedule, batch.steps_W
    trajectory = batch.trajectory
    data = {
        "x_WB": trajectory.x,
        "x_next_WB": trajectory.x_next,
        "logp_WB": trajectory.logp,
        "sigma_W": jnp.asarray(plan.sigmas[steps_W], jnp.float32),
        "sigma_next_W": jnp.asarray(plan.sigmas[steps_W + 1], jnp.float32),
        "t_W": jnp.asarray(plan.timesteps[steps_W], jnp.float32),
        "ctx_BSE": batch.ctx_BSE,
        "uncond_1SE": batch.uncond_1SE,
        "adv_B": batch.adv_B,
    }
    return data | ({"mean_WB": trajectory.mean} if setup.algorithm.guard else {})


def sde_steps(setup, epoch: int) -> np.ndarray:
    """Steps of an epoch's rollouts that are stochastic, and trained on."""
    return schedule.sde_steps(
        setup.sampling.schedule, setup.sde.strategy, epoch=epoch, seed=setup.seed
    )


def _slots(setup, steps_W) -> dict[str, list[int]]:
    """Trained expert -> positions in steps_W of the transitions that it made."""
    owner = [schedule.expert_name(setup.sampling.schedule, int(i)) for i in steps_W]
    return {e: [w for w, name in enumerate(owner) if name == e] for e in setup.experts}


def _micro_batches(config: Config, groups, share) -> list[dict]:
    return optim.micro_batches(
        groups, share, micro_samples=config.micro_samples, micro_steps=config.micro_steps,
        mix=config.mix_experts,
    )  # fmt: skip
