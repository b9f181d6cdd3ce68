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
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import advantages, sampler, sampling, schedule
from wanjax import state as states
from wanjax.algorithms import Program, Tools, groups, steps
from wanjax.data import Item
from wanjax.losses import flow
from wanjax.losses import grpo as losses
from wanjax.parallel import sharding
from wanjax.settings import GroupConfig, Setup, fields_of

DATA = "prompts"
ROLES = ()  # beside the student
EVALUATED = "default"


@dataclass(frozen=True, eq=False)
class Config(GroupConfig):
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    clip: dict  # range per expert
    kl_kind: str  # see losses.grpo.KL_KINDS
    kl_beta: dict  # per expert; 0: no reference pass
    guard: bool  # GRPO-Guard ratio normalisation
    same_noise: bool  # a group starts from one initial noise (DanceGRPO)
    best_of: int  # train on this many of each group, half its best, half its worst; 0 = all
    recompute_old_logp: bool  # score under the trainer's own forward instead of the rollout's


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    del roles
    return Config(
        **fields_of(GroupConfig, config),
        clip=config.clip.to_dict(),
        kl_kind=config.kl.kind,
        kl_beta={expert: config.kl[expert] for expert in ("high", "low")},
        guard=config.guard,
        same_noise=config.same_noise,
        best_of=config.best_of,
        recompute_old_logp=config.recompute_old_logp,
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """What collect hands to update; arrays over B samples, transitions over W."""

    trajectory: sampler.Trajectory
    ctx_PSE: jax.Array
    uncond_1SE: jax.Array
    adv_B: jax.Array
    steps_W: np.ndarray  # sampler step of each stored transition
    version: int  # policy that sampled
    metrics: dict


def check(setup: Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
    if config.best_of < 0 or config.best_of % 2 or config.best_of > config.group_size:
        raise ValueError(
            f"config.best_of is {config.best_of}; expected 0, or an even number up to "
            f"config.group_size = {config.group_size}"
        )
    groups.check(setup, "samples", _kept_samples(config))
    if config.kl_kind not in losses.KL_KINDS:
        raise ValueError(f"config.kl.kind is {config.kl_kind!r}; expected one of {losses.KL_KINDS}")
    sampler.check_kernel(setup.sde.kind, setup.sde.eta)
    for epoch in range(setup.steps):  # windows are drawn, or walk on
        slots = _slots(setup, sde_steps(setup, epoch))
        if not any(slots.values()):
            raise ValueError(
                f"sde.strategy {setup.sde.strategy.name!r} picks no step of the trained experts "
                f"{setup.experts} in epoch {epoch}; change config.experts or the sde section"
            )


def batches(setup: Setup) -> set[int]:
    """Sizes of the micro-batches of an update."""
    slots = _slots(setup, sde_steps(setup, 0))
    return steps.batches(slots, _share(setup.algorithm), setup.algorithm)


describe = groups.describe


def init(key, setup: Setup, params: dict) -> states.State:
    """State at step 0; full weights keep a frozen reference only where a KL penalty reads it."""
    keep = any(setup.algorithm.kl_beta.values())
    return states.init(key, setup.training, params["student"], keep_reference=keep)


def collect(state: states.State, setup: Setup, item: Item, tools: Tools) -> Batch:
    """Sample K clips per prompt with stochastic steps, score them and form advantages; see
    groups.collect."""
    steps_W = sde_steps(setup, int(state.step))
    slot_I = jnp.asarray(schedule.slot_table(setup.sampling.schedule, steps_W))
    policy, static = states.rollout_params(state), rollout_static(setup)

    def sample(ctx_PSE, prompt_B, key, ids):
        inputs = ctx_PSE, tools.uncond_1SE, prompt_B, key, ids, slot_I
        return sampling.rollout(policy, *inputs, **_noise_of(setup, ids), **static)

    trajectories, fields = groups.collect(state, setup, item, tools, sample)
    joined = jax.tree.map(lambda *chunks: jnp.concatenate(chunks, axis=1), *trajectories)
    return Batch(trajectory=joined, steps_W=steps_W, **fields)


def update(state: states.State, setup: Setup, batch: Batch):
    """Take config.updates optimizer steps per expert on the batch; returns (state at step + 1,
    metrics)."""
    config: Config = setup.algorithm
    steps.check_version(batch, state)
    slots, data = _slots(setup, batch.steps_W), _replay_data(setup, batch)
    if config.recompute_old_logp and config.updates > 1:
        data["logp_WB"] = _rescore(state, setup, batch, data, slots)
    collected = []
    for number, share in enumerate(groups.shares(setup, batch.version, _kept(config, batch.adv_B))):
        # before the first optimizer step the policy is the one that sampled: its own score is the
        # old one
        on_policy = config.recompute_old_logp and number == 0
        state, found = steps.take(state, setup, slots, share, data, _LOSS[on_policy])
        collected.append(found)
    return state.replace(step=state.step + 1), steps.merged(collected, batch.version)


def sde_steps(setup: Setup, epoch: int) -> np.ndarray:
    """Steps of an epoch's rollouts that are stochastic, and trained on."""
    plan, strategy = setup.sampling.schedule, setup.sde.strategy
    return schedule.sde_steps(plan, strategy, epoch=epoch, seed=setup.seed)


def rollout_static(setup: Setup) -> dict:
    """Static arguments of sampling.rollout, see algorithms.Extras."""
    slots, keep = len(sde_steps(setup, 0)), setup.algorithm.guard
    given = {"model": setup.model, "plan": setup.sampling, "sde": setup.sde}
    return given | {"slots": slots, "keep_mean": keep}


def forwards(setup: Setup) -> dict[str, int]:
    """Forward passes of a step by phase, see algorithms.Extras."""
    config, each = setup.algorithm, groups.passes(setup)
    rescored = config.recompute_old_logp and config.updates > 1
    update = sum(
        len(slots) * each[e] * (3 + (config.kl_beta[e] != 0) + rescored)
        for e, slots in _slots(setup, sde_steps(setup, 0)).items()
    )
    samples = config.prompts_per_step * config.group_size
    collect = samples * groups.rollout_forwards(setup)
    return {"collect": collect, "update": _kept_samples(config) * update}


def programs(state: states.State, setup: Setup, tools: Tools) -> dict[str, Program]:
    """The jitted functions of a step, see algorithms.Program."""
    config: Config = setup.algorithm
    steps_W, policy = sde_steps(setup, 0), states.rollout_params(state)
    slots, fields = _slots(setup, steps_W), groups.batch_shapes(setup, tools)
    samples = fields["adv_B"].shape[0]

    def data(made):
        kept = groups.grown(made["rollout"][1], 1, samples)

        def replay(kept, fields):
            batch = Batch(trajectory=kept, steps_W=steps_W, version=0, metrics={}, **fields)
            return _replay_data(setup, batch)

        gathered = steps.whole(jax.eval_shape(replay, kept, fields))
        return gathered | {"x_WB": kept.x, "x_next_WB": kept.x_next}

    def flops(expert):
        return groups.pair_flops(setup, expert, extra=int(config.kl_beta[expert] != 0))

    keywords = rollout_static(setup)
    if config.same_noise:
        keywords["first_ids"] = steps.shape(setup.sampling.batch, dtype=jnp.int32)
    found = groups.rollout_programs(setup, tools, policy, keywords)
    return found | steps.programs(
        state, setup, slots, _share(config), data, _LOSS[config.recompute_old_logp],
        flops=flops, calls=config.updates,
    )  # fmt: skip


def _noise_of(setup: Setup, ids) -> dict:
    """The samples whose initial noise each has, if not its own."""
    K = setup.algorithm.group_size
    return {"first_ids": ids // K * K} if setup.algorithm.same_noise else {}


def _pair_loss(trained, frozen, data, slot_M, sample_M, *, setup, expert, on_policy):
    """Loss and scalar statistics of M (transition, sample) pairs, all of one expert."""
    config: Config = setup.algorithm
    rows = _rows(data, slot_M, sample_M, setup)
    policy = states.policy(setup.training, trained, frozen)
    v, mean, std, logp = _score(policy, rows, setup=setup, expert=expert)
    old = jax.lax.stop_gradient(logp) if on_policy else rows["logp"]
    clip, adv, h = config.clip[expert], rows["adv"], rows["sigma"] - rows["sigma_next"]
    if config.guard:
        loss, aux = losses.guard_loss(
            logp, old, adv, mean, rows["mean"],
            std_B=std, h_B=h, clip=clip, adv_clip_max=config.adv_clip_max,
        )  # fmt: skip
    else:
        loss, aux = losses.grpo_loss(logp, old, adv, clip=clip, adv_clip_max=config.adv_clip_max)
    if config.kl_beta[expert]:
        # the base without its adapter, or the copy that full weights began from
        score = _score((frozen, {}), rows, setup=setup, expert=expert)
        v_ref, mean_ref, _, _ = jax.lax.stop_gradient(score)
        pair = (v, v_ref) if config.kl_kind == "v_mse" else (mean, mean_ref)
        kl = losses.kl_loss(config.kl_kind, *pair, std_B=std, h_B=h)
        loss = loss + config.kl_beta[expert] * kl
        aux |= {"kl": kl, "loss": loss, "v_norm_ratio": flow.norm_ratio(v, v_ref)}
    aux["v_rms"] = jnp.sqrt(jnp.square(v).mean())
    aux["logp_gap"] = jnp.abs(jax.lax.stop_gradient(logp) - rows["logp"]).mean()
    return loss, {f"grpo/{name}": value for name, value in aux.items()}


_LOSS = {on: functools.partial(_pair_loss, on_policy=on) for on in (False, True)}


def _score(policy, rows: dict, *, setup, expert):
    """(velocity, transition mean, std, log-prob) of stored transitions under given weights."""
    plan = setup.sampling
    run = sampling.velocity(
        policy, rows["ctx"], rows["uncond_1SE"], config=setup.model.wan,
        scale=getattr(plan.guidance, expert), mode=plan.guidance_mode,
    )  # fmt: skip
    v = run(rows["x"], rows["t"])
    logp, mean, std = sampler.sde_logp(
        rows["x"], rows["x_next"], v, rows["sigma"], rows["sigma_next"],
        kind=setup.sde.kind, eta=setup.sde.eta, sigma_max=plan.schedule.sigmas[1],
    )  # fmt: skip
    return v, mean, std, logp


def _kept_samples(config: Config) -> int:
    """How many samples of a step are trained on."""
    return (config.best_of or config.group_size) * config.prompts_per_step


def _share(config: Config) -> int:
    """How many samples one optimizer step takes."""
    return _kept_samples(config) // config.updates


def _kept(config: Config, adv_B) -> np.ndarray:
    """The samples that updates train on."""
    if not config.best_of:
        return np.arange(len(adv_B))
    adv_PK = np.asarray(adv_B).reshape(-1, config.group_size)
    index_PN = advantages.best_of_n(adv_PK, config.best_of)
    return (np.arange(len(adv_PK))[:, None] * config.group_size + index_PN).ravel()


def _rescore(state, setup, batch, data, slots):
    """Log-probs [W, B] of the batch under the current weights, by the trainer's forward."""
    logp_WB = data["logp_WB"]
    samples = np.arange(batch.adv_B.shape[0])
    for index in steps.index_sets(slots, samples, setup.algorithm):
        trained, _, frozen = steps.parts(state, setup.training, index)
        for expert, blocks in index.items():
            for pairs in blocks:
                scored = _score_pairs(
                    trained[expert], frozen[expert], data, pairs, setup=setup, expert=expert
                )
                logp_WB = logp_WB.at[pairs].set(scored)
    return logp_WB


@functools.partial(jax.jit, static_argnames=("setup", "expert"))
def _score_pairs(trained, frozen, data, pairs, *, setup, expert):
    policy = states.policy(setup.training, trained, sharding.to_device(frozen))

    def one(pair):
        slot_M, sample_M = pair
        return _score(policy, _rows(data, slot_M, sample_M, setup), setup=setup, expert=expert)[3]

    return jax.lax.map(one, pairs)


def _replay_data(setup, batch) -> dict:
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
        "ctx_PSE": batch.ctx_PSE,
        "uncond_1SE": batch.uncond_1SE,
        "adv_B": batch.adv_B,
    }
    return data | ({"mean_WB": trajectory.mean} if setup.algorithm.guard else {})


def _rows(data: dict, slot_M, sample_M, setup) -> dict:
    """What a replay of M (transition, sample) pairs reads, gathered from `_replay_data`."""
    prompt_M = sample_M // setup.algorithm.group_size
    suffixes = {"_WB": (slot_M, sample_M), "_W": slot_M, "_PSE": prompt_M, "_B": sample_M}
    rows = {"uncond_1SE": data["uncond_1SE"]}
    for suffix, index in suffixes.items():
        for name in (name for name in data if name.endswith(suffix)):
            rows[name.removesuffix(suffix)] = data[name][index]
    return rows


def _slots(setup, steps_W) -> dict[str, list[int]]:
    """Trained expert -> positions in steps_W of the transitions that it made."""
    owner = [schedule.expert_name(setup.sampling.schedule, int(i)) for i in steps_W]
    return {e: [w for w, name in enumerate(owner) if name == e] for e in setup.experts}
