"""One AdamW per expert, and one optimizer step over micro-batches of pairs (sample, step).

Gradients are accumulated as the exact mean over micro-batches of equal size; every expert has its
own gradient clipping, warm-up and moments (optax). A micro-batch may hold pairs of both experts.

Shapes: B samples, n micro-batches of M pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wanjax import trees

START = "start/"  # before names of metrics of a run's first optimizer step


@dataclass(frozen=True)
class OptimConfig:
    """Settings of one expert's optimizer."""

    lr: float = 1e-4
    warmup: int = 0  # optimizer steps of linear warm-up
    decay: int = 0  # optimizer steps of linear decay to 0 that follow; 0 = constant
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # global norm of the gradient; 0 = off


def make(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation for a tree of weights or of adapters; adapter scales are never moved."""
    if min(config.lr, config.warmup, config.decay, config.clip_norm) < 0:
        raise ValueError(f"optim has a negative lr, warmup, decay or clip_norm: {config}")
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adam = optax.adamw(
        learning_rate(config), config.b1, config.b2, config.eps, weight_decay=config.weight_decay
    )
    return optax.chain(clip, optax.partition({"move": adam, "keep": optax.set_to_zero()}, _labels))


def learning_rate(config: OptimConfig) -> optax.Schedule:
    """Learning rate as a function of the optimizer's own step count."""

    def rate(count):
        rise = (count + 1) / config.warmup if config.warmup else 1.0
        fall = 1 - (count - config.warmup) / config.decay if config.decay else 1.0
        return config.lr * jnp.maximum(jnp.minimum(jnp.minimum(rise, fall), 1.0), 0.0)

    return rate


def step(loss: Callable, trained: dict, opt: dict, index: dict, configs: dict):
    """One optimizer step for each expert of `index`; returns (trained, opt, metrics).

    loss(expert, its trained tree, its rows of the micro-batch) -> (scalar, {name: scalar}), for
    one entry of the leading axis of index {expert: arrays [n, ...]}; gradients are averaged over
    the n micro-batches.
    """

    def together(trained, micro):
        parts = {expert: loss(expert, trained[expert], micro[expert]) for expert in micro}
        return sum(part[0] for part in parts.values()), {e: part[1] for e, part in parts.items()}

    def accumulate(total, micro):
        gradient, aux = jax.grad(together, has_aux=True)(trained, micro)
        return jax.tree.map(jnp.add, total, gradient), aux

    total, aux = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, trained), index)
    count = jax.tree.leaves(index)[0].shape[0]
    moved, new_opt, metrics = {}, {}, {}
    for expert, tree in trained.items():
        gradient = jax.tree.map(lambda g: g / count, total[expert])
        updates, new_opt[expert] = make(configs[expert]).update(gradient, opt[expert], tree)
        moved[expert] = optax.apply_updates(tree, updates)
        metrics |= {f"{name}/{expert}": value for name, value in aux[expert].items()}
        metrics[f"grad_norm/{expert}"] = optax.tree.norm(gradient)
        taken = optax.tree_utils.tree_get_all_with_path(new_opt[expert], "count")[0][1]
        metrics[f"lr/{expert}"] = jnp.asarray(learning_rate(configs[expert])(taken - 1))
    return moved, new_opt, metrics


def micro_batches(slots: dict, samples, *, micro_samples: int, micro_steps: int, mix: bool) -> list:
    """Index sets {expert: (slot [n, M], sample [n, M])}, one optimizer step each.

    slots: expert -> numbers of its steps; samples: the samples of this optimizer step. Pure sets
    hold micro_samples x micro_steps pairs a micro-batch; mixed ones hold all steps of
    micro_samples samples, grouped by expert.
    """

    def pairs(numbers, width):
        rows = []
        for chosen in np.reshape(samples, (-1, micro_samples)):
            for chunk in np.reshape(numbers, (-1, width)):
                slot, sample = np.meshgrid(chunk, chosen, indexing="ij")
                rows.append((slot.ravel(), sample.ravel()))
        slot, sample = zip(*rows, strict=True)
        return np.stack(slot).astype(np.int32), np.stack(sample).astype(np.int32)

    present = {expert: numbers for expert, numbers in slots.items() if len(numbers)}
    if mix:
        return [{expert: pairs(numbers, len(numbers)) for expert, numbers in present.items()}]
    return [{expert: pairs(numbers, micro_steps)} for expert, numbers in present.items()]


def merge_metrics(collected: list[dict], first: int = 0) -> dict:
    """Reduce micro-batches and optimizer steps: extremes of *_min and *_max, the last lr, else
    means.

    first: how many came before anything moved; their own values are told as START + name too.
    """
    if 0 < first < len(collected):
        begun = {START + name: value for name, value in merge_metrics(collected[:first]).items()}
        return merge_metrics(collected) | begun
    gathered: dict[str, list] = {}
    for metrics in collected:
        for name, value in metrics.items():
            gathered.setdefault(name, []).append(jnp.atleast_1d(value))
    pick = {"min": jnp.min, "max": jnp.max, "lr": lambda values: values[-1]}
    word = lambda name: "lr" if name.startswith("lr/") else name.split("/")[-2].split("_")[-1]
    return {
        name: pick.get(word(name), jnp.mean)(jnp.concatenate(values))
        for name, values in gathered.items()
    }


def _labels(tree):
    return trees.map_paths(
        lambda path, _: "keep" if path.endswith("/scale") and _beside_a(path, tree) else "move",
        tree,
    )


def _beside_a(path: str, tree) -> bool:
    """Whether a `scale` belongs to an adapter (it lies beside `a`), not to a norm."""
    node = tree
    for name in path.split("/")[:-1]:
        node = node[name]
    return "a" in node
