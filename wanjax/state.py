"""The training state, and the one place that says which weights a role, an adapter or the sampler
uses.

params[role][expert] are base trees, adapters[name][expert] low-rank trees, opt[expert] optimizer
states. With adapters the base is frozen and `default` is trained; with full weights
params["student"] is trained and a frozen copy under "reference" exists only when a KL penalty
needs it. Other roles (teacher, critic) may have a base of another variant; one that names none
shares the student's, so with adapters a role costs its adapter alone. Every function below treats
the experts of a run alike.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from wanjax import optim, trees
from wanjax.models import lora, wan
from wanjax.parallel import sharding
from wanjax.settings import LoraConfig, TrainingConfig

AVERAGES = ("old", "ema")  # kept beside the trained weights by some algorithms


class State(struct.PyTreeNode):
    """Everything that a step changes, and the frozen weights it reads."""

    step: jax.Array  # int32, finished steps; also the policy version that a batch carries
    params: dict  # role -> expert -> tree
    adapters: dict  # name -> expert -> tree; {} when full weights are trained
    opt: dict  # expert -> optimizer state
    role_opt: dict = struct.field(default_factory=dict)  # the same of other trained roles, by role
    running: dict = struct.field(default_factory=dict)  # statistics of an algorithm, by its names


def init(key, training: TrainingConfig, params: dict, *, keep_reference: bool) -> State:
    """State at step 0 from loaded base params of the student, {expert: tree}.

    Raises ValueError when a trained expert is not part of the model.
    """
    for expert in training.experts():
        if expert not in params:
            raise ValueError(
                f"config.experts names {expert!r} but the model has {tuple(params)}; "
                "set config.experts to some of those"
            )
    adapters = {}
    roles = {"student": params}
    if training.lora.rank:
        adapters["default"] = _adapters(key, training.lora, params, training.experts())
    elif keep_reference:
        roles["reference"] = {expert: _copy(params[expert]) for expert in training.experts()}
    state = State(jnp.zeros((), jnp.int32), roles, adapters, {})
    return state.replace(opt=_fresh_optimizers(state, training, "student"))


def with_role(key, state: State, training: TrainingConfig, role: str, params: dict | None) -> State:
    """State with a role beside the student, trained where training.optim names it.

    params: its base {expert: tree}; None shares the student's, of which a role that full weights
    move, or that must stay while they move, gets a copy.
    """
    if params is None and not training.lora.rank:
        moved, student = training.experts(), state.params["student"]
        params = {e: _copy(tree) if e in moved else tree for e, tree in student.items()}
    if params is not None:
        state = state.replace(params={**state.params, role: params})
    if training.lora.rank and training.experts(role):
        adapter = _adapters(key, training.lora, base(state, role), training.experts(role))
        state = state.replace(adapters={**state.adapters, role: adapter})
    opt = _fresh_optimizers(state, training, role)
    return state.replace(role_opt={**state.role_opt, role: opt}) if opt else state


def check_start(state: State, training: TrainingConfig, adapters: dict) -> None:
    """Raise ValueError for a trained expert whose given adapter {expert: tree} has different layers
    or a different rank from the run's; the state may hold shapes."""
    for expert in sorted(set(adapters) & set(training.experts())):
        given, own = (
            {path: leaf.shape for path, leaf in trees.flatten(tree).items()}
            for tree in (adapters[expert], state.adapters["default"][expert])
        )
        if given != own:
            raise ValueError(
                f"the adapter of config.lora.start for expert {expert} has different layers or a "
                "different rank from the run's; set config.lora.rank and targets to those it was "
                "trained with"
            )


def start_from(state: State, training: TrainingConfig, adapters: dict) -> State:
    """State at step 0 whose student begins at given adapters {expert: tree}, as do its averages.

    An expert that is not trained keeps its adapter as it is. Raises ValueError as `check_start`.
    """
    check_start(state, training, adapters)
    begun = {expert: _copy(tree) for expert, tree in adapters.items()}
    averaged = {expert: tree for expert, tree in adapters.items() if expert in training.experts()}
    groups = {"default": {**state.adapters["default"], **begun}}
    for name in set(AVERAGES) & set(state.adapters):
        groups[name] = {**state.adapters[name], **_copy(averaged)}
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
    they were loaded, and so do leaves that lie there already."""
    at, moved = shardings(state, mesh), {}

    def move(x, where):
        there = x.sharding.is_equivalent_to(where, x.ndim)
        return x if there else jax.jit(lambda x: x, out_shardings=where)(x)

    for name in ("adapters", "opt", "role_opt"):
        moved[name] = jax.tree.map(move, getattr(state, name), getattr(at, name))
    return state.replace(**moved)


def base(state: State, role: str) -> dict:
    """{expert: tree} of the weights under a role, which are the student's unless it has its own."""
    return state.params.get(role, state.params["student"])


