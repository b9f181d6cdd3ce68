"""The training state, and the one place that says which weights a role, an adapter or the sampler
uses.

params[role][expert] are base trees, adapters[name][expert] low-rank trees, opt[expert] optimizer
states. With adapters the base is frozen and `default` is trained; with full weights
params["student"] is trained and a frozen copy under "reference" exists only when a KL penalty
needs it. Other roles (teacher, critic) may have a base of another variant; one that names none
shares the student's, so with adapters a role costs its adapter alone. Every function below treats
the experts of a run alike.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from wanjax import advantages, optim, sampler, schedule, trees
from wanjax.models import condition, lora, presets, vae, wan
from wanjax.parallel import sharding

AVERAGES = ("old", "ema")  # kept beside the trained weights by some algorithms


@dataclass(frozen=True, eq=False)
class Item:
    """The data of one step: P prompts and, where an algorithm trains on clips, their latents."""

    texts: list[str]
    ctx_PSE: Any  # text rows, one context per prompt
    x0_PTHWC: Any = None  # normalised clean latents
    cond: Any = None  # extra inputs of the model (see models.condition), leading axis P


@dataclass(frozen=True, eq=False)
class Tools:
    """What collecting needs beside the trained state."""

    vae: dict  # parameters
    uncond_1SE: jax.Array  # text rows of the negative prompt
    reward: Any = None  # (video, prompts) -> ({name: scores}, info); None without rewards


class State(struct.PyTreeNode):
    """Everything that a step changes, and the frozen weights it reads."""

    step: jax.Array  # int32, finished steps; also the policy version that a batch carries
    params: dict  # role -> expert -> tree
    adapters: dict  # name -> expert -> tree; {} when full weights are trained
    opt: dict  # expert -> optimizer state
    role_opt: dict = struct.field(default_factory=dict)  # the same of other trained roles, by role
    running: dict = struct.field(default_factory=dict)  # statistics of an algorithm, by its names


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
    solver: str = "euler"  # of ODE steps, or "renoise": the few-step sampler with fresh noise
    batch: int = 8  # samples per device call
    vae_tile: int = 0  # side in pixels of the tiles that are decoded one by one; 0: whole frames


@dataclass(frozen=True, eq=False)
class SdeConfig:
    """Transition kernel of the stochastic steps and the strategy that chooses them."""

    strategy: schedule.Strategy
    kind: str = "flow"
    eta: float = 0.7


# keys of a config that are fields of every algorithm on groups of samples
GROUP_KEYS = ("group_size", "prompts_per_step", "advantage", "adv_clip_max", "updates")
GROUP_KEYS += ("micro_samples", "micro_steps", "mix_experts")


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
    reward_failure: str = "stop"  # see rewards.FAILURE
    steps: int = 1  # of the whole run
    roles: dict = field(default_factory=dict)  # role other than the student -> ModelConfig
    role_optim: dict = field(default_factory=dict)  # those that are trained -> expert -> config


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
    """State at step 0 from loaded base params of the student, {expert: tree}.

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
        adapters["default"] = _adapters(key, setup.lora, params, setup.experts)
    elif keep_reference:
        copy = lambda tree: jax.tree.map(jnp.copy, tree)
        roles["reference"] = {expert: copy(params[expert]) for expert in setup.experts}
    state = State(jnp.zeros((), jnp.int32), roles, adapters, {})
    opt = {e: optim.make(setup.optim[e]).init(trainable(state, setup)[e]) for e in setup.experts}
    return state.replace(opt=opt)


def with_role(key, state: State, setup: Setup, role: str, params: dict | None) -> State:
    """State with a role beside the student, trained where setup.role_optim names it.

    params: its base {expert: tree}; None shares the student's, of which a role that full weights
    move, or that must stay while they move, gets a copy.
    """
    optims = setup.role_optim.get(role, {})
    if params is None and not setup.lora.rank:
        copy = lambda tree: jax.tree.map(jnp.copy, tree)
        student = state.params["student"]
        params = {e: copy(tree) if e in setup.experts else tree for e, tree in student.items()}
    if params is not None:
        state = state.replace(params={**state.params, role: params})
    if setup.lora.rank and optims:
        adapter = _adapters(key, setup.lora, base(state, role), tuple(optims))
        state = state.replace(adapters={**state.adapters, role: adapter})
    opt = {e: optim.make(optims[e]).init(trainable(state, setup, role)[e]) for e in optims}
    return state.replace(role_opt={**state.role_opt, role: opt}) if opt else state


