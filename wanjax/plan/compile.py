"""One plan: every phase of a config compiled for a topology, from the programs of its algorithm."""

import dataclasses
import functools
import math
import re

import jax

from convert import load
from wanjax import rewards, sampling, settings, setup, trees
from wanjax import state as states
from wanjax.algorithms import Program, Tools, steps
from wanjax.data import previews, text
from wanjax.models import presets, umt5, vae
from wanjax.parallel import sharding
from wanjax.plan import hlo
from wanjax.plan.chips import CHIPS, Chip, devices_of, propose_mesh

_LOADED = ("experts", "adapters", "moments", "vae", "text encoder", "reward towers")
_ALIVE = {  # what is on the devices in each kind of phase, beside what only its program is given
    "start": ("reward towers",),  # prompts are encoded before anything else is read
    "encode": (*_LOADED, "contexts"),  # with a text encoder that stays
    "collect": (*_LOADED, "contexts", "batch", "videos", "rewards at work"),
    "reward": (*_LOADED, "contexts", "batch", "videos"),
    "update": (*_LOADED, "contexts", "batch"),
    "evaluation": (*_LOADED, "evaluation contexts", "videos", "rewards at work"),
}


def make_plan(config, topology: str, model: str = "") -> dict:
    """Compile every phase of the ConfigDict for the topology; returns what the command prints.

    model: a preset's name, in place of config.model.path. Raises ValueError for a config that
    cannot run.
    """
    chip_name, devices = devices_of(topology)
    chip = CHIPS[chip_name]
    if chip.kernel == "cudnn" and devices[0].platform != "cpu":  # as the GPU that is present
        chip = dataclasses.replace(chip, kernel="auto")
    run = make_setup(config, model, chip)
    algorithm = setup.ALGORITHMS[config.algorithm]
    batch = math.gcd(*setup.batches(run, algorithm))
    heads = run.model.wan.num_attention_heads
    proposed = propose_mesh(len(devices), batch, heads, held(config, run), chip.hbm)
    note, mesh = "", sharding.make_mesh(proposed, devices)
    try:
        own = sharding.make_mesh(dict(config.mesh), devices)
        setup.check_mesh(run, algorithm, own)
        mesh = own
    except ValueError as error:
        note = f"the config's mesh cannot run: {error}"
    with sharding.use_mesh(mesh):
        state, tools = setup.abstract_state(config, run, algorithm, mesh), _tools(config, run.model)
        scoring, unknown = _scoring(config)
        encode, stays = _encode(config, run.model, mesh), config.model.text_encoder == "device"
        programs = {
            "encode": encode,
            **algorithm.programs(state, run, tools),
            **scoring,
            **_evaluation(config, run, algorithm, state, tools),
        }
        weights = {
            "experts": [] if config.model.offload else state.params,
            "adapters": state.adapters,
            "moments": (state.opt, state.role_opt, state.running, state.step),
            "vae": tools.vae,
            "text encoder": encode.arguments({})[0] if stays else [],
            "reward towers": [program.arguments({})[0] for program in scoring.values()],
        }
        phases = _compile(programs, (state.params, tools.uncond_1SE, weights))
    residents = {name: _per_device(tree) for name, tree in weights.items()}
    residents |= _beside(config, phases, programs, _per_device(tools.uncond_1SE))
    for name, phase in phases.items():
        kind = _kind(name, config)
        phase["held"] = sum(residents[resident] for resident in _ALIVE[kind])
        phase["held"] += phase["others"] if kind != "update" else 0  # which are the batch
        _judge(phase, chip, len(devices))
    return {
        "config": config.name, "model": run.model.name, "topology": topology,
        "devices": len(devices), "mesh": dict(mesh.shape), "note": note,
        "proposed_mesh": proposed, "hbm": chip.hbm, "estimate": chip.kernel == "cudnn",
        "residents": residents, "uncounted": unknown,
        "total": max(phase["peak"] for phase in phases.values()),
        "phases": phases,
        "checkpoint_bytes": _whole(jax.eval_shape(lambda s: states.saved(s, run.training), state)),
        "host_bytes": _whole(state.params) / max(len(devices) // 4, 1),  # hosts of 4 devices
        "fits": all(phase["fits"] for phase in phases.values()),
    }  # fmt: skip


def make_setup(config, model: str, chip: Chip) -> settings.Setup:
    """The run's Setup as it runs on the chip; without rewards one is made up, for none is asked."""
    setup.check(config.to_dict())
    config = config.copy_and_resolve_references()
    config.model.path = model or config.model.path
    student, roles = setup.models(config, by_name=True)
    roles = {role: _on_chip(its, chip) for role, its in roles.items()}
    run = setup.make(config, _on_chip(student, chip), roles)
    if not run.rewards.weights:
        run = dataclasses.replace(run, rewards=dataclasses.replace(run.rewards, weights={"any": 1}))
    setup.ALGORITHMS[config.algorithm].check(run)
    return run


def held(config, run: settings.Setup) -> int:
    """Bytes that training keeps on devices: weights (with model.offload the largest expert's),
    adapters, optimizer states, and half as much as these for gradients."""
    algorithm = setup.ALGORITHMS[config.algorithm]
    shapes = setup.weight_shapes(config, run.model, run.roles)
    state = jax.eval_shape(lambda p: algorithm.init(jax.random.key(0), run, p), shapes)
    experts = [_whole(tree) for role in state.params.values() for tree in role.values()]
    frozen = max(experts) if config.model.offload else sum(experts)
    return frozen + _whole(state.adapters) + _whole((state.opt, state.role_opt)) * 3 // 2


def _on_chip(model: presets.ModelConfig, chip: Chip) -> presets.ModelConfig:
    """The model with the attention kernel of the chip; a GPU's is lowered for CPU as xla."""
    kernel = chip.kernel if model.wan.attention == "auto" else model.wan.attention
    if chip.kernel == "cudnn" and kernel in ("cudnn", "fa3"):
        kernel = "xla"
    return dataclasses.replace(model, wan=dataclasses.replace(model.wan, attention=kernel))


def _tools(config, model: presets.ModelConfig) -> Tools:
    """What collecting gets, as shapes whole on every device."""
    decoder = jax.eval_shape(lambda: vae.init(jax.random.key(0), model.vae))
    plain = config.model.vae_dtype
    decoder = jax.tree.map(lambda x: steps.shape(*x.shape, dtype=plain), decoder)
    sizes = 1, model.wan.text_len, model.wan.text_dim
    return Tools(decoder, steps.shape(*sizes, dtype=config.model.text_dtype))


def _encode(config, model: presets.ModelConfig, mesh) -> Program:
    """Encoding a batch of prompts, which is done before the experts are read."""
    shapes = trees.flatten(jax.eval_shape(lambda: umt5.init(jax.random.key(0), model.text)))
    where = trees.flatten(load.shardings(shapes, "text_encoder", mesh))
    dtype = jax.numpy.dtype(config.model.text_dtype)
    params = trees.unflatten(
        {p: jax.ShapeDtypeStruct(x.shape, dtype, sharding=where[p]) for p, x in shapes.items()}
    )
    rows = (text.BATCH, model.wan.text_len)
    given = params, steps.shape(*rows, dtype=jax.numpy.int32), steps.shape(*rows, dtype=bool)
    run = jax.jit(functools.partial(umt5.encode, config=model.text))
    return Program(run, lambda made: given, calls=0)


def _scoring(config) -> tuple[dict[str, Program], list[str]]:
    """(forwards of the towers that score, names of the rewards of which nothing is known)."""
    found, unknown = rewards.forwards(config.reward)
    programs = {}
    for name, (function, given, static) in found.items():
        whole = steps.whole(given)
        label = f"reward {len(programs) + 1} {name.partition('?')[0]}"
        programs[label] = Program(function, lambda made, whole=whole: whole, static, calls=0)
    return programs, unknown


def _evaluation(config, run: settings.Setup, algorithm, state, tools: Tools) -> dict[str, Program]:
    """One batch of an evaluation's videos; where training samples alike the program is the same."""
    plan, numbers = (
        setup.evaluation_sampling(config, run),
        functools.partial(steps.shape, dtype="int32"),
    )
    alike = getattr(algorithm, "rollout_static", None) if plan is run.sampling else None
    static = {**(alike(run) if alike else {}), "model": run.model, "plan": plan}
    row, size = tools.uncond_1SE, plan.batch
    ctx_PSE = steps.shape(config.prompts_per_step, *row.shape[1:], dtype=row.dtype)
    given = (
        states.rollout_params(state, algorithm.EVALUATED), ctx_PSE, row, numbers(size),
        steps.key_shape(), numbers(size), numbers(plan.schedule.steps),
    )  # fmt: skip
    decoding = {"config": run.model.vae, "tile": plan.vae_tile}
    return {
        "evaluation": Program(sampling.rollout, lambda made: given, static, calls=0),
        "evaluation decode": Program(
            sampling.decode, lambda made: (tools.vae, made["evaluation"][0]), decoding, calls=0
        ),
    }


def _beside(
    config, phases: dict[str, dict], programs: dict[str, Program], row: int
) -> dict[str, int]:
    """Bytes of what is alive beside weights; row: of one prompt's context.

    The batch is what the updates are given. Of videos there are two beside the one that is made:
    the last, which the host reads, and the next, see sampling.ahead. Rewards run in a thread of
    their own, so that their memory adds to that of rollouts.
    """
    kinds = {name: _kind(name, config) for name in phases}
    given = [phases[name]["others"] for name, kind in kinds.items() if kind == "update"]
    scoring = [
        phase["others"] + phase["temporaries"] + phase["output"]
        for name, phase in phases.items()
        if kinds[name] == "reward"
    ]
    shown = config.eval.number if config.reward else config.eval.samples
    if config.eval.prompts == "previews":
        shown = min(shown, len(previews.texts()))
    calls = programs["decode"].calls if "decode" in programs else 0
    calls = max(calls, -(-shown // config.sampling.batch))
    return {
        "contexts": row * (1 + (0 if setup.trains_on_clips(config) else config.prompts_per_step)),
        "evaluation contexts": row * (1 + shown),
        "batch": max(given),
        "videos": min(2, max(calls - 1, 0)) * phases["evaluation decode"]["output"],
        "rewards at work": max(scoring, default=0),
    }


def _kind(name: str, config) -> str:
    """Which of ALIVE a phase is."""
    if name == "encode":
        return "start" if config.model.text_encoder == "free" else "encode"
    first = name.partition(" ")[0]
    collects = first in ("rollout", "decode")
    return "collect" if collects else first if first in ("reward", "evaluation") else "update"


def _compile(programs: dict[str, Program], alive) -> dict[str, dict]:
    """{phase: facts of hlo.measure, and "others": bytes of its arguments that are neither among
    those `alive` all the time nor contexts} of programs in their order; equal ones are compiled
    once."""
    phases, made, first = {}, {}, {}
    known = {id(x) for x in jax.tree.leaves(alive)}
    rows = alive[1].shape[1:]  # of contexts
    for name, program in programs.items():
        given = program.arguments(made)
        call = program.function.lower(*given, **program.keywords)
        text = re.sub(r'jax\.\w+ = "[^"]*"', "", call.as_text())  # without names of results
        if text in first:  # the other expert's program is often the same
            same = first[text]
            own = {"calls": program.calls, "flops": program.flops}
            phases[name], made[name] = phases[same] | own, made[same]
        else:
            first[text] = name
            phases[name], compiled = hlo.measure(call, program.flops, program.calls)
            made[name] = steps.whole(call.out_info)
            if compiled is not None:
                made[name] = jax.tree.map(_placed, made[name], compiled.output_shardings)
        others = {
            id(x): x for x in jax.tree.leaves(given) if id(x) not in known and x.shape[1:] != rows
        }
        phases[name]["others"] = _per_device([*others.values()])
    return phases


def _placed(x, where):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _judge(phase: dict, chip: Chip, devices: int) -> None:
    """Add to the facts of a phase its peak, its ideal time, and whether it fits the chip."""
    # not XLA's "arguments": they count an array that is passed twice, such as a base that roles
    # share, two times, and one that the program does not read not at all
    phase["peak"] = phase["held"] + phase["temporaries"] + phase["output"] - phase["alias"]
    phase["ideal_seconds"] = phase["flops"] / chip.peak / devices
    phase["link_seconds"] = sum(c["bytes"] for c in phase["collectives"].values()) / chip.link
    phase["fits"] = phase["peak"] < chip.hbm * 0.97 and not phase["refused"]


def _whole(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _per_device(tree) -> int:
    """Bytes on one device; what has no layout, such as an array of the host, is whole on each."""

    def size(x) -> int:
        where = getattr(x, "sharding", None)
        return math.prod(where.shard_shape(x.shape) if where else x.shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))
