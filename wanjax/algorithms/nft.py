"""Forward-process RL on final latents, on one or two experts: DiffusionNFT (2509.16117), AWM
(2509.25050) or online Flow-DPO (2501.13918) by config.loss. No log-probs of transitions.

collect: K clips per prompt by the `old` policy with an ODE solver -> decode -> reward -> advantage.
update: noise the final latents to the schedule's levels of each trained expert and take `updates`
optimizer steps of the loss between the trained, the old and the reference policy; then
old <- d·old + (1 − d)·default, with d a function of the optimizer steps taken. A separate average
(`ema`) follows every optimizer step and is what evaluation and export use.

A unit is what gets levels and noise: a sample, or for Flow-DPO the best and worst sample of a
prompt under one level and noise. A prompt whose samples all score alike is its own best and worst:
it moves nothing.

Shapes: P prompts, K group, B samples (P·K), U units, T trained timesteps of a unit and expert, M
(unit, timestep) couples a micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import sampler, sampling, schedule, trees
from wanjax import state as states
from wanjax.algorithms import Program, Tools, groups, steps
from wanjax.data import Item
from wanjax.losses import awm, dpo, flow, nft
from wanjax.settings import GroupConfig, Setup, fields_of

DATA = "prompts"
ROLES = ()  # beside the student
EVALUATED = "ema"
SAMPLED = "old"
LOSSES = ("nft", "awm", "dpo")


@dataclass(frozen=True, eq=False)
class Config(GroupConfig):
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    loss: str  # see LOSSES
    timesteps: int  # trained timesteps of a unit per expert
    beta: float  # nft_beta: how far the mirrored policies lie from old
    mode: str  # advantage -> optimality probability, see losses.nft.MODES
    old_decay: int  # see losses.nft.OLD_DECAYS
    ema_decay: float  # cap of the evaluation average
    sde: bool  # rollouts take the stochastic steps of config.sde; else the solver alone
    train_guidance: bool  # allow guidance != 1: the loss then sees guided velocities
    kl_beta: dict
    awm: awm.Settings
    dpo_beta: float


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    del roles
    return Config(
        **fields_of(GroupConfig, config),
        **config.nft.to_dict(),
        kl_beta={expert: config.kl[expert] for expert in ("high", "low")},
        awm=awm.Settings(**config.awm.to_dict()),
        dpo_beta=config.dpo.beta,
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """Final latents of B samples with their advantages, and the policy version that made them."""

    x0_B: jax.Array
    ctx_PSE: jax.Array
    uncond_1SE: jax.Array
    adv_B: Any
    version: int
    metrics: dict


def check(setup: Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
    if config.loss not in LOSSES:
        raise ValueError(f"config.nft.loss is {config.loss!r}; expected one of {LOSSES}")
    if config.loss == "dpo":
        groups.check(setup, "pairs", config.prompts_per_step)
    else:
        groups.check(setup)
    if config.awm.weighting not in awm.WEIGHTINGS:
        raise ValueError(
            f"config.awm.weighting is {config.awm.weighting!r}; expected one of "
            f"{tuple(awm.WEIGHTINGS)}"
        )
    scales = {getattr(setup.sampling.guidance, expert) for expert in setup.model.experts}
    if scales != {1.0} and not config.train_guidance:
        raise ValueError(
            f"NFT samples and trains without guidance but config.guidance is {sorted(scales)}; set "
            "config.guidance.high and low to 1, or config.nft.train_guidance to True"
        )
    if config.mode not in nft.MODES:
        raise ValueError(f"config.nft.mode is {config.mode!r}; expected one of {tuple(nft.MODES)}")
    if config.old_decay not in nft.OLD_DECAYS:
        raise ValueError(f"config.nft.old_decay is {config.old_decay}; expected 0, 1 or 2")
    sde_steps(setup, 0)
    if config.sde:
        sampler.check_kernel(setup.sde.kind, setup.sde.eta)
    for expert, levels in _ranges(setup).items():
        if config.timesteps > len(levels):
            raise ValueError(
                f"config.nft.timesteps is {config.timesteps} but expert {expert} has "
                f"{len(levels)} steps of {setup.sampling.schedule.steps}; lower it"
            )


def batches(setup: Setup) -> set[int]:
    """Sizes of the micro-batches of an update; those of Flow-DPO hold both clips of a pair."""
    sizes = steps.batches(_slots(setup), _share(setup.algorithm), setup.algorithm)
    return {2 * size for size in sizes} if setup.algorithm.loss == "dpo" else sizes


describe = groups.describe


def init(key, setup: Setup, params: dict) -> states.State:
    """State at step 0: old and ema are exact copies of the trained tree."""
    keep = any(setup.algorithm.kl_beta.values()) or setup.algorithm.loss == "dpo"
    state = states.init(key, setup.training, params["student"], keep_reference=keep)
    for name in ("old", "ema"):
        copy = jax.tree.map(jnp.copy, states.trainable(state, setup.training))
        state = states.average(state, name, copy)
    return state


def collect(state: states.State, setup: Setup, item: Item, tools: Tools) -> Batch:
    """Sample K clips per prompt by the old policy, score them and form advantages; see
    groups.collect."""
    policy, static = states.rollout_params(state, SAMPLED), rollout_static(setup)
    every, chosen = np.arange(setup.sampling.schedule.steps), sde_steps(setup, int(state.step))
    # one slot for all stochastic steps: nobody reads the transitions
    slot_I = jnp.asarray(np.where(np.isin(every, chosen), 0, -1), jnp.int32)

    def sample(ctx_PSE, prompt_B, key, ids):
        inputs = ctx_PSE, tools.uncond_1SE, prompt_B, key, ids, slot_I
        x0, _ = sampling.rollout(policy, *inputs, **static)
        return x0, x0

    latents, fields = groups.collect(state, setup, item, tools, sample)
    return Batch(x0_B=jnp.concatenate(latents), **fields)


def update(state: states.State, setup: Setup, batch: Batch):
    """Take config.updates optimizer steps per expert, then move old; returns (state, metrics)."""
    config: Config = setup.algorithm
    steps.check_version(batch, state)
    data, collected = _noised(batch, setup=setup), []
    units = data[setup.experts[0]]["t_UT"].shape[0]
    for number, share in enumerate(groups.shares(setup, batch.version, units)):
        given = data | {"averages": _averages(state, setup.experts)}
        state, found = steps.take(state, setup, _slots(setup), share, given, _pair_loss)
        collected.append(found)
        taken = batch.version * config.updates + number + 1  # optimizer steps, this one included
        decay = float(nft.evaluation_decay(taken, config.ema_decay))
        state = _follow(state, setup, "ema", decay)
    taken = (batch.version + 1) * config.updates
    decay = float(nft.old_decay(taken, config.old_decay))
    state = _follow(state, setup, "old", decay)
    metrics = steps.merged(collected, batch.version) | {"nft/old_decay": decay}
    return state.replace(step=state.step + 1), metrics


def sde_steps(setup: Setup, epoch: int) -> np.ndarray:
    """Steps of an epoch's rollouts that are stochastic."""
    if not setup.algorithm.sde:
        return np.arange(0)
    plan, strategy = setup.sampling.schedule, setup.sde.strategy
    return schedule.sde_steps(plan, strategy, epoch=epoch, seed=setup.seed)


