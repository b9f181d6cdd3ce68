"""Policy -> latents -> pixels, for rollouts, evaluation, previews and `wanjax.sample` alike.

A policy is {expert: (params, adapter tree or {})}. Every function takes the part of the settings
that it needs: the model, its sampler (settings.SamplingConfig) and, where steps are stochastic, the
transition kernel.

Dimensions: B batch  T latent frames  H W latent height/width  C channels  S text rows  E text dim
I sampler steps.
"""

import functools
from collections.abc import Iterator

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


@functools.partial(jax.jit, static_argnames=("model", "plan", "sde", "slots", "keep_mean"))
def rollout(
    policy, ctx_PSE, uncond_1SE, prompt_B, key, ids, slot_I, cond=None, first_ids=None, *,
    model: presets.ModelConfig, plan: settings.SamplingConfig,
    sde: settings.SdeConfig | None = None, slots: int = 0, keep_mean: bool = False,
):  # fmt: skip
    """(final latents [B, T, H, W, C] float32 by the solver, sampler.Trajectory of `slots`
    transitions or None); sample i depends on (key, ids[i]).

    Args:
      ctx_PSE, prompt_B: text contexts, and which of them each sample has.
      slot_I: slot of each step that `sde` takes, or −1: the solver takes it.
      cond: as of condition.first_frame, for image-to-video.
      first_ids: whose initial noise each sample has, if not its own.
    """
    ctx_BSE = sharding.constrain(ctx_PSE[prompt_B], "batch", None, None)
    shape = latent_shape(model, plan)
    x = initial_noise(key, ids if first_ids is None else first_ids, shape)
    run, kept = velocities(policy, ctx_BSE, uncond_1SE, cond, config=model.wan, plan=plan), None
    if sde is not None:
        x0, kept = sampler.rollout(
            run, x, key, ids, plan.schedule, slot_I, slots=slots, kind=sde.kind, eta=sde.eta,
            solver=plan.solver, keep_mean=keep_mean,
        )  # fmt: skip
    elif plan.solver == "renoise":
        x0 = sampler.few_step(run, x, key, ids, plan.schedule, renoise=True)
    else:
        x0 = sampler.sample(run, x, plan.schedule, solver=plan.solver)
    return condition.hold(x0, cond), kept


@functools.partial(jax.jit, static_argnames=("config", "tile"))
def decode(vae_params, x0_BTHWC, *, config: vae.VAEConfig, tile: int):
    """Latents to uint8 video [B', frames, height, width, 3]; tile: side in pixels, 0 = whole.

    Every device of the mesh decodes its share of the samples; B' is B made up to a multiple of
    them.
    """

    def run(params, x0):
        if tile:
            video = vae.decode_tiled(params, x0, config=config, tile=tile)
        else:
            video = vae.decode(params, x0, config=config)
        return jnp.round((video.astype(jnp.float32) + 1) * 127.5).astype(jnp.uint8)

    return sharding.split_rows(run, vae_params, x0_BTHWC)


def clips(
    policy, vae_params, ctx_PSE, uncond_1SE, *,
    model: presets.ModelConfig, plan: settings.SamplingConfig,
    seed: int, first_id: int = 0, cond=None, **static,
) -> Iterator[tuple[jax.Array, int]]:  # fmt: skip
    """(videos as `decode` gives them, how many of them count) of P contexts by the solver, in parts
    of plan.batch; each is queued on the devices before the one before it is handed over.

    cond: first frames as of models.condition, or None. Sample i starts from the noise of
    (seed, first_id + i), whatever the batching. static: further arguments of `rollout`.
    """
    count, slot_I = len(ctx_PSE), jnp.full(plan.schedule.steps, -1, jnp.int32)
    ctx_PSE, key = jnp.asarray(ctx_PSE), jax.random.key(seed)

    def queued():
        for first in range(0, count, plan.batch):
            # the last batch keeps its shape
            rows = np.minimum(np.arange(first, first + plan.batch), count - 1)
            given = {name: a[rows] for name, a in cond.items()} if cond else None
            ids = jnp.asarray(rows + first_id)
            x0, _ = rollout(
                policy, ctx_PSE, uncond_1SE, jnp.asarray(rows), key, ids, slot_I, given,
                model=model, plan=plan, **static,
            )  # fmt: skip
            video = decode(vae_params, x0, config=model.vae, tile=plan.vae_tile)
            yield video, min(plan.batch, count - first)

    return ahead(queued())


def ahead(queued: Iterator) -> Iterator:
    """The same items; each is asked for before the one before it is handed over."""
    waiting = []
    for item in queued:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def generate(policy, vae_params, ctx_PSE, uncond_1SE, **settings) -> np.ndarray:
    """uint8 videos [P, frames, height, width, 3] of P contexts on every host; settings: see
    `clips`."""
    made = clips(policy, vae_params, ctx_PSE, uncond_1SE, **settings)
    return np.concatenate([sharding.fetch(video)[:count] for video, count in made])


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
