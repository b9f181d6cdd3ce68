"""Rejection fine-tuning (RAFT, 2304.06767): flow matching on the best clip of each group.

The algorithm of CONTRIBUTING's "Adding an algorithm", in as few lines as one takes.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampler, sampling
from wanjax import state as states
from wanjax.algorithms import groups, steps
from wanjax.losses import flow
from wanjax.models import wan
from wanjax.parallel import sharding
from wanjax.settings import GroupConfig, fields_of

DATA, ROLES, EVALUATED = "prompts", (), "default"


@dataclass(frozen=True, eq=False)
class Batch:
    """The best clip of each prompt."""

    x0_P: jax.Array
    ctx_PSE: jax.Array
    version: int
    metrics: dict


def make_config(config, roles):
    del roles
    return GroupConfig(**fields_of(GroupConfig, config))


def check(setup):
    groups.check(setup, "prompts", setup.algorithm.prompts_per_step)


def batches(setup):
    return steps.batches(_slots(setup), setup.algorithm.prompts_per_step, setup.algorithm)


def describe(setup):
    return groups.describe(setup)


def init(key, setup, params):
    return states.init(key, setup.training, params["student"], keep_reference=False)


def collect(state, setup, item, tools):
    policy = states.rollout_params(state)

    def sample(ctx_BSE, key, ids):
        x0 = sampling.latents(
            policy, ctx_BSE, tools.uncond_1SE, key, ids, model=setup.model, plan=setup.sampling
        )
        return x0, x0

    latents, fields = groups.collect(state, setup, item, tools, sample)
    K = setup.algorithm.group_size
    best = np.asarray(fields["adv_B"]).reshape(-1, K).argmax(1)
    best += np.arange(len(best)) * K
    x0 = jnp.concatenate(latents)[best]
    return Batch(x0, fields["ctx_BSE"][best], fields["version"], fields["metrics"])


def update(state, setup, batch):
    steps.check_version(batch, state)
    data = _data(batch, setup=setup)

    def minibatch(trained, opt, frozen, index):
        return _minibatch(trained, opt, frozen, data, index, setup=setup)

    prompts = np.arange(len(batch.x0_P))
    index_sets = steps.index_sets(_slots(setup), prompts, setup.algorithm)
    state, found = steps.take(state, setup.training, index_sets, minibatch)
    return state.replace(step=state.step + 1), optim.merge_metrics(found)


def programs(state, setup, tools):
    policy, prompts = states.rollout_params(state), setup.algorithm.prompts_per_step

    def data(made):
        x0 = groups.grown(made["rollout"], 0, prompts)
        ctx = steps.shape(prompts, *tools.uncond_1SE.shape[1:])
        shapes = jax.eval_shape(lambda x0, ctx: _data(Batch(x0, ctx, 0, {}), setup=setup), x0, ctx)
        return steps.whole(shapes)

    keywords = {"model": setup.model, "plan": setup.sampling}
    found = groups.rollout_programs(
        setup, tools, sampling.latents, lambda *given: (policy, *given), keywords, lambda out: out
    )
    return found | steps.programs(
        _minibatch, {"setup": setup}, state, setup.training,
        steps.index_sets(_slots(setup), np.arange(prompts), setup.algorithm), data,
        flops=lambda expert: groups.pair_flops(setup, expert, extra=0),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="setup", donate_argnames="opt")
def _minibatch(trained, opt, frozen, data, index, *, setup):
    frozen = sharding.to_device(frozen)

    def loss(expert, tree, pairs):
        slot_M, prompt_M = pairs
        del slot_M
        x0, noise = data["x0_P"][prompt_M], data["noise_P"][prompt_M]
        t_M = data[expert][prompt_M]
        params, adapter = states.policy(setup.training, tree, frozen[expert])
        x_t = flow.add_noise(x0, noise, t_M / 1000)
        v = wan.denoise(
            params, adapter, x_t, t_M, data["ctx_PSE"][prompt_M], config=setup.model.wan
        )
        value, aux = flow.flow_loss(v, x0, noise)
        return value, {f"toy/{name}": a for name, a in aux.items()}

    return optim.step(loss, trained, opt, index, setup.training.optim["student"])


def _data(batch, *, setup):
    """Clips, their noise, and a time of each inside the range of each expert."""
    key = jax.random.fold_in(jax.random.key(setup.seed + 2), batch.version)
    ids, edge = jnp.arange(len(batch.x0_P)), 1000 * (setup.model.boundary or 0.0)
    u_P = flow.uniform(jax.random.fold_in(key, 1), ids)
    noise = sampler.initial_noise(key, ids, batch.x0_P.shape[1:])
    data = {"x0_P": batch.x0_P, "ctx_PSE": batch.ctx_PSE, "noise_P": noise}
    return data | {"high": edge + (999 - edge) * u_P, "low": edge * u_P}


def _slots(setup):
    return {expert: [0] for expert in setup.experts}
