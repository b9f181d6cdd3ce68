"""Every algorithm's step on every mesh axis and pairs of them equals that of one device: losses,
and gradients through Adam's first moments, of all trained roles and both experts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from wanjax import state as states
from wanjax.algorithms import Tools, dmd2, grpo, nft, sft
from wanjax.data import Item
from wanjax.models import presets
from wanjax.parallel import sharding

KL = {"high": 0.1, "low": 0.1}
GROUPS = dict(group_size=4, prompts_per_step=2, micro_samples=4)
CASES = {
    "grpo": (
        grpo,
        tiny.algorithm_config(grpo, **GROUPS, clip={"high": 1e-3, "low": 1e-3}, kl_beta=KL),
    ),
    "nft": (nft, tiny.algorithm_config(nft, **GROUPS, loss="nft", kl_beta=KL)),
    "awm": (nft, tiny.algorithm_config(nft, **GROUPS, loss="awm", kl_beta=KL)),
    "dpo": (nft, tiny.algorithm_config(nft, **GROUPS, loss="dpo", kl_beta=KL)),
    "sft": (sft, tiny.algorithm_config(sft, clips=4, micro_samples=4)),
    "dmd2": (
        dmd2,
        tiny.algorithm_config(
            dmd2,
            items=2,
            group_size=2,
            micro_samples=4,
            student_every=1,
            ema_start=1,
            guidance={"high": 4.0, "low": 4.0},
        ),
    ),
}
MESHES = [
    {"data": 4}, {"fsdp": 4}, {"context": 2}, {"tensor": 2}, {"stage": 2},
    {"context": 4, "fsdp": 2},  # Ulysses 2 x ring 2
    {"stage": 2, "fsdp": 4}, {"stage": 2, "context": 4}, {"tensor": 2, "fsdp": 4},
]  # fmt: skip


def _stir(tree):
    keys = iter(jax.random.split(jax.random.key(7), 1000))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), tree)


@functools.cache
def _case(name):
    """(algorithm, setup, state with adapters that are not 0, batch of one device)."""
    algorithm, config = CASES[name]
    one = {} if algorithm is grpo else {"sampling__guidance": presets.Guidance(1.0, 1.0)}
    setup = dataclasses.replace(tiny.make_setup(**one), algorithm=config)
    if algorithm is dmd2:
        critics = {e: tiny.adamw(lr=1e-2) for e in setup.experts}
        setup = tiny.replace_training(setup, role="critic", optim=critics)
        roles = dict.fromkeys(("teacher", "critic"), setup.model)
        setup = dataclasses.replace(setup, roles=roles)
    params = tiny.parameters()
    student = {e: params[e] for e in setup.experts}
    state = algorithm.init(jax.random.key(0), setup, {"student": student})
    state = state.replace(adapters=_stir(state.adapters))
    rows, x0 = 2, None
    if algorithm is sft:
        rows = 4
        x0 = np.random.default_rng(1).normal(size=(rows, 2, 2, 2, 4)).astype(np.float32)
    ctx, uncond = tiny.contexts(rows)
    item = Item([str(n) for n in range(rows)], np.asarray(ctx), x0)
    tools = Tools(params["vae"], uncond, tiny.mean_reward)
    return algorithm, setup, state, algorithm.collect(state, setup, item, tools)


def _step(name, mesh=None):
    """(first moments, losses) of one update."""
    algorithm, setup, state, batch = _case(name)
    state = jax.tree.map(jnp.copy, state)
    with sharding.use_mesh(mesh):
        state = states.place(state, mesh) if mesh else state
        after, metrics = algorithm.update(state, setup, batch)
    moments = [np.asarray(x) for x in jax.tree.leaves((after.opt, after.role_opt)) if x.ndim > 1]
    return moments, {k: float(v) for k, v in metrics.items() if "loss" in k or "grad_norm" in k}


_one_device = functools.cache(_step)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_on_every_mesh(name, mesh):
    moments, losses = _one_device(name)
    assert all(losses[k] > 1e-3 for k in losses if "grad_norm" in k) and len(losses) >= 4
    devices = jax.devices()[: math.prod(mesh.values())]
    got, found = _step(name, sharding.make_mesh(mesh, devices))
    assert found.keys() == losses.keys()
    for key, value in losses.items():
        np.testing.assert_allclose(found[key], value, rtol=5e-4, atol=1e-6, err_msg=key)
    for a, b in zip(got, moments, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-4 * np.abs(b).max() + 1e-12)
