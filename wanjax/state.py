"""The training state, and the one place that says which weights a role, an adapter or the sampler
uses.

params[role][expert] are base trees, adapters[name][expert] low-rank trees, opt[expert] optimizer
states. With adapters the base is frozen and `default` is trained; with full weights
params["student"] is trained and a frozen copy under "reference" exists only when a KL penalty
needs it. Every function below treats the experts of a run alike.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from wanjax import optim, sampler, schedule, trees
from wanjax.models import lora, presets, vae, wan


class State(struct.PyTreeNode):
    """Everything that a step changes, and the frozen weights it reads."""

    step: jax.Array  # int32, finished steps; also the policy version that a batch carries
    params: dict  # role -> expert -> tree
    adapters: dict  # name -> expert -> tree; {} when full weights are trained
    opt: dict  # expert -> optimizer state


@dataclass(frozen=True)
class LoraConfig:
    """Rank 0 trains full weights."""

    rank: int = 32
    alpha: float = 64.0
    targets: tuple[str, ...] = lora.TARGETS


@dataclass(frozen=True, eq=False)
class SamplingConfig:
    """One sampler for rollouts, samples, evaluation and export; sizes in pixels."""

    schedule: schedule.Schedule
    guidance: presets.Guidance
    height: int
    width: int
    frames: int
    guidance_mode: str = (
        "batch"  # cond and uncond in one batch, or "sequential" for half the memory
    )
    solver: str = "euler"  # of ODE steps
    batch: int = 8  # samples per device call


@dataclass(frozen=True, eq=False)
class SdeConfig:
    """Transition kernel of the stochastic steps and the strategy that chooses them."""

    strategy: schedule.Strategy
    kind: str = "flow"
    eta: float = 0.7


@dataclass(frozen=True, eq=False)
class Setup:
    """What is static in a run: shapes, schedules and rules, closed over by the jitted functions."""

    model: presets.ModelConfig
    sampling: SamplingConfig
    sde: SdeConfig
    lora: LoraConfig
    experts: tuple[str, ...]  # trained
    optim: dict[str, optim.OptimConfig]
    seed: int
    algorithm: Any  # the algorithm's own config
    rewards: dict = field(default_factory=dict)  # name -> weight


def sampling_setup(model: presets.ModelConfig, sampling: SamplingConfig) -> Setup:
    """A Setup that only samples: nothing is trained."""
    return Setup(
        model=model,
        sampling=sampling,
        sde=SdeConfig(schedule.Strategy("all"), kind="ode"),
        lora=LoraConfig(rank=0),
        experts=(),
        optim={},
        seed=0,
        algorithm=None,
    )


def init(key, setup: Setup, params: dict, *, keep_reference: bool) -> State:
    """State at step 0 from loaded base params {expert: tree}.

    Raises ValueError when a trained expert is not part of the model.
    """
    for expert in setup.experts:
        if expert not in params:
            raise ValueError(
                f"config.experts names {expert!r} but the model has {tuple(params)}; "
                "set config.experts to some of those"
            )
    adapters = {}
    roles = {"student": params}
    if setup.lora.rank:
        adapters["default"] = {
            expert: lora.init(
                jax.random.fold_in(key, i),
                params[expert],
                rank=setup.lora.rank,
                alpha=setup.lora.alpha,
                targets=setup.lora.targets,
            )
            for i, expert in enumerate(setup.experts)
        }
    elif keep_reference:
        copy = lambda tree: jax.tree.map(jnp.copy, tree)
        roles["reference"] = {expert: copy(params[expert]) for expert in setup.experts}
    state = State(jnp.zeros((), jnp.int32), roles, adapters, {})
    opt = {e: optim.make(setup.optim[e]).init(trainable(state, setup)[e]) for e in setup.experts}
    return state.replace(opt=opt)


def trainable(state: State, setup: Setup) -> dict:
    """{expert: tree} that the optimizers move."""
    source = state.adapters["default"] if setup.lora.rank else state.params["student"]
    return {expert: source[expert] for expert in setup.experts}


def frozen(state: State, setup: Setup) -> dict:
    """{expert: tree} that goes beside `trainable`: the base, or the KL reference of full
    weights."""
    if setup.lora.rank:
        return {expert: state.params["student"][expert] for expert in setup.experts}
    return {e: state.params.get("reference", {}).get(e, {}) for e in setup.experts}


def replace_trainable(state: State, setup: Setup, trees_by_expert: dict) -> State:
    """State with some experts' trained trees replaced."""
    if setup.lora.rank:
        default = {**state.adapters["default"], **trees_by_expert}
        return state.replace(adapters={**state.adapters, "default": default})
    student = {**state.params["student"], **trees_by_expert}
    return state.replace(params={**state.params, "student": student})


