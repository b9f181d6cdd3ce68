"""Optimizer steps over micro-batches, as every algorithm takes them, and what they cost.

An algorithm gives the loss of M pairs (step, sample) of one expert; see `minibatch`.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampling
from wanjax import state as states
from wanjax.algorithms import Program
from wanjax.models import wan
from wanjax.parallel import sharding
from wanjax.settings import MicroConfig, Setup, TrainingConfig
from wanjax.state import State


def check_version(batch, state: State) -> None:
    """Raise ValueError for a batch made by a different policy from the current one."""
    if batch.version != int(state.step):
        raise ValueError(f"batch of policy {batch.version} given to policy {int(state.step)}")


def index_sets(slots: dict, samples, config: MicroConfig) -> list[dict]:
    """`optim.micro_batches` as the run's settings cut them; slots: expert -> its steps."""
    return optim.micro_batches(
        slots, samples, micro_samples=config.micro_samples, micro_steps=config.micro_steps,
        mix=config.mix_experts,
    )  # fmt: skip


def batches(slots: dict, samples: int, config: MicroConfig) -> set[int]:
    """Sizes of the micro-batches of an optimizer step on so many samples."""
    found = index_sets(slots, np.arange(samples), config)
    return {slot.shape[1] for index in found for blocks in index.values() for slot, _ in blocks}


def parts(state: State, training: TrainingConfig, experts: Iterable[str]) -> tuple:
    """(trained trees, optimizer states, frozen trees) of some experts of the student."""
    trees = states.trainable(state, training), state.opt, states.frozen(state, training)
    return tuple({expert: tree[expert] for expert in experts} for tree in trees)


def take(state: State, setup: Setup, slots: dict, samples, data: dict, pair_loss: Callable):
    """One optimizer step for each trained expert on the samples; returns (state, metrics).

    slots: expert -> its steps; data, pair_loss: see `minibatch`.
    """
    found = []
    for index in index_sets(slots, samples, setup.algorithm):
        trained, opt, metrics = minibatch(
            *parts(state, setup.training, index), index, data, pair_loss=pair_loss, setup=setup
        )
        state = states.replace_trainable(state, setup.training, trained)
        state = states.replace_optimizers(state, opt)
        found.append(metrics)
    return state, found


@functools.partial(sharding.InPlace, 2, static_argnames=("pair_loss", "setup"))
def minibatch(trained, opt, frozen, index, data, *, pair_loss: Callable, setup: Setup):
    """One optimizer step for each expert in `index`; returns (trained, opt, metrics). What is
    trained, and its optimizer states, are replaced in place: the arrays given are gone.

    pair_loss(trained tree, frozen tree, data, slot_M, sample_M, *, setup, expert) -> (mean loss of
    M pairs of one expert, {name: statistic}) gathers the pairs from the arrays of `data`; the
    program is compiled for this very function, so it is one of a module.
    """
    frozen = sharding.to_device(frozen)

    def loss(expert, tree, pairs):
        return pair_loss(tree, frozen[expert], data, *pairs, setup=setup, expert=expert)

    return optim.step(loss, trained, opt, index, setup.training.optim["student"])


def merged(collected: list[list[dict]], version: int) -> dict:
    """Metrics of a step from those of its optimizer steps, in order; in the first step of a run
    those of the first optimizer step are also reported under optim.START + name."""
    flat = [metrics for found in collected for metrics in found]
    return optim.merge_metrics(flat, len(collected[0]) if version == 0 else 0)


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


def grid(setup: Setup) -> tuple[int, int, int]:
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
    state: State, setup: Setup, slots: dict, samples: int, data: Callable, pair_loss: Callable,
    *, flops: Callable, calls: int = 1,
) -> dict[str, Program]:  # fmt: skip
    """{"update <experts>": Program} of `minibatch` on the micro-batches of an optimizer step.

    data: abstract outputs of earlier phases -> its arrays; flops: expert -> FLOPs of one pair;
    calls: optimizer steps of an expert.
    """
    found, keywords = {}, {"pair_loss": pair_loss, "setup": setup}
    for index in index_sets(slots, np.arange(samples), setup.algorithm):

        def arguments(made, index=index):
            return (*parts(state, setup.training, index), whole(index), data(made))

        pairs = {e: sum(slot.size for slot, _ in blocks) for e, blocks in index.items()}
        total = sum(count * flops(expert) for expert, count in pairs.items())
        found[f"update {'+'.join(index)}"] = Program(minibatch, arguments, keywords, total, calls)
    return found