def rollout_static(setup: Setup) -> dict:
    """Static arguments of sampling.rollout, see algorithms.Extras."""
    found = {"model": setup.model, "plan": setup.sampling}
    return found | ({"sde": setup.sde, "slots": 1} if setup.algorithm.sde else {})


def forwards(setup: Setup) -> dict[str, int]:
    """Forward passes of a step by phase, see algorithms.Extras."""
    config, each = setup.algorithm, groups.passes(setup)
    samples = config.prompts_per_step * config.group_size
    rows = config.timesteps * (2 * config.prompts_per_step if config.loss == "dpo" else samples)
    update = sum(each[e] * (3 + _beside(config, e)) for e in setup.experts)
    return {"collect": samples * groups.rollout_forwards(setup), "update": rows * update}


def programs(state: states.State, setup: Setup, tools: Tools) -> dict[str, Program]:
    """The jitted functions of a step, see algorithms.Program."""
    config: Config = setup.algorithm
    policy, fields = states.rollout_params(state, SAMPLED), groups.batch_shapes(setup, tools)
    samples = fields["adv_B"].shape[0]

    def data(made):
        x0 = groups.grown(made["rollout"][0], 0, samples)

        def noised(x0, ctx_PSE, uncond_1SE):
            adv_B = np.zeros(samples, np.float32)  # Flow-DPO sorts them on the host
            return _noised(Batch(x0, ctx_PSE, uncond_1SE, adv_B, 0, {}), setup=setup)

        shapes = jax.eval_shape(noised, x0, fields["ctx_PSE"], fields["uncond_1SE"])
        return steps.whole(shapes) | {"x0_B": x0, "averages": _averages(state, setup.experts)}

    def flops(expert):
        each = 2 if config.loss == "dpo" else 1
        return each * groups.pair_flops(setup, expert, extra=_beside(config, expert))

    found = groups.rollout_programs(setup, tools, policy, rollout_static(setup))
    return found | steps.programs(
        state, setup, _slots(setup), _share(config), data, _pair_loss,
        flops=flops, calls=config.updates,
    )  # fmt: skip


