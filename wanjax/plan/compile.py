"""One plan: every phase of a config compiled for a topology, from the programs of its algorithm."""

import dataclasses
import math
import re

import jax

from wanjax import settings, setup
from wanjax import state as states
from wanjax.algorithms import Program, Tools, steps
from wanjax.models import presets, quant, vae
from wanjax.parallel import sharding
from wanjax.plan import hlo
from wanjax.plan.chips import CHIPS, Chip, devices_of, propose_mesh


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
        state = setup.abstract_state(config, run, algorithm, mesh)
        phases = _compile(algorithm.programs(state, run, _tools(config, run.model)))
    resident = {
        "parameters": 0 if config.model.offload else _per_device(state.params),
        "adapters": _per_device(state.adapters),
        "optimizer": _per_device((state.opt, state.role_opt)),
    }
    for phase in phases.values():
        _judge(phase, chip, len(devices), sum(resident.values()))
    return {
        "config": config.name, "model": run.model.name, "topology": topology,
        "devices": len(devices), "mesh": dict(mesh.shape), "note": note,
        "proposed_mesh": proposed, "hbm": chip.hbm, "estimate": chip.kernel == "cudnn",
        "trees": resident,
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
    plain = "bfloat16" if config.model.param_dtype in quant.DTYPES else config.model.param_dtype
    decoder = jax.eval_shape(lambda: vae.init(jax.random.key(0), model.vae))
    decoder = jax.tree.map(lambda x: steps.shape(*x.shape, dtype=plain), decoder)
    return Tools(decoder, steps.shape(1, model.wan.text_len, model.wan.text_dim))


def _compile(programs: dict[str, Program]) -> dict[str, dict]:
    """{phase: facts of hlo.measure} of programs in their order; equal ones are compiled once."""
    phases, made, first = {}, {}, {}
    for name, program in programs.items():
        call = program.function.lower(*program.arguments(made), **program.keywords)
        text = re.sub(r'jax\.\w+ = "[^"]*"', "", call.as_text())  # without names of results
        if text in first:  # the other expert's program is often the same
            same = first[text]
            phases[name], made[name] = dict(phases[same]), made[same]
            continue
        first[text] = name
        phases[name], compiled = hlo.measure(call, program.flops, program.calls)
        made[name] = steps.whole(call.out_info)
        if compiled is not None:
            made[name] = jax.tree.map(_placed, made[name], compiled.output_shardings)
    return phases


def _placed(x, where):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _judge(phase: dict, chip: Chip, devices: int, resident: int) -> None:
    """Add to the facts of a phase its peak, its ideal time, and whether it fits the chip."""
    phase["peak"] = phase["arguments"] + phase["temporaries"] + phase["output"] - phase["alias"]
    phase["resident"] = max(resident - phase["arguments"], 0)
    phase["ideal_seconds"] = phase["flops"] / chip.peak / devices
    phase["link_seconds"] = sum(c["bytes"] for c in phase["collectives"].values()) / chip.link
    room = phase["peak"] + phase["resident"] < chip.hbm * 0.97
    phase["fits"] = room and not phase["refused"]


def _whole(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _per_device(tree) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
