"""Optimizer steps over micro-batches, as every algorithm takes them, and what they cost.

An algorithm's jitted `minibatch(trained, opt, frozen, …, data, index)` takes one optimizer step for
each expert of an index set of optim.micro_batches and returns (trained, opt, metrics).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampling, settings
from wanjax import state as states
from wanjax.algorithms import Program
from wanjax.models import wan


def check_version(batch, state: states.State) -> None:
    """Raise ValueError for a batch that another policy than the current one has made."""
    if batch.version != int(state.step):
        raise ValueError(f"batch of policy {batch.version} given to policy {int(state.step)}")


def index_sets(slots: dict, samples, config: settings.MicroConfig) -> list[dict]:
    """`optim.micro_batches` as the run's settings cut them; slots: expert -> its steps."""
    return optim.micro_batches(
        slots, samples, micro_samples=config.micro_samples, micro_steps=config.micro_steps,
        mix=config.mix_experts,
    )  # fmt: skip


def batches(slots: dict, samples: int, config: settings.MicroConfig) -> set[int]:
    """Sizes of the micro-batches of an optimizer step on so many samples."""
    found = index_sets(slots, np.arange(samples), config)
    return {slot.shape[1] for index in found for blocks in index.values() for slot, _ in blocks}


def parts(state: states.State, training: settings.TrainingConfig, experts: Iterable[str]) -> tuple:
    """(trained trees, optimizer states, frozen trees) of some experts of the student."""
    trees = (
        states.trainable(state, training), states.optimizers(state),
        states.frozen(state, training),
    )  # fmt: skip
    return tuple({expert: tree[expert] for expert in experts} for tree in trees)


def take(
    state: states.State, training: settings.TrainingConfig, index_sets: list[dict],
    minibatch: Callable,
) -> tuple[states.State, list[dict]]:  # fmt: skip
    """One optimizer step for each expert of each index set; returns (state, metrics of each).

    minibatch(trained, opt, frozen, index) -> (trained, opt, metrics).
    """
    found = []
    for index in index_sets:
        trained, opt, metrics = minibatch(*parts(state, training, index), index)
        state = states.replace_trainable(state, training, trained)
        state = states.replace_optimizers(state, opt)
        found.append(metrics)
    return state, found


def merged(collected: list[list[dict]], version: int) -> dict:
    """Metrics of a step from those of its optimizer steps, in order; in the first step of a run
    those of the first optimizer step are also reported under optim.START + name."""
    flat = [metrics for found in collected for metrics in found]
    return optim.merge_metrics(flat, len(collected[0]) if version == 0 else 0)


def pairs(index: dict) -> dict[str, int]:
    """{expert: number of (step, sample) pairs} of an index set."""
    return {e: sum(slot.size for slot, _ in blocks) for e, blocks in index.items()}


def training_flops(config: wan.WanConfig, grid, *, lora: bool) -> int:
    """FLOPs of forward and backward of one sample: backward costs 2.5x of attention (its kernel
    computes the logits again) and 2x of the matmuls, 1x where weights get no gradient; what the
    policy config.remat repeats is counted, but for the little of attention to text."""
    forward = wan.forward_flops(config, grid)
    L, D = math.prod(grid), config.dim
    attention = config.num_layers * 4 * D * L * (L + config.text_len)
    dense = forward - attention
    again = {"none": 0, "save_matmuls": 0, "full": forward}.get(config.remat, dense)
    return int(forward + again + (1 if lora else 2) * dense + 2.5 * attention)


def grid(setup: settings.Setup) -> tuple[int, int, int]:
    """Tokens in time, height and width of a sample."""
    return sampling.token_grid(setup.model, sampling.latent_shape(setup.model, setup.sampling))


def whole(tree) -> Any:
    """The shapes of a tree of arrays, each whole on every device of the mesh in use."""
    where = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def shape(*sizes: int, dtype=jnp.float32) -> Any:
    """The shape of an array that is whole on every device of the mesh in use."""
    return whole(jax.ShapeDtypeStruct(sizes, dtype))


def key_shape() -> Any:
    """The shape of a random key."""
    return whole(jax.eval_shape(lambda: jax.random.key(0)))


def programs(
    function, static: dict, state: states.State, training: settings.TrainingConfig,
    index_sets: list[dict], data: Callable, *, flops: Callable, calls: int = 1,
    beside: Callable = lambda experts: (),
) -> dict[str, Program]:  # fmt: skip
    """{"update <experts>": Program} of a minibatch function, one for each index set.

    static: its keyword arguments; data: abstract outputs of earlier phases -> the arrays that it
    gathers from; beside: experts -> what it takes between the frozen trees and the data; flops:
    expert -> FLOPs of one (step, sample) pair; calls: optimizer steps of an expert.
    """
    found = {}
    for index in index_sets:

        def arguments(made, index=index):
            return (*parts(state, training, index), *beside(index), data(made), whole(index))

        total = sum(count * flops(expert) for expert, count in pairs(index).items())
        found[f"update {'+'.join(index)}"] = Program(function, arguments, static, total, calls)
    return found
