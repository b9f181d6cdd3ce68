"""One AdamW per expert, and one optimizer step over micro-batches of pairs (sample, step).

Gradients are accumulated as sum over rows / number of rows, so that micro-batches of unequal size
give the exact mean; every expert has its own gradient clipping, warm-up and moments (optax). A
micro-batch may hold pairs of both experts.

Shapes: B samples, n micro-batches of M pairs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wanjax import trees
from wanjax.settings import OptimConfig

START = "start/"  # prefix of the metrics of a run's first optimizer step


def make(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation for a tree of weights or of adapters; adapter scales never change."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    rate, decay = learning_rate(config), config.weight_decay
    adam = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=decay)
    return optax.chain(clip, optax.partition({"move": adam, "keep": optax.set_to_zero()}, _labels))


def learning_rate(config: OptimConfig) -> optax.Schedule:
    """Learning rate as a function of the optimizer's own step count."""
    lr, warmup, decay = config.lr, config.warmup, config.decay

    def rise(count):  # optax.linear_schedule loses digits where the rate is small
        return lr * ((count + 1) / warmup)

    pieces, edges = [optax.constant_schedule(lr)], []
    if decay:  # compiled, the linear piece ends at −1e-10 and not at 0
        pieces = [optax.linear_schedule(lr, 0.0, decay), optax.constant_schedule(0.0)]
        edges = [warmup + decay]
    if warmup:
        pieces, edges = [rise, *pieces], [warmup, *edges]
    return optax.join_schedules(pieces, edges)


def step(loss: Callable, trained: dict, opt: dict, index: dict, configs: dict):
    """One optimizer step for each expert of `index`; returns (trained, opt, metrics).

    loss(expert, its trained tree, its rows of the micro-batch) -> (mean over its rows, {name:
    scalar or vector}), for one entry of the leading axis of an array in index {expert: (arrays
    [n, M], ...)}: one entry per size M of micro-batch, with the same n for every expert. Scalars
    come back as [micro-batches], or once per row where sizes differ, so that their mean is the mean
    over rows.
    """
    largest = {expert: max(map(_rows, blocks)) for expert, blocks in index.items()}

    def together(trained, micro):
        parts = {expert: loss(expert, trained[expert], micro[expert]) for expert in micro}
        share = {e: jax.tree.leaves(pairs)[0].shape[0] / largest[e] for e, pairs in micro.items()}
        total = sum(part[0] * share[e] for e, part in parts.items())
        return total, {e: part[1] for e, part in parts.items()}

    def accumulate(total, micro):
        gradient, aux = jax.grad(together, has_aux=True)(trained, micro)
        return jax.tree.map(jnp.add, total, gradient), aux

    total, found = jax.tree.map(jnp.zeros_like, trained), []
    for k in range(len(next(iter(index.values())))):
        total, aux = jax.lax.scan(accumulate, total, {e: blocks[k] for e, blocks in index.items()})
        found.append(aux)
    moved, new_opt, metrics = {}, {}, {}
    for expert, tree in trained.items():
        blocks = index[expert]
        count = sum(len(jax.tree.leaves(b)[0]) * _rows(b) / largest[expert] for b in blocks)
        aux = _joined([part[expert] for part in found], list(map(_rows, blocks)))
        gradient = jax.tree.map(lambda g, count=count: g / count, total[expert])
        updates, new_opt[expert] = make(configs[expert]).update(gradient, opt[expert], tree)
        moved[expert] = optax.apply_updates(tree, updates)
        metrics |= {f"{name}/{expert}": value for name, value in aux.items()}
        metrics[f"grad_norm/{expert}"] = optax.tree.norm(gradient)
        taken = optax.tree_utils.tree_get_all_with_path(new_opt[expert], "count")[0][1]
        metrics[f"lr/{expert}"] = jnp.asarray(learning_rate(configs[expert])(taken - 1))
    return moved, new_opt, metrics


def micro_batches(slots: dict, samples, *, micro_samples: int, micro_steps: int, mix: bool) -> list:
    """Index sets {expert: ((slot [n, M], sample [n, M]), ...)}, one optimizer step each, with one
    entry for every size M of micro-batch.

    slots: expert -> numbers of its steps; samples: the samples of this optimizer step. Pure sets
    hold micro_samples x micro_steps pairs a micro-batch; mixed ones hold all steps of
    micro_samples samples, grouped by expert. The last ones hold what is left.
    """

    def pairs(numbers, width):
        for chosen in _cut(samples, micro_samples):
            for chunk in _cut(numbers, width):
                slot, sample = np.meshgrid(chunk, chosen, indexing="ij")
                yield slot.ravel().astype(np.int32), sample.ravel().astype(np.int32)

    present = {expert: numbers for expert, numbers in slots.items() if len(numbers)}
    if mix:
        return [{e: _by_size(pairs(numbers, len(numbers))) for e, numbers in present.items()}]
    return [{e: _by_size(pairs(numbers, micro_steps))} for e, numbers in present.items()]


def parts(samples, size: int) -> tuple:
    """Samples as index arrays (([n, M],), ...) of micro-batches of `size`, and of the rest."""
    return _by_size((chunk,) for chunk in _cut(np.asarray(samples, np.int32), size))


def _by_size(micro) -> tuple:
    """Micro-batches, tuples of arrays [M], each stacked with others of its size to [n, M]."""
    sizes: dict[int, list] = {}
    for arrays in micro:
        sizes.setdefault(len(arrays[0]), []).append(arrays)
    return tuple(tuple(map(np.stack, zip(*rows, strict=True))) for rows in sizes.values())


def _cut(values, size: int) -> list:
    return [values[i : i + size] for i in range(0, len(values), size)]


def merge_metrics(collected: list[dict], first: int = 0) -> dict:
    """Reduce micro-batches and optimizer steps: extremes of *_min and *_max, the last lr, else
    means.

    first: how many came before any update; these are also reported under START + name.
    """
    if 0 < first < len(collected):
        begun = {START + name: value for name, value in merge_metrics(collected[:first]).items()}
        return merge_metrics(collected) | begun
    gathered: dict[str, list] = {}
    for metrics in collected:
        for name, value in metrics.items():
            gathered.setdefault(name, []).append(jnp.atleast_1d(value))
    return {name: _reduce(name)(jnp.concatenate(values)) for name, values in gathered.items()}


def _reduce(name: str) -> Callable:
    """How values of the metric `name`/expert become one."""
    if name.startswith("lr/"):
        return lambda values: values[-1]
    return {"min": jnp.min, "max": jnp.max}.get(name.split("/")[-2].split("_")[-1], jnp.mean)


def _rows(block) -> int:
    """M of arrays [n, M]."""
    return jax.tree.leaves(block)[0].shape[1]


def _joined(found: list, rows: list[int]):
    """Statistics of micro-batches of several sizes in one array each; scalars once per row."""

    def join(*parts):
        if len(parts) > 1 and parts[0].ndim == 1:
            parts = [jnp.repeat(x, times) for x, times in zip(parts, rows, strict=True)]
        return jnp.concatenate(parts)

    return jax.tree.map(join, *found)


def _labels(tree):
    """Keep every `scale` with an `a` beside it: it is an adapter's, not a norm's."""
    paths = trees.flatten(tree)
    fixed = {path for path in paths if path.endswith("/scale") and path[:-5] + "a" in paths}
    return trees.unflatten({path: "keep" if path in fixed else "move" for path in paths})
