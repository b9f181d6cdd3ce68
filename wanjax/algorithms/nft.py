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

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import advantages, optim, rewards, sampler, schedule, trees
from wanjax import state as states
from wanjax.losses import awm, dpo, flow, nft
from wanjax.parallel import sharding
from wanjax.run import metrics

DATA = "prompts"
ROLES = ()  # beside the student
SAMPLED, EVALUATED = "old", "ema"
LOSSES = ("nft", "awm", "dpo")


@dataclass(frozen=True, eq=False)
class Config:
    """Settings of the algorithm; per-expert values are {"high": .., "low": ..}."""

    group_size: int
    prompts_per_step: int
    advantage: str = "flow_grpo"
    adv_clip_max: float = 5.0
    updates: int = 1  # optimizer steps per rollout, each on its own share of the samples
    micro_samples: int = 8
    micro_steps: int = 1
    mix_experts: bool = False
    loss: str = "nft"  # see LOSSES
    timesteps: int = 2  # trained timesteps of a unit per expert
    beta: float = 0.1  # nft_beta: how far the mirrored policies lie from old
    kl_beta: dict = field(default_factory=lambda: dict(high=1e-4, low=1e-4))
    mode: str = "all"  # advantage -> optimality probability, see losses.nft.MODES
    awm: dict = field(default_factory=dict)  # keywords of losses.awm.awm_loss
    dpo_beta: float = 100.0
    old_decay: int = 1  # see losses.nft.OLD_DECAYS
    ema_decay: float = 0.9  # cap of the evaluation average
    sde: bool = False  # rollouts take the stochastic steps of config.sde; else the solver alone
    train_guidance: bool = False  # allow guidance != 1: the loss then sees guided velocities


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    del roles
    return Config(
        **{key: config[key] for key in states.GROUP_KEYS}, **config.nft.to_dict(),
        kl_beta={expert: config.kl[expert] for expert in ("high", "low")},
        awm=config.awm.to_dict(), dpo_beta=config.dpo.beta,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """Final latents of B samples with their advantages, and the policy version that made them."""

    x0_B: jax.Array
    ctx_BSE: jax.Array
    uncond_1SE: jax.Array
    adv_B: jax.Array
    version: int
    metrics: dict


def check(setup: states.Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
    if config.loss not in LOSSES:
        raise ValueError(f"config.nft.loss is {config.loss!r}; expected one of {LOSSES}")
    if config.loss == "dpo":
        states.check_batches(setup, "pairs", config.prompts_per_step)
    else:
        states.check_batches(setup)
    weighting = config.awm.get("weighting", "ghuber")
    if weighting not in awm.WEIGHTINGS:
        raise ValueError(
            f"config.awm.weighting is {weighting!r}; expected one of {tuple(awm.WEIGHTINGS)}"
        )
    scales = {getattr(setup.sampling.guidance, expert) for expert in setup.model.experts}
    if scales != {1.0} and not config.train_guidance:
        raise ValueError(
            f"NFT samples and trains without guidance but config.guidance is {sorted(scales)}; set "
            "config.guidance.high and low to 1, or config.nft.train_guidance to True"
        )
    if config.mode not in nft.MODES:
        raise ValueError(f"config.nft.mode is {config.mode!r}; expected one of {nft.MODES}")
    if config.old_decay not in nft.OLD_DECAYS:
        raise ValueError(f"config.nft.old_decay is {config.old_decay}; expected 0, 1 or 2")
    sde_steps(setup, 0)
    if config.sde:
        sampler.check_kernel(setup.sde.kind, setup.sde.eta)
    for expert, steps in _ranges(setup).items():
        if config.timesteps > len(steps):
            raise ValueError(
                f"config.nft.timesteps is {config.timesteps} but expert {expert} has "
                f"{len(steps)} steps of {setup.sampling.schedule.steps}; lower it"
            )


def share(setup: states.Setup) -> int:
    """Samples, or pairs, of one optimizer step."""
    config: Config = setup.algorithm
    each = 1 if config.loss == "dpo" else config.group_size
    return each * config.prompts_per_step // config.updates


def init(key, setup: states.Setup, params: dict) -> states.State:
    """State at step 0: old and ema are exact copies of the trained tree."""
    keep = any(setup.algorithm.kl_beta.values()) or setup.algorithm.loss == "dpo"
    state = states.init(key, setup, params["student"], keep_reference=keep)
    copy = lambda: jax.tree.map(jnp.copy, states.trainable(state, setup))
    return states.average(states.average(state, "old", copy()), "ema", copy())


def collect(state, setup, item: states.Item, tools: states.Tools) -> Batch:
    """Sample K clips per prompt by the old policy, score them and form advantages; returns a
    Batch."""
    config: Config = setup.algorithm
    step, K, size = int(state.step), config.group_size, setup.sampling.batch
    key = jax.random.fold_in(jax.random.key(setup.seed), step)
    policy = states.rollout_params(state, SAMPLED)
    ctx_BSE = jnp.repeat(jnp.asarray(item.ctx_PSE), K, axis=0)
    stochastic_I = None
    if config.sde:
        steps = np.arange(setup.sampling.schedule.steps)
        stochastic_I = jnp.asarray(np.isin(steps, sde_steps(setup, step)))
    latents = [
        states.sample_latents(
            policy, ctx_BSE[first : first + size], tools.uncond_1SE, key,
            jnp.arange(first, first + size), stochastic_I=stochastic_I, setup=setup,
        )
        for first in range(0, len(item.texts) * K, size)
    ]  # fmt: skip
    times: dict[str, float] = {}
    videos = [states.decode(tools.vae, x0, setup=setup) for x0 in latents]
    videos = metrics.ready(list(zip(latents, videos, strict=True)), times)
    reward = metrics.clocked(tools.reward, times, "collect/reward")
    texts = [prompt for prompt in item.texts for _ in range(K)]
    scores_MPK, found = rewards.score(
        videos, texts, reward, setup.rewards,
        group=K, step=step, failure=setup.reward_failure,
    )  # fmt: skip
    weights = list(setup.rewards.values())
    adv_PK = advantages.group_advantages(scores_MPK, config.advantage, weights=weights)
    adv_B = jnp.asarray(adv_PK.reshape(-1), jnp.float32)
    return Batch(jnp.concatenate(latents), ctx_BSE, tools.uncond_1SE, adv_B, step, found | times)


def sde_steps(setup: states.Setup, epoch: int):
    """Steps of an epoch's rollouts that are stochastic."""
    if not setup.algorithm.sde:
        return ()
    plan = setup.sampling.schedule
    return schedule.sde_steps(plan, setup.sde.strategy, epoch=epoch, seed=setup.seed)


def forwards(setup: states.Setup) -> dict[str, int]:
    """Forward passes of one sample that a step takes, by phase; a backward pass counts two, and
    what remat repeats counts nothing."""
    config: Config = setup.algorithm
    passes = {e: 1 + (getattr(setup.sampling.guidance, e) != 1) for e in setup.model.experts}
    plan = setup.sampling.schedule
    steps = {"high": plan.high_steps, "low": plan.steps - plan.high_steps}
    samples = config.prompts_per_step * config.group_size
    collect = sum(steps[e] * passes[e] for e in passes)
    beside = {"nft": 1, "awm": 1 + bool(config.awm.get("ema_kl_beta")), "dpo": 1}[config.loss]
    rows = config.timesteps * (2 * config.prompts_per_step if config.loss == "dpo" else samples)
    kl = {e: config.loss != "dpo" and config.kl_beta[e] != 0 for e in setup.experts}
    update = sum(passes[e] * (3 + beside + kl[e]) for e in setup.experts)
    return {"collect": samples * collect, "update": rows * update}


def update(state, setup, batch: Batch):
    """Take config.updates optimizer steps per expert, then move old; returns (state, metrics)."""
    config: Config = setup.algorithm
    if batch.version != int(state.step):
        raise ValueError(f"batch of policy {batch.version} given to policy {int(state.step)}")
    data = _noised(batch, setup=setup)
    units = data[setup.experts[0]]["t_UT"].shape[0]
    order = np.random.default_rng((setup.seed, batch.version)).permutation(units)
    slots = {expert: list(range(config.timesteps)) for expert in setup.experts}
    collected, first = [], 0
    for number, share in enumerate(np.split(order, config.updates)):
        index_sets = optim.micro_batches(
            slots, np.sort(share), micro_samples=config.micro_samples,
            micro_steps=config.micro_steps, mix=config.mix_experts,
        )  # fmt: skip
        for index in index_sets:
            trained, opt, metrics = _minibatch(
                {e: states.trainable(state, setup)[e] for e in index},
                {e: state.opt[e] for e in index},
                {e: states.frozen(state, setup)[e] for e in index},
                {e: {n: states.averaged(state, n)[e] for n in ("old", "ema")} for e in index},
                data, index, setup=setup,
            )  # fmt: skip
            state = states.replace_trainable(state, setup, trained)
            state = state.replace(opt={**state.opt, **opt})
            collected.append(metrics)
        first = first or len(collected)
        taken = batch.version * config.updates + number + 1  # optimizer steps, this one included
        decay = float(nft.evaluation_decay(taken, config.ema_decay))
        state = _follow(state, setup, "ema", decay)
    taken = (batch.version + 1) * config.updates
    decay = float(nft.old_decay(taken, config.old_decay))
    state = _follow(state, setup, "old", decay)
    metrics = optim.merge_metrics(collected, first if batch.version == 0 else 0)
    metrics |= {"nft/old_decay": decay}
    return state.replace(step=state.step + 1), metrics


def _follow(state, setup, name: str, decay: float):
    """average <- decay·average + (1 − decay)·trained; exactly the trained tree at decay 0."""
    moved = trees.lerp(states.trainable(state, setup), states.averaged(state, name), decay)
    return states.average(state, name, moved)


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("opt",))
def _minibatch(trained, opt, frozen, averages, data, index, *, setup):
    """One optimizer step for each expert in `index`."""
    frozen = sharding.to_device(frozen)

    def loss(expert, tree, couples):
        return _pair_loss(
            tree, frozen[expert], averages[expert], data, *couples, setup=setup, expert=expert
        )

    return optim.step(loss, trained, opt, index, setup.optim)


def _pair_loss(trained, frozen, averages, data, slot_M, unit_M, *, setup, expert):
    """Loss and scalar statistics of M (timestep, unit) couples, all of one expert."""
    config: Config = setup.algorithm
    levels = data[expert]
    sigma_M, t_M = levels["sigma_UT"][unit_M, slot_M], levels["t_UT"][unit_M, slot_M]
    shape = data["x0_B"].shape[1:]
    noise = sampler.initial_noise(levels["key"], unit_M * config.timesteps + slot_M, shape)
    sample_M = unit_M
    if config.loss == "dpo":  # both clips of a pair under the same level and noise
        sample_M = jnp.concatenate([data["win_U"][unit_M], data["lose_U"][unit_M]])
        sigma_M, t_M, noise = (jnp.concatenate([a, a]) for a in (sigma_M, t_M, noise))
    x0, ctx = data["x0_B"][sample_M], data["ctx_BSE"][sample_M]
    adv = data["adv_B"][sample_M]
    x_t = flow.add_noise(x0, noise, sigma_M)
    uncond = jnp.broadcast_to(data["uncond_1SE"], (x0.shape[0], *data["uncond_1SE"].shape[1:]))

    def velocity(params, adapter):
        return states.velocity(setup, expert, params, adapter, ctx, uncond)(x_t, t_M)

    policy = lambda tree: velocity(frozen, tree) if setup.lora.rank else velocity(tree, {})
    kl_beta = config.kl_beta[expert]
    v_new = policy(trained)
    v_ref = velocity(frozen, {}) if kl_beta and config.loss != "dpo" else None
    if config.loss == "dpo":
        # a sample paired with itself: its gradients would cancel only up to rounding, which Adam
        # then blows up
        alone = (data["win_U"] == data["lose_U"])[jnp.concatenate([unit_M, unit_M])]
        alone = alone.reshape(-1, 1, 1, 1, 1)
        v_new = jnp.where(alone, jax.lax.stop_gradient(v_new), v_new)
        halves = [half for a in (v_new, velocity(frozen, {}), x0) for half in jnp.split(a, 2)]
        loss, aux = dpo.dpo_loss(*halves, noise[: len(unit_M)], beta=config.dpo_beta)
    elif config.loss == "awm":
        v_ema = policy(averages["ema"]) if config.awm.get("ema_kl_beta") else None
        loss, aux = awm.awm_loss(
            v_new, policy(averages["old"]), v_ref, v_ema, x0, noise, sigma_M, adv,
            adv_clip_max=config.adv_clip_max, kl_beta=kl_beta, **config.awm,
        )  # fmt: skip
    else:
        loss, aux = nft.nft_loss(
            v_new, policy(averages["old"]), v_ref, x0, x_t, sigma_M, adv,
            nft_beta=config.beta, kl_beta=kl_beta,
            adv_clip_max=config.adv_clip_max, mode=config.mode,
        )  # fmt: skip
    aux["v_rms"] = jnp.sqrt(jnp.square(v_new).mean())
    return loss, {f"{config.loss}/{name}": value for name, value in aux.items()}


def _noised(batch: Batch, *, setup) -> dict:
    """Arrays that couples gather from: latents, contexts and each expert's drawn levels [U, T]."""
    config, plan = setup.algorithm, setup.sampling.schedule
    data: dict = {
        "x0_B": batch.x0_B,
        "ctx_BSE": batch.ctx_BSE,
        "uncond_1SE": batch.uncond_1SE,
        "adv_B": batch.adv_B,
    }
    units = jnp.arange(len(batch.adv_B))
    if config.loss == "dpo":
        win_U, lose_U = dpo.pairs(batch.adv_B.reshape(-1, config.group_size))
        data |= {"win_U": jnp.asarray(win_U), "lose_U": jnp.asarray(lose_U)}
        units = jnp.arange(len(win_U))
    base = jax.random.fold_in(jax.random.key(setup.seed + 1), batch.version)
    for number, (expert, steps) in enumerate(_ranges(setup).items()):
        key = jax.random.fold_in(base, number)
        chosen = nft.stratified_steps(key, units, config.timesteps, steps.start, steps.stop)
        data[expert] = {
            "sigma_UT": jnp.asarray(plan.sigmas, jnp.float32)[chosen],
            "t_UT": jnp.asarray(plan.timesteps, jnp.float32)[chosen],
            "key": jax.random.fold_in(key, 1),
        }
    return data


def _ranges(setup) -> dict[str, range]:
    """Trained expert -> its steps of the schedule; every step has σ > 0, so none is wasted."""
    plan = setup.sampling.schedule
    edges = {"high": range(0, plan.high_steps), "low": range(plan.high_steps, plan.steps)}
    return {expert: edges[expert] for expert in setup.experts}