def rollout_params(state: State, adapter: str = "default") -> dict:
    """{expert: (params, adapter tree or {})}: the policy that samples."""
    adapters = state.adapters.get(adapter, {})
    return {e: (params, adapters.get(e, {})) for e, params in state.params["student"].items()}


def saved(state: State, setup: Setup) -> dict:
    """The part of the state that a checkpoint holds: all but frozen weights."""
    return {"step": state.step, "trained": trainable(state, setup), "opt": state.opt}


def with_saved(state: State, setup: Setup, tree: dict) -> State:
    """Invert `saved` on a fresh state."""
    state = replace_trainable(state, setup, tree["trained"])
    return state.replace(step=tree["step"], opt=tree["opt"])


def velocity(setup: Setup, expert: str, params, adapter, ctx_BSE, uncond_BSE):
    """The guided velocity of one expert as a function (x, t_B) -> v for sampler and losses."""
    run = lambda x, t_B, ctx: wan.denoise(params, adapter, x, t_B, ctx, config=setup.model.wan)
    scale = getattr(setup.sampling.guidance, expert)
    return sampler.cfg(run, scale, ctx_BSE, uncond_BSE, mode=setup.sampling.guidance_mode)


@functools.partial(jax.jit, static_argnames=("config",))
def decode(vae_params, x0_BTHWC, *, config):
    """Latents to uint8 video [B, frames, height, width, 3]; config is the model's VAEConfig."""
    video = vae.decode(vae_params, x0_BTHWC, config=config).astype(jnp.float32)
    return jnp.round((video + 1) * 127.5).astype(jnp.uint8)


def latent_shape(setup: Setup) -> tuple[int, int, int, int]:
    """(T, H, W, C) of one sample's latents; raises ValueError for sizes the model cannot make."""
    code, s, patch = setup.model.vae, setup.sampling, setup.model.wan.patch_size
    step = tuple(code.scale_factor_spatial * p for p in patch[1:])
    if s.height % step[0] or s.width % step[1]:
        raise ValueError(
            f"size {s.height}x{s.width} does not divide by {step[0]}x{step[1]}; "
            "set config.sampling.height and width to multiples of it"
        )
    if (s.frames - 1) % code.scale_factor_temporal:
        raise ValueError(
            f"config.sampling.frames is {s.frames}; expected {code.scale_factor_temporal}·n + 1"
        )
    frames = (s.frames - 1) // code.scale_factor_temporal + 1
    side = code.scale_factor_spatial
    return frames, s.height // side, s.width // side, code.z_dim


def describe(state: State, setup: Setup) -> str:
    """A table of the trees in the state: role or adapter, expert, parameters, trained or frozen."""
    rows = [f"{'tree':24} {'parameters':>15}  use"]
    learned = "params/student" if not setup.lora.rank else "adapters/default"
    for kind, group in (("params", state.params), ("adapters", state.adapters)):
        for name, experts in group.items():
            for expert, tree in experts.items():
                moved = f"{kind}/{name}" == learned and expert in setup.experts
                label = f"{kind}/{name}/{expert}"
                rows.append(
                    f"{label:24} {trees.count(tree):15,}  {'trained' if moved else 'frozen'}"
                )
    return "\n".join(rows)