def _beside(config: Config, expert: str) -> int:
    """Forwards without gradient of a clip: of the old policy, and where they count, the reference's
    and the evaluation average's."""
    if config.loss == "dpo":
        return 1  # the reference alone
    ema = config.loss == "awm" and config.awm.ema_kl_beta != 0
    return 1 + (config.kl_beta[expert] != 0) + ema


def _averages(state, experts) -> dict:
    """{expert: {"old", "ema": tree}}."""
    return {e: {n: states.averaged(state, n)[e] for n in ("old", "ema")} for e in experts}


def _follow(state, setup, name: str, decay: float):
    """average <- decay·average + (1 − decay)·trained; exactly the trained tree at decay 0."""
    trained = states.trainable(state, setup.training)
    return states.average(state, name, trees.lerp(trained, states.averaged(state, name), decay))


def _pair_loss(trained, frozen, data, slot_M, unit_M, *, setup, expert):
    """Loss and scalar statistics of M (timestep, unit) couples, all of one expert."""
    config: Config = setup.algorithm
    plan, levels, averages = setup.sampling, data[expert], data["averages"][expert]
    sigma_M, t_M = levels["sigma_UT"][unit_M, slot_M], levels["t_UT"][unit_M, slot_M]
    shape = data["x0_B"].shape[1:]
    noise = sampler.initial_noise(levels["key"], unit_M * config.timesteps + slot_M, shape)
    sample_M = unit_M
    if config.loss == "dpo":  # both clips of a pair under the same level and noise
        sample_M = jnp.concatenate([data["win_U"][unit_M], data["lose_U"][unit_M]])
        sigma_M, t_M, noise = (jnp.concatenate([a, a]) for a in (sigma_M, t_M, noise))
    prompt_M = sample_M // config.group_size
    x0, ctx, adv = data["x0_B"][sample_M], data["ctx_PSE"][prompt_M], data["adv_B"][sample_M]
    x_t = flow.add_noise(x0, noise, sigma_M)

    def velocity(policy):
        run = sampling.velocity(
            policy, ctx, data["uncond_1SE"], config=setup.model.wan,
            scale=getattr(plan.guidance, expert), mode=plan.guidance_mode,
        )  # fmt: skip
        return run(x_t, t_M)

    def of(tree):
        return velocity(states.policy(setup.training, tree, frozen))

    kl_beta = config.kl_beta[expert]
    v_new, reference = of(trained), (frozen, {})
    if config.loss == "dpo":
        # a sample paired with itself: its gradients would cancel only up to rounding, which Adam
        # then blows up
        alone = (data["win_U"] == data["lose_U"])[jnp.concatenate([unit_M, unit_M])]
        alone = alone.reshape(-1, 1, 1, 1, 1)
        v_new = jnp.where(alone, jax.lax.stop_gradient(v_new), v_new)
        halves = [half for a in (v_new, velocity(reference), x0) for half in jnp.split(a, 2)]
        loss, aux = dpo.dpo_loss(*halves, noise=noise[: len(unit_M)], beta=config.dpo_beta)
    else:
        v_ref = velocity(reference) if kl_beta else None
        given = dict(kl_beta=kl_beta, adv_clip_max=config.adv_clip_max)
        if config.loss == "awm":
            v_ema = of(averages["ema"]) if config.awm.ema_kl_beta else None
            loss, aux = awm.awm_loss(
                v_new, of(averages["old"]), v_ref, v_ema, x0, noise, sigma_M, adv,
                settings=config.awm, **given,
            )  # fmt: skip
        else:
            loss, aux = nft.nft_loss(
                v_new, of(averages["old"]), v_ref, x0, x_t, sigma_M, adv,
                nft_beta=config.beta, mode=config.mode, **given,
            )  # fmt: skip
    aux["v_rms"] = jnp.sqrt(jnp.square(v_new).mean())
    return loss, {f"{config.loss}/{name}": value for name, value in aux.items()}