def start_from(state: State, setup: Setup, adapters: dict) -> State:
    """State at step 0 whose student begins at given adapters {expert: tree}, as do its averages.

    An expert that is not trained keeps its adapter as it is. Raises ValueError for a trained expert
    whose adapter has other layers or another rank than the run's.
    """
    for expert in set(adapters) & set(setup.experts):
        shapes = [
            {path: leaf.shape for path, leaf in trees.flatten(tree).items()}
            for tree in (adapters[expert], state.adapters["default"][expert])
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the adapter of config.lora.start for expert {expert} has other layers or another "
                "rank than the run; set config.lora.rank and targets to those it was trained with"
            )
    copy = lambda experts: {e: jax.tree.map(jnp.copy, adapters[e]) for e in experts}
    groups = {"default": {**state.adapters["default"], **copy(adapters)}}
    for name in set(AVERAGES) & set(state.adapters):
        groups[name] = {**state.adapters[name], **copy(set(adapters) & set(setup.experts))}
    return state.replace(adapters={**state.adapters, **groups})


def shardings(state: State, mesh) -> State:
    """Where every leaf lies on a mesh: weights, adapters, averages and moments are split by
    `wan.logical_axes`, anything else is on every device. Leaves may be shapes."""

    def where(keys, leaf):
        names = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
        # params and adapters: name, expert, path; moments follow what optim.make calls "move"
        path = names[names.index("move") + 1 :] if "move" in names else names[2:]
        found = sharding.tree_shardings(mesh, {"/".join(path): leaf}, wan.logical_axes)
        return jax.tree.leaves(found)[0]

    return jax.tree_util.tree_map_with_path(where, state)


def place(state: State, mesh) -> State:
    """The state with adapters, averages and optimizers split over the mesh; weights stay where
    they were loaded."""
    at = shardings(state, mesh)
    move = lambda tree, at: jax.jit(lambda tree: tree, out_shardings=at)(tree)
    parts = {name: getattr(state, name) for name in ("adapters", "opt", "role_opt")}
    return state.replace(**{name: move(tree, getattr(at, name)) for name, tree in parts.items()})


def base(state: State, role: str) -> dict:
    """{expert: tree} of the weights under a role, which are the student's unless it has its own."""
    return state.params.get(role, state.params["student"])


def trainable(state: State, setup: Setup, role: str = "student") -> dict:
    """{expert: tree} of a role that its optimizers move."""
    source = state.adapters[_adapter(role)] if setup.lora.rank else state.params[role]
    return {expert: source[expert] for expert in _trained(setup, role)}


def frozen(state: State, setup: Setup, role: str = "student") -> dict:
    """{expert: tree} that goes beside `trainable`: the base, or the KL reference of full
    weights."""
    if setup.lora.rank:
        return {expert: base(state, role)[expert] for expert in _trained(setup, role)}
    return {e: state.params.get("reference", {}).get(e, {}) for e in _trained(setup, role)}


def replace_trainable(
    state: State, setup: Setup, trees_by_expert: dict, role: str = "student"
) -> State:
    """State with some experts' trained trees of a role replaced."""
    if setup.lora.rank:
        name = _adapter(role)
        moved = {**state.adapters[name], **trees_by_expert}
        return state.replace(adapters={**state.adapters, name: moved})
    moved = {**state.params[role], **trees_by_expert}
    return state.replace(params={**state.params, role: moved})


def optimizers(state: State, role: str = "student") -> dict:
    """{expert: optimizer state} of a role."""
    return state.opt if role == "student" else state.role_opt[role]


def replace_optimizers(state: State, opt: dict, role: str = "student") -> State:
    """State with some experts' optimizer states of a role replaced."""
    opt = {**optimizers(state, role), **opt}
    if role == "student":
        return state.replace(opt=opt)
    return state.replace(role_opt={**state.role_opt, role: opt})


def rollout_params(state: State, name: str = "default") -> dict:
    """{expert: (params, adapter tree or {})} of the policy `name`: what sampler, loss and export
    use.

    With adapters, `name` is one of them over the frozen base. With full weights it is a role: the
    trained student for "default", or an average kept beside it ("old", "ema").
    """
    if state.adapters:
        adapters = {**state.adapters["default"], **state.adapters[name]}
        return {e: (params, adapters.get(e, {})) for e, params in state.params["student"].items()}
    student = state.params["student"]
    policy = student if name == "default" else {**student, **state.params[name]}
    return {expert: (params, {}) for expert, params in policy.items()}


def role_params(state: State, role: str) -> dict:
    """{expert: (params, adapter tree or {})} of a role beside the student."""
    adapters = state.adapters.get(role, {})
    return {e: (params, adapters.get(e, {})) for e, params in base(state, role).items()}


