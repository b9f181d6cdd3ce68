"""Scored groups of samples: what GRPO, DiffusionNFT and their siblings do alike.

P prompts get K samples each by the policy that samples; these are decoded and scored while the
device goes on, and the scores become advantages within each group.

Shapes: P prompts, K group, B samples (P·K), M rewards.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import advantages, rewards, sampling
from wanjax.algorithms import Program, Tools, steps
from wanjax.data import Item
from wanjax.models import wan
from wanjax.parallel import distributed
from wanjax.run import metrics
from wanjax.settings import GroupConfig, Setup
from wanjax.state import State


def check(setup: Setup, units: str = "samples", number: int = 0) -> None:
    """Raise ValueError when samples, updates and rollouts do not divide.

    units, number: what is divided among the optimizer steps, and how many of them; 0 = all samples.
    """
    config: GroupConfig = setup.algorithm
    if not setup.rewards.weights:
        raise ValueError("config.reward is empty; set for example config.reward.shapes = 1.0")
    samples = config.group_size * config.prompts_per_step
    number = number or samples
    if config.group_size < 2:
        raise ValueError(f"config.group_size is {config.group_size}; a group needs at least 2")
    if number % config.updates:
        raise ValueError(
            f"{number} {units} a step do not divide into config.updates = {config.updates}; change "
            "it, config.prompts_per_step or config.group_size"
        )
    if samples % setup.sampling.batch:
        raise ValueError(
            f"{samples} samples a step do not divide into rollouts of config.sampling.batch = "
            f"{setup.sampling.batch}; set it to a divisor of {samples}"
        )
    if config.advantage not in advantages.PRESETS:
        raise ValueError(
            f"config.advantage is {config.advantage!r}; expected one of {tuple(advantages.PRESETS)}"
        )


def describe(setup: Setup) -> str:
    """What one step works on."""
    config: GroupConfig = setup.algorithm
    samples = config.prompts_per_step * config.group_size
    return (
        f"{config.prompts_per_step} prompts x {config.group_size} = {samples} samples, "
        f"{config.updates} updates per rollout"
    )


def collect(state: State, setup: Setup, item: Item, tools: Tools, sample: Callable):
    """Sample K clips per prompt, score them and form advantages; returns (kept, fields).

    sample(ctx_PSE, prompt_B, key, ids) -> (final latents, what to keep) queues one call of
    sampling.batch samples; `kept` lists what it wants to keep, `fields` are the rest of a Batch:
    ctx_PSE, uncond_1SE, adv_B, version and metrics. A call is queued before the videos of the one
    before it are fetched, so rewards overlap with sampling and decoding; each process scores the
    samples that its own devices decoded. Raises FloatingPointError with step and sample for a
    reward that is not finite, and distributed.Stopped between two calls.
    """
    config: GroupConfig = setup.algorithm
    step, K, size = int(state.step), config.group_size, setup.sampling.batch
    key = jax.random.fold_in(jax.random.key(setup.seed), step)
    ctx_PSE, kept = jnp.asarray(item.ctx_PSE), []

    def queued():
        for first in range(0, K * len(ctx_PSE), size):
            distributed.check_stop()
            ids = np.arange(first, first + size)
            x0, more = sample(ctx_PSE, jnp.asarray(ids // K), key, jnp.asarray(ids))
            kept.append(more)
            yield x0, (_decode(setup, tools, x0), size)

    times: dict[str, float] = {}
    scores_MPK, found = rewards.score(
        metrics.ready(sampling.ahead(queued()), times),
        [prompt for prompt in item.texts for _ in range(K)],
        metrics.clocked(tools.reward, times, "collect/reward"), setup.rewards.weights,
        group=K, step=step, failure=setup.rewards.failure,
    )  # fmt: skip
    weights = list(setup.rewards.weights.values())
    adv_PK = advantages.group_advantages(scores_MPK, config.advantage, weights=weights)
    return kept, {
        "ctx_PSE": ctx_PSE,
        "uncond_1SE": tools.uncond_1SE,
        "adv_B": jnp.asarray(adv_PK.reshape(-1), jnp.float32),
        "version": step,
        "metrics": found | times,
    }


def shares(setup: Setup, version: int, units) -> list[np.ndarray]:
    """The units of a step in random order, divided among its optimizer steps, each part sorted."""
    order = np.random.default_rng((setup.seed, version)).permutation(units)
    return [np.sort(share) for share in np.split(order, setup.algorithm.updates)]


def passes(setup: Setup) -> dict[str, int]:
    """{expert: forward passes of one velocity}: two where guidance needs the unconditional one."""
    scales = setup.sampling.guidance
    return {expert: 1 + (getattr(scales, expert) != 1) for expert in setup.model.experts}


def rollout_forwards(setup: Setup) -> int:
    """Forward passes of one sample's rollout."""
    plan, each = setup.sampling.schedule, passes(setup)
    taken = {"high": plan.high_steps, "low": plan.steps - plan.high_steps}
    return sum(taken[expert] * each[expert] for expert in each)


def rollout_programs(
    setup: Setup, tools: Tools, policy: dict, keywords: dict
) -> dict[str, Program]:
    """{"rollout", "decode"} of one call of sampling.batch samples by an abstract policy.

    keywords: further arguments of sampling.rollout.
    """
    config: GroupConfig = setup.algorithm
    size, numbers = setup.sampling.batch, functools.partial(steps.shape, dtype=jnp.int32)
    calls = config.prompts_per_step * config.group_size // size
    given = (
        policy, _contexts(config, tools), tools.uncond_1SE, numbers(size), steps.key_shape(),
        numbers(size), numbers(setup.sampling.schedule.steps),
    )  # fmt: skip
    forward = wan.forward_flops(setup.model.wan, steps.grid(setup))
    flops = forward * size * rollout_forwards(setup)
    decoding = {"config": setup.model.vae, "tile": setup.sampling.vae_tile}
    return {
        "rollout": Program(sampling.rollout, lambda made: given, keywords, flops, calls),
        "decode": Program(
            sampling.decode, lambda made: (tools.vae, made["rollout"][0]), decoding, 0, calls
        ),
    }


def grown(tree, axis: int, samples: int):
    """Abstract arrays of one call of the rollout, as long as those of all of them together."""

    def grow(x):
        sizes = (*x.shape[:axis], samples, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(sizes, x.dtype, sharding=x.sharding)

    return jax.tree.map(grow, tree)


def batch_shapes(setup: Setup, tools: Tools) -> dict:
    """The `fields` that collect returns, abstract."""
    config: GroupConfig = setup.algorithm
    samples = config.prompts_per_step * config.group_size
    return {
        "ctx_PSE": _contexts(config, tools),
        "uncond_1SE": tools.uncond_1SE,
        "adv_B": steps.shape(samples),
    }


def pair_flops(setup: Setup, expert: str, extra: int) -> int:
    """FLOPs of one (step, sample) pair of an update: forward, backward and `extra` forwards without
    gradient, with and without the condition where there is guidance."""
    config, tokens = setup.model.wan, steps.grid(setup)
    one = steps.training_flops(config, tokens, lora=bool(setup.training.lora.rank))
    return passes(setup)[expert] * (one + extra * wan.forward_flops(config, tokens))


def _decode(setup: Setup, tools: Tools, x0):
    return sampling.decode(tools.vae, x0, config=setup.model.vae, tile=setup.sampling.vae_tile)


def _contexts(config: GroupConfig, tools: Tools):
    row = tools.uncond_1SE
    return steps.shape(config.prompts_per_step, *row.shape[1:], dtype=row.dtype)
