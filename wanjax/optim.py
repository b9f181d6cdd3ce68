"""One AdamW per expert: global-norm clipping, warm-up, decoupled weight decay on trained leaves
only (optax)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from wanjax import trees


@dataclass(frozen=True)
class OptimConfig:
    """Settings of one expert's optimizer."""

    lr: float = 1e-4
    warmup: int = 0  # optimizer steps of linear warm-up
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # global norm of the gradient; 0 = off


def make(config: OptimConfig) -> optax.GradientTransformation:
    """The transformation for a tree of weights or of adapters; adapter scales are never moved."""
    if config.lr < 0 or config.warmup < 0 or config.clip_norm < 0:
        raise ValueError(f"optim has a negative lr, warmup or clip_norm: {config}")
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adam = optax.adamw(
        learning_rate(config), config.b1, config.b2, config.eps, weight_decay=config.weight_decay
    )
    return optax.chain(clip, optax.partition({"move": adam, "keep": optax.set_to_zero()}, _labels))


def learning_rate(config: OptimConfig) -> optax.Schedule:
    """Learning rate as a function of the optimizer's own step count."""
    if not config.warmup:
        return lambda count: config.lr
    return lambda count: config.lr * jnp.minimum(1.0, (count + 1) / config.warmup)


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


def global_norm(tree) -> jax.Array:
    """Euclidean norm over all leaves."""
    return optax.tree.norm(tree)