def average(state: State, name: str, tree: dict) -> State:
    """State with the average `name` (as "old" or "ema") replaced, {expert: tree} like
    `trainable`."""
    if state.adapters:
        return state.replace(adapters={**state.adapters, name: tree})
    return state.replace(params={**state.params, name: tree})


def averaged(state: State, name: str) -> dict:
    """{expert: tree} of the average `name`."""
    return state.adapters[name] if state.adapters else state.params[name]


def saved(state: State, setup: Setup) -> dict:
    """The part of the state that a checkpoint holds: all but the weights that were loaded."""
    kept = {"step": state.step, "trained": trainable(state, setup), "opt": state.opt}
    source = state.adapters or state.params
    kept |= {name: source[name] for name in AVERAGES if name in source}
    roles = {
        role: {"trained": trainable(state, setup, role), "opt": opt}
        for role, opt in state.role_opt.items()
    }
    kept |= {"roles": roles} if roles else {}
    return kept | ({"running": state.running} if state.running else {})


def with_saved(state: State, setup: Setup, tree: dict) -> State:
    """Invert `saved` on a fresh state."""
    state = replace_trainable(state, setup, tree["trained"])
    for name in AVERAGES:
        if name in tree:
            state = average(state, name, tree[name])
    roles = tree.get("roles", {})
    for role, saved_role in roles.items():
        state = replace_trainable(state, setup, saved_role["trained"], role)
    opt = {role: saved_role["opt"] for role, saved_role in roles.items()}
    running = tree.get("running", {})
    return state.replace(step=tree["step"], opt=tree["opt"], role_opt=opt, running=running)


def velocity(
    setup: Setup, expert: str, params, adapter, ctx_BSE, uncond_BSE, cond=None, *,
    role: str = "student", scale: float | None = None,
):  # fmt: skip
    """The guided velocity of one expert as a function (x, t_B) -> v for sampler and losses.

    scale: guidance; None takes the run's.
    """
    config = setup.roles.get(role, setup.model).wan

    def run(x, t_B, inputs):
        return condition.denoise(params, adapter, x, t_B, *inputs, config=config)

    weight = getattr(setup.sampling.guidance, expert) if scale is None else scale
    mode = setup.sampling.guidance_mode
    return sampler.cfg(run, weight, (ctx_BSE, cond), (uncond_BSE, cond), mode=mode)


@functools.partial(jax.jit, static_argnames=("setup",))
def sample_latents(
    policy, ctx_BSE, uncond_1SE, key, ids, cond=None, stochastic_I=None, *, setup: Setup
):
    """Final latents [B, T, H, W, C] float32 by the run's solver; sample i depends on (key, ids[i]).

    policy: {expert: (params, adapter)}; ctx_BSE one text context per sample; cond as of
    condition.first_frame, for image-to-video; stochastic_I: bool per step, whether it is taken by
    the kernel of setup.sde instead of the solver.
    """
    x = sampler.initial_noise(key, ids, latent_shape(setup))
    x = sharding.constrain(x, "batch", None, None, None, None)
    velocities = policy_velocities(policy, ctx_BSE, uncond_1SE, cond, setup=setup)
    plan = setup.sampling
    if stochastic_I is not None:
        slot_I = jnp.where(stochastic_I, 0, -1)  # one slot for all: nobody reads the transitions
        x0, _ = sampler.rollout(
            velocities, x, key, ids, plan.schedule, slot_I, slots=1, kind=setup.sde.kind,
            eta=setup.sde.eta, solver=plan.solver,
        )  # fmt: skip
    elif plan.solver == "renoise":
        x0 = sampler.few_step(velocities, x, key, ids, plan.schedule, renoise=True)
    else:
        x0 = sampler.sample(velocities, x, plan.schedule, solver=plan.solver)
    return condition.hold(x0, cond)


def policy_velocities(policy, ctx_BSE, uncond_1SE, cond=None, *, setup: Setup) -> dict:
    """{expert: guided velocity (x, t_B) -> v} of a policy, for the two-phase sampler."""
    uncond_BSE = jnp.broadcast_to(uncond_1SE, (len(ctx_BSE), *uncond_1SE.shape[1:]))
    policy = sharding.to_device(policy)
    return {
        expert: velocity(setup, expert, params, adapter, ctx_BSE, uncond_BSE, cond)
        for expert, (params, adapter) in policy.items()
    }


