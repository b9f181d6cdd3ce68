"""Supervised fine-tuning on captioned clips, on one or two experts: flow matching (2210.02747).

collect: the clips of a step; some captions give way to the unconditional context.
update: each clip is noised to `timesteps` levels inside the range of each trained expert, drawn
from a density over the run's shifted times, and each expert takes one optimizer step on them.
validate: error of held-out clips in fixed bins of t under fixed noise, per expert.

The levels of a step are stratified over the whole batch: one in each of n equal parts of the
density's mass. They, the noise and the dropped captions are functions of (seed, step, clip).
With cond["first"] the given frame is an input, and only the others are scored.

Shapes: B clips, T trained timesteps of a clip and expert, M (timestep, clip) couples a micro-batch.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampler, sampling
from wanjax import state as states
from wanjax.algorithms import Program, Tools, steps
from wanjax.data import Item, text
from wanjax.losses import flow
from wanjax.models import condition
from wanjax.parallel import sharding
from wanjax.settings import MicroConfig, Setup, fields_of

DATA = "latents"
ROLES = ()  # beside the student
EVALUATED = "default"
WEIGHTINGS = ("none", "bell")


@dataclass(frozen=True, eq=False)
class Config(MicroConfig):
    """Settings of the algorithm."""

    clips: int  # a step
    timesteps: int  # of a clip per expert and step
    density: flow.Density
    weighting: str  # of the error by t: none, bell (flow.bell_weight)
    caption_dropout: float
    bins: int  # of t in each expert's range, for validation


def make_config(config, roles: dict) -> Config:
    """The settings in a run's ConfigDict; roles: ModelConfig of each of ROLES."""
    del roles
    own = config.sft.to_dict()
    density = flow.Density(*(own.pop(key) for key in ("density", "mean", "std", "scale")))
    return Config(
        **fields_of(MicroConfig, config), **own, density=density, clips=config.data.batch,
        caption_dropout=config.data.caption_dropout,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Batch:
    """Clips of B samples and the policy version that they will train."""

    x0_B: jax.Array
    ctx_BSE: jax.Array
    cond: Any  # {name: [B, ...]} or None
    version: int
    metrics: dict


def check(setup: Setup) -> None:
    """Raise ValueError for settings that cannot run, before anything is compiled."""
    config: Config = setup.algorithm
    if config.weighting not in WEIGHTINGS:
        raise ValueError(
            f"config.sft.weighting is {config.weighting!r}; expected one of {WEIGHTINGS}"
        )
    for expert in setup.experts:
        lo, hi = _range(setup, expert)
        try:
            flow.quantile(0.5, config.density, shift=_shift(setup), t_lo=lo, t_hi=hi)
        except ValueError as error:
            raise ValueError(f"config.sft: {error}") from None


def batches(setup: Setup) -> set[int]:
    """Sizes of the micro-batches of an update."""
    return steps.batches(_slots(setup), setup.algorithm.clips, setup.algorithm)


def describe(setup: Setup) -> str:
    """What one step works on."""
    config: Config = setup.algorithm
    return f"{config.clips} clips x {config.timesteps} timesteps for each trained expert"


def init(key, setup: Setup, params: dict) -> states.State:
    """State at step 0; nothing refers to the weights before training."""
    return states.init(key, setup.training, params["student"], keep_reference=False)


def collect(state, setup, item: Item, tools: Tools) -> Batch:
    """The clips of a step with some captions dropped; returns a Batch."""
    config: Config = setup.algorithm
    x0, ctx_BSE, uncond_1SE = _inputs(item, tools)
    step = int(state.step)
    ids = jnp.arange(len(item.texts))
    dropped_B = flow.uniform(_key(setup, step, 0), ids) < config.caption_dropout
    ctx_BSE = jnp.where(dropped_B[:, None, None], uncond_1SE, ctx_BSE)
    metrics = {
        "data/caption_dropped": dropped_B.mean(),
        "data/latent_frames": float(x0.shape[1]),
    }
    return Batch(x0, ctx_BSE, item.cond, step, metrics)


def update(state: states.State, setup: Setup, batch: Batch):
    """Take an optimizer step per expert on the batch; returns (state at step + 1, metrics)."""
    steps.check_version(batch, state)
    data, clips = _noised(batch, setup=setup), np.arange(batch.x0_B.shape[0])
    state, found = steps.take(state, setup, _slots(setup), clips, data, _couple_loss)
    return state.replace(step=state.step + 1), optim.merge_metrics(found)


def forwards(setup: Setup) -> dict[str, int]:
    """Forward passes of a step by phase, see algorithms.Extras."""
    config: Config = setup.algorithm
    return {"update": 3 * config.clips * config.timesteps * len(setup.experts)}


def programs(state: states.State, setup: Setup, tools: Tools) -> dict[str, Program]:
    """The jitted functions of a step, see algorithms.Program."""
    config: Config = setup.algorithm
    x0 = steps.shape(config.clips, *sampling.latent_shape(setup.model, setup.sampling))
    ctx = steps.shape(config.clips, *tools.uncond_1SE.shape[1:])

    def noised(x0, ctx):
        return _noised(Batch(x0, ctx, {}, 0, {}), setup=setup)

    def flops(expert):
        del expert
        lora = bool(setup.training.lora.rank)
        return steps.training_flops(setup.model.wan, steps.grid(setup), lora=lora)

    data = steps.whole(jax.eval_shape(noised, x0, ctx))
    return steps.programs(
        state, setup, _slots(setup), config.clips, lambda made: data, _couple_loss, flops=flops
    )


def validate(state, setup, item: Item, tools: Tools) -> dict[str, np.ndarray]:
    """{"eval/loss/<expert>", "eval/t<lo>-<hi>/<expert>": error [P] of each clip} of held-out clips.

    Each bin of t is measured at its middle, under noise that is the same in every call; the loss of
    an expert is the mean over its bins, without weights.
    """
    config: Config = setup.algorithm
    x0, ctx_BSE, _ = _inputs(item, tools)
    policy = states.rollout_params(state, EVALUATED)
    size, found = config.micro_samples, {}
    for expert in setup.experts:
        edges = np.linspace(*_range(setup, expert), config.bins + 1)
        for lo, hi in zip(edges[:-1], edges[1:], strict=True):
            parts = []
            for first in range(0, len(item.texts), size):
                rows = jnp.arange(first, min(first + size, len(item.texts)))
                error = _validation_error(
                    policy[expert], x0, ctx_BSE, item.cond, rows, _key(setup, 0, -1),
                    jnp.float32((lo + hi) / 2), setup=setup,
                )  # fmt: skip
                parts.append(sharding.fetch(error))
            found[f"eval/t{lo:g}-{hi:g}/{expert}"] = np.concatenate(parts)
        bins = [v for k, v in found.items() if k.endswith(f"/{expert}")]
        found[f"eval/loss/{expert}"] = np.mean(bins, axis=0)
    return found


def _couple_loss(trained, frozen, data, slot_M, clip_M, *, setup, expert):
    """Loss and scalar statistics of M (timestep, clip) couples, all of one expert."""
    config: Config = setup.algorithm
    levels = data[expert]
    t_M, weight_M = levels["t_BT"][clip_M, slot_M], levels["weight_BT"][clip_M, slot_M]
    x0 = data["x0_B"][clip_M]
    noise = sampler.initial_noise(levels["key"], clip_M * config.timesteps + slot_M, x0.shape[1:])
    policy = states.policy(setup.training, trained, frozen)
    cond = jax.tree.map(lambda a: a[clip_M], data["cond"])
    ctx = data["ctx_BSE"][clip_M]
    v, x0, noise = _predict(policy, x0, noise, t_M, ctx, cond, config=setup.model.wan)
    loss, aux = flow.flow_loss(v, x0, noise, weight_M)
    aux |= {"t": t_M.mean()}
    return loss, {f"sft/{name}": value for name, value in aux.items()}


@functools.partial(jax.jit, static_argnames=("setup",))
def _validation_error(policy, x0, ctx_BSE, cond, rows, key, t, *, setup):
    noise = sampler.initial_noise(key, rows, x0.shape[1:])
    x0, ctx_BSE, cond = jax.tree.map(lambda a: a[rows], (x0, ctx_BSE, cond))
    t_B, policy = jnp.full(rows.shape, t), sharding.to_device(policy)
    return flow.flow_error(*_predict(policy, x0, noise, t_B, ctx_BSE, cond, config=setup.model.wan))


def _predict(policy, x0, noise, t_B, ctx_BSE, cond, *, config):
    """(v, x0, noise) of the frames that are scored, at times t_B."""
    params, adapter = policy
    x0 = sampling.constrain(x0)
    x_t = flow.add_noise(x0, noise, t_B / 1000)
    v = condition.denoise(params, adapter, x_t, t_B, ctx_BSE, cond, config=config)
    given = 1 if cond and "first" in cond else 0
    return tuple(a[:, given:] for a in (v, x0, noise))


def _inputs(item: Item, tools: Tools):
    """(latents, contexts, unconditional context) of an item, contexts of one length."""
    if item.x0_PTHWC is None:
        raise ValueError(
            "the data of config.data.path are texts alone; supervised fine-tuning needs latents"
        )
    ctx_PSE, uncond_1SE = text.align(item.ctx_PSE, tools.uncond_1SE)
    return item.x0_PTHWC, ctx_PSE, uncond_1SE


def _noised(batch: Batch, *, setup) -> dict:
    """Arrays that couples gather from: clips, contexts and each expert's drawn levels [B, T]."""
    config: Config = setup.algorithm
    data: dict = {"x0_B": batch.x0_B, "ctx_BSE": batch.ctx_BSE, "cond": batch.cond}
    clips, shift = batch.x0_B.shape[0], _shift(setup)
    count = clips * config.timesteps
    for number, expert in enumerate(setup.experts):
        key = _key(setup, batch.version, 1 + number)
        lo, hi = _range(setup, expert)
        part = jax.random.permutation(jax.random.fold_in(key, 1), count)
        q = (part + flow.uniform(jax.random.fold_in(key, 2), jnp.arange(count))) / count
        t = flow.quantile(q, config.density, shift=shift, t_lo=lo, t_hi=hi)
        weight = np.ones(count) if config.weighting == "none" else flow.bell_weight(t, shift)
        shape = (clips, config.timesteps)
        data[expert] = {
            "t_BT": t.reshape(shape),
            "weight_BT": jnp.asarray(weight, jnp.float32).reshape(shape),
            "key": jax.random.fold_in(key, 3),
        }
    return data


def _key(setup, step: int, purpose: int):
    """Purposes: 0 caption dropout, 1 and up the levels and noise of an expert, -1 validation."""
    key = jax.random.fold_in(jax.random.key(setup.seed), step)
    return jax.random.fold_in(key, purpose + 1)


def _range(setup, expert: str) -> tuple[float, float]:
    """[lo, hi) of the times that an expert serves."""
    if setup.model.boundary is None:
        return 0.0, 1000.0
    edge = 1000.0 * setup.model.boundary
    return (edge, 1000.0) if expert == "high" else (0.0, edge)


def _shift(setup) -> float:
    return setup.sampling.schedule.shift


def _slots(setup) -> dict[str, list[int]]:
    """{trained expert: numbers of the timesteps of a clip}."""
    return {expert: list(range(setup.algorithm.timesteps)) for expert in setup.experts}