def trainable(state: State, training: TrainingConfig, role: str = "student") -> dict:
    """{expert: tree} of a role that its optimizers move."""
    source = state.adapters[_adapter(role)] if training.lora.rank else state.params[role]
    return {expert: source[expert] for expert in training.experts(role)}


def frozen(state: State, training: TrainingConfig, role: str = "student") -> dict:
    """{expert: tree} that goes beside `trainable`: the base, or the KL reference of full
    weights."""
    if training.lora.rank:
        return {expert: base(state, role)[expert] for expert in training.experts(role)}
    return {e: state.params.get("reference", {}).get(e, {}) for e in training.experts(role)}


def policy(training: TrainingConfig, trained, frozen) -> tuple:
    """(params, adapter tree or {}) of one expert of `trainable` and `frozen`."""
    return (frozen, trained) if training.lora.rank else (trained, {})


def replace_trainable(
    state: State, training: TrainingConfig, trees_by_expert: dict, role: str = "student"
) -> State:
    """State with some experts' trained trees of a role replaced."""
    if training.lora.rank:
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


def saved(state: State, training: TrainingConfig) -> dict:
    """The part of the state that a checkpoint holds: all but the weights that were loaded."""
    kept = {"step": state.step, "trained": trainable(state, training), "opt": state.opt}
    source = state.adapters or state.params
    kept |= {name: source[name] for name in AVERAGES if name in source}
    roles = {
        role: {"trained": trainable(state, training, role), "opt": opt}
        for role, opt in state.role_opt.items()
    }
    kept |= {"roles": roles} if roles else {}
    return kept | ({"running": state.running} if state.running else {})


def with_saved(state: State, training: TrainingConfig, tree: dict) -> State:
    """Invert `saved` on a fresh state."""
    state = replace_trainable(state, training, tree["trained"])
    for name in AVERAGES:
        if name in tree:
            state = average(state, name, tree[name])
    roles = tree.get("roles", {})
    for role, saved_role in roles.items():
        state = replace_trainable(state, training, saved_role["trained"], role)
    opt = {role: saved_role["opt"] for role, saved_role in roles.items()}
    running = tree.get("running", {})
    return state.replace(step=tree["step"], opt=tree["opt"], role_opt=opt, running=running)


def describe(state: State, training: TrainingConfig, roles=()) -> str:
    """A table of the trees in the state: role or adapter, expert, parameters, memory on one
    device, trained or frozen. roles: those beside the student, also where they share its weights.
    """
    kind = "adapters" if training.lora.rank else "params"
    learned = {
        f"{kind}/{_adapter(role) if training.lora.rank else role}/{expert}"
        for role in ("student", *state.role_opt)
        for expert in training.experts(role)
    }
    rows = [f"{'tree':24} {'parameters':>15} {'GiB':>7}  use"]
    for kind, group in (("params", state.params), ("adapters", state.adapters)):
        for name, experts in group.items():
            for expert, tree in experts.items():
                label = f"{kind}/{name}/{expert}"
                use = "trained" if label in learned else "frozen"
                rows.append(f"{label:24} {trees.count(tree):15,} {_gib(tree):7.2f}  {use}")
    for role in sorted(set(roles) - set(state.params)):
        rows.append(f"{'params/' + role:24} {0:15,} {0:7.2f}  the student's")
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


def _copy(tree):
    return jax.tree.map(jnp.copy, tree)


def _fresh_optimizers(state: State, training: TrainingConfig, role: str) -> dict:
    """{trained expert: optimizer state} of a role before its first step."""
    if role not in training.optim:
        return {}
    trained = trainable(state, training, role)
    return {e: optim.make(own).init(trained[e]) for e, own in training.optim[role].items()}


def _adapters(key, config: LoraConfig, params: dict, experts) -> dict:
    """Fresh adapter trees {expert: tree}."""
    return {
        expert: lora.init(
            jax.random.fold_in(key, i), params[expert],
            rank=config.rank, alpha=config.alpha, targets=config.targets,
        )
        for i, expert in enumerate(experts)
    }  # fmt: skip