def check_batches(setup: Setup, units: str = "samples", number: int = 0) -> None:
    """Raise ValueError when samples, updates and rollouts do not divide.

    units, number: what optimizer steps share out, and how many there are; 0 = all samples.
    """
    config = setup.algorithm
    if not setup.rewards:
        raise ValueError("config.reward is empty; set for example config.reward.shapes = 1.0")
    samples = config.group_size * config.prompts_per_step
    number = number or samples
    if config.group_size < 2:
        raise ValueError(f"config.group_size is {config.group_size}; a group needs at least 2")
    if number % config.updates:
        raise ValueError(
            f"{number} {units} a step do not divide into config.updates = {config.updates}; change "
            "it, config.prompts_per_step or config.group_size"
        )
    if samples % setup.sampling.batch:
        raise ValueError(
            f"{samples} samples a step do not divide into rollouts of config.sampling.batch = "
            f"{setup.sampling.batch}; set it to a divisor of {samples}"
        )
    if config.advantage not in advantages.PRESETS:
        raise ValueError(
            f"config.advantage is {config.advantage!r}; expected one of {tuple(advantages.PRESETS)}"
        )


def decode(vae_params, x0_BTHWC, *, setup: Setup):
    """Latents to uint8 video [B, frames, height, width, 3]."""
    return to_pixels(vae_params, x0_BTHWC, config=setup.model.vae, tile=setup.sampling.vae_tile)


@functools.partial(jax.jit, static_argnames=("config", "tile"))
def to_pixels(vae_params, x0_BTHWC, *, config: vae.VAEConfig, tile: int):
    """`decode`, compiled."""
    if tile:
        video = vae.decode_tiled(vae_params, x0_BTHWC, config=config, tile=tile)
    else:
        video = vae.decode(vae_params, x0_BTHWC, config=config)
    return jnp.round((video.astype(jnp.float32) + 1) * 127.5).astype(jnp.uint8)


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
    if s.vae_tile < 0 or s.vae_tile % (4 * code.scale_factor_spatial):
        raise ValueError(
            f"config.sampling.vae_tile is {s.vae_tile}; expected 0, or pixels in multiples of "
            f"{4 * code.scale_factor_spatial}"
        )
    frames = (s.frames - 1) // code.scale_factor_temporal + 1
    side = code.scale_factor_spatial
    return frames, s.height // side, s.width // side, code.z_dim


def token_grid(setup: Setup, latents=None) -> tuple[int, int, int]:
    """Tokens in time, height and width of latents [T, H, W, C]; None takes the run's."""
    T, H, W, _ = latent_shape(setup) if latents is None else latents
    t, h, w = setup.model.wan.patch_size
    return T // t, H // h, W // w


def describe(state: State, setup: Setup) -> str:
    """A table of the trees in the state: role or adapter, expert, parameters, memory on one
    device, trained or frozen."""
    rows = [f"{'tree':24} {'parameters':>15} {'GiB':>7}  use"]
    learned = {
        f"{'adapters' if setup.lora.rank else 'params'}/{name}": _trained(setup, role)
        for role in ("student", *state.role_opt)
        for name in [_adapter(role) if setup.lora.rank else role]
    }
    for kind, group in (("params", state.params), ("adapters", state.adapters)):
        for name, experts in group.items():
            for expert, tree in experts.items():
                moved = expert in learned.get(f"{kind}/{name}", ())
                label = f"{kind}/{name}/{expert}"
                rows.append(
                    f"{label:24} {trees.count(tree):15,} {_gib(tree):7.2f}  "
                    f"{'trained' if moved else 'frozen'}"
                )
    shared = set(setup.roles) - set(state.params)
    rows += [f"{'params/' + role:24} {0:15,} {0:7.2f}  the student's" for role in sorted(shared)]
    for role, experts in {"student": state.opt, **state.role_opt}.items():
        rows += [f"{f'opt/{role}/{e}':24} {'':15} {_gib(opt):7.2f}" for e, opt in experts.items()]
    rows.append(f"{'all':24} {'':15} {_gib(state):7.2f}")
    return "\n".join(rows)


def _gib(tree) -> float:
    """Memory that one device gives to a tree."""

    def size(leaf):
        whole = leaf.sharding is None
        shape = leaf.shape if whole else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree)) / 2**30


def _adapter(role: str) -> str:
    """Name of the adapter that training a role moves."""
    return "default" if role == "student" else role


def _trained(setup: Setup, role: str) -> tuple[str, ...]:
    """The experts of a role that are trained."""
    return setup.experts if role == "student" else tuple(setup.role_optim.get(role, {}))


def _adapters(key, config: LoraConfig, params: dict, experts) -> dict:
    """Fresh adapter trees {expert: tree}."""
    return {
        expert: lora.init(
            jax.random.fold_in(key, i), params[expert],
            rank=config.rank, alpha=config.alpha, targets=config.targets,
        )
        for i, expert in enumerate(experts)
    }  # fmt: skip
