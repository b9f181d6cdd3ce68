"""Policy -> latents -> pixels, for rollouts, evaluation, previews and `wanjax.sample` alike.

A policy is {expert: (params, adapter tree or {})}. Every function takes the part of the settings
that it needs: the model, its sampler (settings.SamplingConfig) and, where steps are stochastic, the
transition kernel.

Dimensions: B batch  T latent frames  H W latent height/width  C channels  S text rows  E text dim
I sampler steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import sampler, settings
from wanjax.models import condition, presets, vae, wan
from wanjax.parallel import sharding


def velocity(
    policy, ctx_BSE, uncond_1SE, cond=None, *, config: wan.WanConfig, scale: float, mode: str
):
    """The guided velocity (x, t_B) -> v of one expert (params, adapter), for sampler and losses.

    scale: guidance, 1 runs without the unconditional pass; mode: see sampler.GUIDANCE_MODES.
    """
    params, adapter = policy
    uncond_BSE = jnp.broadcast_to(uncond_1SE, (len(ctx_BSE), *uncond_1SE.shape[1:]))

    def run(x, t_B, inputs):
        return condition.denoise(params, adapter, x, t_B, *inputs, config=config)

    return sampler.cfg(run, scale, (ctx_BSE, cond), (uncond_BSE, cond), mode=mode)


def velocities(
    policy, ctx_BSE, uncond_1SE, cond=None, *,
    config: wan.WanConfig, plan: settings.SamplingConfig,
) -> dict:  # fmt: skip
    """{expert: guided velocity (x, t_B) -> v} of a policy, for the two-phase sampler."""
    return {
        expert: velocity(
            own, ctx_BSE, uncond_1SE, cond,
            config=config, scale=getattr(plan.guidance, expert), mode=plan.guidance_mode,
        )
        for expert, own in sharding.to_device(policy).items()
    }  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "plan", "sde"))
def latents(
    policy, ctx_BSE, uncond_1SE, key, ids, cond=None, *,
    model: presets.ModelConfig, plan: settings.SamplingConfig,
    sde: settings.SdeConfig | None = None, stochastic_I: Any = None,
):  # fmt: skip
    """Final latents [B, T, H, W, C] float32 by the solver; sample i depends on (key, ids[i]).

    ctx_BSE: one text context per sample; cond: as of condition.first_frame, for image-to-video;
    sde: kernel that takes the steps where stochastic_I, a bool per step, is true.
    """
    x = initial_noise(key, ids, latent_shape(model, plan))
    run = velocities(policy, ctx_BSE, uncond_1SE, cond, config=model.wan, plan=plan)
    if sde is not None:
        slot_I = jnp.where(stochastic_I, 0, -1)  # one slot for all: nobody reads the transitions
        x0, _ = sampler.rollout(
            run, x, key, ids, plan.schedule, slot_I,
            slots=1, kind=sde.kind, eta=sde.eta, solver=plan.solver,
        )  # fmt: skip
    elif plan.solver == "renoise":
        x0 = sampler.few_step(run, x, key, ids, plan.schedule, renoise=True)
    else:
        x0 = sampler.sample(run, x, plan.schedule, solver=plan.solver)
    return condition.hold(x0, cond)


@functools.partial(jax.jit, static_argnames=("config", "tile"))
def decode(vae_params, x0_BTHWC, *, config: vae.VAEConfig, tile: int):
    """Latents to uint8 video [B, frames, height, width, 3]; tile: side in pixels, 0 = whole."""
    if tile:
        video = vae.decode_tiled(vae_params, x0_BTHWC, config=config, tile=tile)
    else:
        video = vae.decode(vae_params, x0_BTHWC, config=config)
    return jnp.round((video.astype(jnp.float32) + 1) * 127.5).astype(jnp.uint8)


def generate(
    policy, vae_params, ctx_BSE, uncond_1SE, *,
    model: presets.ModelConfig, plan: settings.SamplingConfig,
    seed: int, first_id: int = 0, cond=None,
):  # fmt: skip
    """uint8 videos (numpy) [B, frames, height, width, 3] of B contexts by the solver.

    cond: first frames as of models.condition, or None. Sample i starts from the noise of
    (seed, first_id + i), whatever the batching.
    """
    count, videos = len(ctx_BSE), []
    for first in range(0, count, plan.batch):
        # the last batch keeps its shape
        rows = np.minimum(np.arange(first, first + plan.batch), count - 1)
        given = {name: a[rows] for name, a in (cond or {}).items()}
        x0 = latents(
            policy, jnp.asarray(ctx_BSE[rows]), uncond_1SE, jax.random.key(seed),
            jnp.asarray(rows + first_id), given, model=model, plan=plan,
        )  # fmt: skip
        videos.append(decode(vae_params, x0, config=model.vae, tile=plan.vae_tile))
    return np.concatenate([sharding.fetch(v) for v in videos])[:count]


def initial_noise(key, ids, shape):
    """`sampler.initial_noise` [B, *shape], split over the mesh like a batch."""
    return constrain(sampler.initial_noise(key, ids, shape))


def constrain(x_BTHWC):
    """Latents split over the mesh like a batch."""
    return sharding.constrain(x_BTHWC, "batch", None, None, None, None)


def latent_shape(
    model: presets.ModelConfig, plan: settings.SamplingConfig
) -> tuple[int, int, int, int]:
    """(T, H, W, C) of one sample's latents; raises ValueError for sizes the model cannot make."""
    code, patch = model.vae, model.wan.patch_size
    side, times = code.scale_factor_spatial, code.scale_factor_temporal
    step = tuple(side * p for p in patch[1:])
    if plan.height % step[0] or plan.width % step[1]:
        raise ValueError(
            f"size {plan.height}x{plan.width} does not divide by {step[0]}x{step[1]}; "
            "set config.sampling.height and width to multiples of it"
        )
    if (plan.frames - 1) % times:
        raise ValueError(f"config.sampling.frames is {plan.frames}; expected {times}·n + 1")
    if plan.vae_tile < 0 or plan.vae_tile % (4 * side):
        raise ValueError(
            f"config.sampling.vae_tile is {plan.vae_tile}; expected 0, or pixels in multiples of "
            f"{4 * side}"
        )
    return (plan.frames - 1) // times + 1, plan.height // side, plan.width // side, code.z_dim


def token_grid(model: presets.ModelConfig, latents_THWC) -> tuple[int, int, int]:
    """Tokens in time, height and width of latents of the shape [T, H, W, C]."""
    t, h, w = model.wan.patch_size
    T, H, W = latents_THWC[:3]
    return T // t, H // h, W // w


def note(plan: settings.SamplingConfig) -> dict:
    """How a trained model is to be sampled, as exports say it (JSON): what makes the levels, and
    the levels themselves (sigmas, with the shift applied)."""
    schedule, guidance = plan.schedule, plan.guidance
    return {
        "grid": schedule.grid,
        "steps": schedule.steps,
        "shift": schedule.shift,
        "boundary": schedule.boundary,
        "solver": plan.solver,
        "guidance": {"high": guidance.high, "low": guidance.low},
        "sigmas": schedule.sigmas[:-1].tolist(),
    }