def _noised(batch: Batch, *, setup) -> dict:
    """Arrays that couples gather from: latents, contexts and each expert's drawn levels [U, T]."""
    config, plan = setup.algorithm, setup.sampling.schedule
    data: dict = {
        "x0_B": batch.x0_B,
        "ctx_PSE": batch.ctx_PSE,
        "uncond_1SE": batch.uncond_1SE,
        "adv_B": batch.adv_B,
    }
    units = jnp.arange(len(batch.adv_B))
    if config.loss == "dpo":
        win_U, lose_U = dpo.pairs(batch.adv_B.reshape(-1, config.group_size))
        data |= {"win_U": jnp.asarray(win_U), "lose_U": jnp.asarray(lose_U)}
        units = jnp.arange(len(win_U))
    base = jax.random.fold_in(jax.random.key(setup.seed + 1), batch.version)
    for number, (expert, levels) in enumerate(_ranges(setup).items()):
        key = jax.random.fold_in(base, number)
        chosen = nft.stratified_steps(key, units, config.timesteps, levels.start, levels.stop)
        data[expert] = {
            "sigma_UT": jnp.asarray(plan.sigmas, jnp.float32)[chosen],
            "t_UT": jnp.asarray(plan.timesteps, jnp.float32)[chosen],
            "key": jax.random.fold_in(key, 1),
        }
    return data


def _share(config: Config) -> int:
    """How many units one optimizer step takes."""
    each = 1 if config.loss == "dpo" else config.group_size
    return each * config.prompts_per_step // config.updates


def _slots(setup) -> dict[str, list[int]]:
    """{trained expert: numbers of the timesteps of a unit}."""
    return {expert: list(range(setup.algorithm.timesteps)) for expert in setup.experts}


def _ranges(setup) -> dict[str, range]:
    """Trained expert -> its steps of the schedule; every step has σ > 0, so none is wasted."""
    plan = setup.sampling.schedule
    edges = {"high": range(0, plan.high_steps), "low": range(plan.high_steps, plan.steps)}
    return {expert: edges[expert] for expert in setup.experts}
