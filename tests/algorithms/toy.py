"""Rejection fine-tuning (RAFT, 2304.06767): flow matching on the best clip of each group.

The algorithm of CONTRIBUTING's "Adding an algorithm", in as few lines as one takes.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import optim, sampler, sampling
from wanjax import state as states
from wanjax.algorithms import groups, steps
from wanjax.losses import flow
from wanjax.models import wan
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


describe = groups.describe


def init(key, setup, params):
    return states.init(key, setup.training, params["student"], keep_reference=False)


def collect(state, setup, item, tools):
    policy, static = states.rollout_params(state), rollout_static(setup)
    slot_I = jnp.full(setup.sampling.schedule.steps, -1, jnp.int32)

    def sample(ctx_PSE, prompt_B, key, ids):
        inputs = ctx_PSE, tools.uncond_1SE, prompt_B, key, ids, slot_I
        x0, _ = sampling.rollout(policy, *inputs, **static)
        return x0, x0

    latents, fields = groups.collect(state, setup, item, tools, sample)
    K = setup.algorithm.group_size
    best = np.asarray(fields["adv_B"]).reshape(-1, K).argmax(1)
    x0 = jnp.concatenate(latents)[best + np.arange(len(best)) * K]
    return Batch(x0, fields["ctx_PSE"], fields["version"], fields["metrics"])


def rollout_static(setup):
    return {"model": setup.model, "plan": setup.sampling}


def update(state, setup, batch):
    steps.check_version(batch, state)
    data, prompts = _data(batch, setup=setup), np.arange(len(batch.x0_P))
    state, found = steps.take(state, setup, _slots(setup), prompts, data, _pair_loss)
    return state.replace(step=state.step + 1), optim.merge_metrics(found)


def programs(state, setup, tools):
    policy, prompts = states.rollout_params(state), setup.algorithm.prompts_per_step

    def data(made):
        x0 = groups.grown(made["rollout"][0], 0, prompts)
        ctx = steps.shape(prompts, *tools.uncond_1SE.shape[1:])
        shapes = jax.eval_shape(lambda x0, ctx: _data(Batch(x0, ctx, 0, {}), setup=setup), x0, ctx)
        return steps.whole(shapes)

    found = groups.rollout_programs(setup, tools, policy, rollout_static(setup))
    return found | steps.programs(
        state, setup, _slots(setup), prompts, data, _pair_loss,
        flops=lambda expert: groups.pair_flops(setup, expert, extra=0),
    )  # fmt: skip


def _pair_loss(trained, frozen, data, slot_M, prompt_M, *, setup, expert):
    """Flow matching on M clips, at one time of each."""
    del slot_M
    x0, noise, t_M = (data[name][prompt_M] for name in ("x0_P", "noise_P", expert))
    params, adapter = states.policy(setup.training, trained, frozen)
    x_t, ctx = flow.add_noise(x0, noise, t_M / 1000), data["ctx_PSE"][prompt_M]
    v = wan.denoise(params, adapter, x_t, t_M, ctx, config=setup.model.wan)
    value, aux = flow.flow_loss(v, x0, noise)
    return value, {f"toy/{name}": a for name, a in aux.items()}


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
