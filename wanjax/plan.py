"""Plan: compile the real rollout, decode and update steps of a config for machines that are not
here, and say what they need.

    python -m wanjax.plan --config configs/grpo_wan22.py --topology v5p:4x4x4
    python -m wanjax.plan --config configs/nft_wan22.py --topology h100:8 --json

When a plan does not fit, changes of the config are tried until three alternatives that fit are
found, each compiled as well (--noadvise leaves that out).

Weights are shapes only. TPU topologies compile with XLA:TPU ahead of time (extra wanjax[plan], no
TPU needed), cpu:N for N CPU devices. Where one GPU of the kind is present, h100:N and h200:N
compile for N of them on one host; elsewhere for N CPU devices with xla attention: arguments are
exact then, temporaries an upper *estimate* (the GPU kernel keeps no logits).
Loops are counted as often as they run in collectives, once in the compiler's own FLOP count.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass

if __name__ == "__main__":  # before jax starts a backend: the planner uses no accelerator
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at a time
    count = next((a.rpartition(":")[2] for a in sys.argv if re.search(r"(cpu|h.00):\d+$", a)), "1")
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    )

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convert import disk
from wanjax import optim, train, trees
from wanjax import state as states
from wanjax.algorithms import dmd2, grpo, nft, sft
from wanjax.models import blocks, presets, quant, vae, wan
from wanjax.parallel import sharding
from wanjax.run import metrics

GIB = 2**30
HELD = 0.6  # share of a device that weights and moments may take in a proposed mesh


@dataclass(frozen=True)
class Chip:
    """One device as XLA sees it: memory in bytes, dense bf16 FLOP/s, link bytes/s."""

    hbm: float
    peak: float
    link: float  # ICI or NVLink, all links of one device, one direction
    kernel: str


# cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; a tpu7x chip is two devices, halved here.
# nvidia.com data sheets of H100 SXM and H200: dense bf16, NVLink 900 GB/s both ways.
CHIPS = {
    "v5e": Chip(16 * GIB, metrics.PEAKS["TPU v5e"], 200e9, "splash"),
    "v5p": Chip(95 * GIB, metrics.PEAKS["TPU v5p"], 600e9, "splash"),
    "v6e": Chip(32 * GIB, metrics.PEAKS["TPU v6"], 448e9, "splash"),
    "tpu7x": Chip(96 * GIB, metrics.PEAKS["TPU7x"], 600e9, "splash"),
    "h100": Chip(80e9, metrics.PEAKS["H100"], 450e9, "cudnn"),
    "h200": Chip(141e9, metrics.PEAKS["H200"], 450e9, "cudnn"),
    "cpu": Chip(math.inf, math.inf, math.inf, "xla"),
}
_SIZES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2,
          "s16": 2, "u16": 2, "s8": 1, "u8": 1, "pred": 1, "f8e4m3fn": 1, "f8e5m2": 1}  # fmt: skip
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def devices_of(topology: str) -> tuple[str, list]:
    """(chip name, devices) of a topology name; raises ValueError with the names that exist."""
    name, _, size = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", size):
        raise ValueError(
            f"topology {topology!r} is unknown; expected CHIP:SIZE such as v5p:4x4x4, v6e:16x16, "
            f"v5e:8x8, tpu7x:4x4x4, h100:8, h200:8 or cpu:8 (chips {', '.join(CHIPS)})"
        )
    if CHIPS[name].kernel == "splash":
        try:
            return name, list(topologies.get_topology_desc(topology, platform="tpu").devices)
        except Exception as error:
            raise ValueError(
                f"topology {topology!r}: {str(error).splitlines()[0]}; check the shape, and install"
                " wanjax[plan] for libtpu"
            ) from None
    if CHIPS[name].kernel == "cudnn" and name in jax.devices()[0].device_kind.lower():
        found = topologies.get_topology_desc("", platform="cuda", topology=f"1x1x{size}")
        return name, list(found.devices)
    present = jax.devices("cpu")
    if len(present) < int(size):
        raise ValueError(
            f"topology {topology!r} needs {size} CPU devices, found {len(present)}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}"
        )
    return name, present[: int(size)]


def propose_mesh(number: int, batch: int, heads: int, held: int, hbm: float) -> dict[str, int]:
    """A mesh of `number` devices: as many batch shards as divide, context over the rest, and that
    only by a divisor of the heads where one is possible. Context splits what must be `held`
    (bytes) as well, the shards only until it takes the share HELD of a device: what is whole on
    each of them is never gathered between them."""
    options = []
    for shards in range(1, number + 1):
        if number % shards == 0 and batch % shards == 0:
            context = number // shards
            options.append((heads % context == 0, shards, context))
    _, shards, context = max(options)
    splits = [n for n in range(1, shards + 1) if shards % n == 0]
    fsdp = next((n for n in splits if held / n / context <= hbm * HELD), shards)
    return {"data": shards // fsdp, "fsdp": fsdp, "context": context, "tensor": 1, "stage": 1}


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """{kind: {count, bytes}} per device of optimised HLO; a loop's body counts as often as it
    runs, bytes are those of the results."""
    bodies, entry = _computations(hlo)
    total: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"count": 0, "bytes": 0})

    def visit(name: str, times: int):
        for line in bodies.get(name, ()):
            found = re.search(
                rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(", line
            )  # a -done moves nothing
            if found:
                shapes = [_bytes(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", found[1])]
                # an asynchronous start also names its operand, and u32 contexts
                moved = max(shapes) if found[3] else sum(shapes)
                total[found[2]]["count"] += times
                total[found[2]]["bytes"] += times * moved
            for kind, callee in re.findall(r"(body|calls|to_apply)=%?([\w.\-]+)", line):
                visit(callee, times * (_trips(line, bodies) if kind == "body" else 1))
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            for callee in re.findall(r"[\w.\-]+", branches[1]) if branches else ():
                visit(callee, times)

    visit(entry, 1)
    return dict(total)


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often a while loop runs: as XLA notes it, else (TPU) the limit in its condition, which a
    scan counts to from zero; 1 where neither is there."""
    noted = re.search(r'known_trip_count":?\{"n":"(\d+)"', line)
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if noted or not condition:
        return int(noted[1]) if noted else 1
    rows = "\n".join(bodies.get(condition[1], ()))
    found = [int(n) for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", rows)]
    return found[0] if len(found) == 1 else 1


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and " = " not in line.split("->")[0]:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _bytes(dtype: str, dims: str) -> int:
    return _SIZES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)


def update_flops(config: wan.WanConfig, grid, *, lora: bool) -> int:
    """FLOPs of forward and backward of one sample: backward costs 2.5x of attention (its kernel
    computes the logits again) and 2x of the matmuls, 1x where weights get no gradient; what the
    policy config.remat repeats is counted, but for the little of attention to text."""
    forward = wan.forward_flops(config, grid)
    L, D = math.prod(grid), config.dim
    attention = config.num_layers * 4 * D * L * (L + config.text_len)
    dense = forward - attention
    again = {"none": 0, "save_matmuls": 0, "full": forward}.get(config.remat, dense)
    return int(forward + again + (1 if lora else 2) * dense + 2.5 * attention)


def make_plan(config, topology: str, model: str = "") -> dict:
    """Compile every phase of the ConfigDict for the topology; returns what `main` prints."""
    chip_name, devices = devices_of(topology)
    chip = CHIPS[chip_name]
    if chip.kernel == "cudnn" and devices[0].platform != "cpu":  # as the GPU that is present
        chip = dataclasses.replace(chip, kernel="auto")
    setup, weights = make_setup(config, model, chip)
    own = dict(config.mesh)
    batch = math.gcd(*_batches(config, setup))
    heads = setup.model.wan.num_attention_heads
    proposed = propose_mesh(len(devices), batch, heads, _held(config, setup, weights), chip.hbm)
    grid = states.token_grid(setup)
    try:
        mesh = sharding.make_mesh(own, devices)
        for size in _batches(config, setup):
            wan.check_mesh(setup.model.wan, dict(mesh.shape), size, math.prod(grid))
        note = ""
    except ValueError as error:
        note, mesh = f"the config's mesh cannot run: {error}", sharding.make_mesh(proposed, devices)
    with sharding.use_mesh(mesh):
        state, phases = _compile(config, setup, mesh, weights)
    result = {
        "config": config.name, "model": setup.model.name, "topology": topology,
        "devices": len(devices), "mesh": dict(mesh.shape), "note": note,
        "proposed_mesh": proposed, "hbm": chip.hbm, "estimate": chip.kernel == "cudnn",
        "trees": {
            "parameters": 0 if config.model.offload else _per_device(state.params),
            "adapters": _per_device(state.adapters),
            "optimizer": _per_device((state.opt, state.role_opt)),
        },
        "phases": phases,
    }  # fmt: skip
    result["checkpoint_bytes"] = _whole(jax.eval_shape(lambda s: states.saved(s, setup), state))
    result["host_bytes"] = _whole(state.params) / max(len(devices) // 4, 1)  # hosts of 4 devices
    resident = sum(result["trees"].values())
    for phase in phases.values():
        others = max(resident - phase["arguments"], 0) if phase else 0
        phase["peak"] = phase["arguments"] + phase["temporaries"] + phase["output"] - phase["alias"]
        phase["resident"] = others
        phase["ideal_seconds"] = phase["flops"] / chip.peak / len(devices)
        moved = sum(kind["bytes"] for kind in phase["collectives"].values())
        phase["link_seconds"] = moved / chip.link
        room = phase["peak"] + others < chip.hbm * 0.97
        phase["fits"] = room and not phase["refused"]
    result["fits"] = all(phase["fits"] for phase in phases.values())
    return result


def advise(config, topology: str, model: str = "", most: int = 3) -> list[dict]:
    """Up to `most` sets of config changes with which the plan fits, each compiled: first single
    changes, then those that help, together. [{"changes": {key: value}, "peak": bytes}]."""
    tried, found = [], []
    for changes in _candidates(config):
        peak, fits = _try(config, topology, model, changes)
        tried.append((peak, changes))
        found += [{"changes": changes, "peak": peak}] * fits
        if len(found) == most:
            return found
    together: dict = {}
    for _, changes in sorted(tried, key=lambda pair: pair[0]):
        if found or math.isinf(_):
            break
        together = {**changes, **together}
        peak, fits = _try(config, topology, model, together) if len(together) > 1 else (0, False)
        found += [{"changes": dict(together), "peak": peak}] * fits
    return found


def _candidates(config) -> list[dict]:
    """Changes that save memory, cheapest in time first."""
    found = []
    if config.model.remat in ("none", "save_matmuls"):
        found.append({"model.remat": "full"})
    if config.algorithm != "sft" and config.guidance.mode == "batch":
        found.append({"guidance.mode": "sequential"})
    halves = [k for k in ("micro_samples", "sampling.batch") if _read(config, k) % 2 == 0]
    found += [{key: _read(config, key) // 2 for key in halves}] if halves else []
    if config.lora.rank and config.algorithm != "dmd2" and not config.model.offload:
        found.append({"model.offload": True})
    if config.lora.rank and config.model.param_dtype not in quant.DTYPES:
        found.append({"model.param_dtype": "float8"})
    if config.mesh.context == 1:
        found.append({"mesh.data": 1, "mesh.fsdp": -1})
        found.append({"mesh.data": 1, "mesh.fsdp": -1, "mesh.context": 4})
    return found + [{"model.remat": "offload"}] * (config.model.remat != "offload")


def _read(config, key: str):
    return functools.reduce(lambda node, name: node[name], key.split("."), config)


def _try(config, topology: str, model: str, changes: dict) -> tuple[float, bool]:
    """(highest peak of a phase, whether all fit) of the config with changes; inf where the changed
    config is not legal."""
    print(f"trying   {_in_words(changes)}", file=sys.stderr, flush=True)
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(changes)
    try:
        result = make_plan(changed, topology, model)
    except ValueError:
        return math.inf, False
    if result["note"]:
        return math.inf, False
    return _peak(result), result["fits"]


def _peak(result: dict) -> float:
    return max(phase["peak"] + phase["resident"] for phase in result["phases"].values())


def _in_words(changes: dict) -> str:
    return " and ".join(f"config.{key} = {value}" for key, value in changes.items())


def make_setup(config, model: str, chip: Chip) -> tuple[states.Setup, dict]:
    """(the run's Setup, {role: {expert: shapes}}), a model by its preset's name or the config of
    its folder."""
    train.check(config.to_dict())
    student = _model(config, model or config.model.path, chip)
    kept = {"student": (student, config.model.param_dtype)}
    models = {}
    if config.algorithm == "dmd2":
        for role in ("teacher", "critic"):
            own = config.roles[role]
            models[role] = _model(config, own.path, chip) if own.path else student
            kept |= {role: (models[role], own.param_dtype)} if own.path else {}
    setup = train.make_setup(config, student, models)
    setup = dataclasses.replace(setup, rewards=setup.rewards or {"mean": 1.0})
    train.ALGORITHMS[config.algorithm].check(setup)
    shapes = {role: {e: _weights(*own) for e in own[0].experts} for role, own in kept.items()}
    return setup, shapes


def _model(config, path: str, chip: Chip) -> presets.ModelConfig:
    """The model of a preset's name or a folder, as it runs on the chip."""
    if not path:
        raise ValueError(
            f"config.model.path is empty; set it, or --model to one of {[*presets.MODELS]}"
        )
    found = presets.MODELS.get(path) or disk.model_config(disk.read(path))
    kernel = chip.kernel if config.model.attention == "auto" else config.model.attention
    if chip.kernel == "cudnn" and kernel in ("cudnn", "fa3"):
        kernel = "xla"  # lowered for CPU
    fields = {name: config.model[name] for name in ("dtype", "remat", "context", "interleave")}
    return dataclasses.replace(
        found, wan=dataclasses.replace(found.wan, attention=kernel, **fields)
    )


def _weights(model: presets.ModelConfig, dtype: str):
    return jax.eval_shape(lambda: wan.store(wan.init(jax.random.key(0), model.wan), dtype))


def _whole(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _held(config, setup, weights) -> int:
    """Bytes that training keeps on devices: weights (with model.offload the largest expert's),
    adapters, optimizer states, and half as much as these for gradients."""
    init = functools.partial(train.ALGORITHMS[config.algorithm].init, jax.random.key(0), setup)
    state = jax.eval_shape(init, weights)
    experts = [_whole(tree) for role in state.params.values() for tree in role.values()]
    frozen = max(experts) if config.model.offload else sum(experts)
    return frozen + _whole(state.adapters) + _whole((state.opt, state.role_opt)) * 3 // 2


def _per_device(tree) -> int:
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def _batches(config, setup) -> tuple[int, ...]:
    """Leading sizes of the model's calls: rollout and micro-batch."""
    settings = setup.algorithm
    if config.algorithm == "dmd2":
        return setup.sampling.batch, settings.micro_samples
    micro = settings.micro_samples * settings.micro_steps
    return (micro,) if config.algorithm == "sft" else (setup.sampling.batch, micro)


def _compile(config, setup, mesh, weights):
    """(abstract state, {phase: facts}) of the algorithm's jitted functions on the mesh in use."""
    model = setup.model
    algorithm = train.ALGORITHMS[config.algorithm]
    whole = lambda tree: jax.tree.map(lambda x: _abstract(x, NamedSharding(mesh, P())), tree)
    state = jax.eval_shape(lambda p: algorithm.init(jax.random.key(0), setup, p), weights)
    where = states.shardings(state, mesh)
    if config.model.offload:
        away = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), where.params)
        where = where.replace(params=away)
    state = jax.tree.map(_abstract, state, where)

    rows = model.wan.text_len
    vector = lambda shape, dtype=jnp.float32: whole(jax.ShapeDtypeStruct(shape, dtype))
    context = lambda n: vector((n, rows, model.wan.text_dim))
    key = whole(jax.eval_shape(lambda: jax.random.key(0)))
    grid, phases = states.token_grid(setup), {}
    forward = wan.forward_flops(model.wan, grid)
    if config.algorithm == "sft":
        clips = setup.algorithm.prompts_per_step
        batch = lambda x0, ctx: sft.Batch(x0, ctx, {}, 0, {})
        x0 = vector((clips, *states.latent_shape(setup)))
        data = jax.eval_shape(lambda *a: sft._noised(batch(*a), setup=setup), x0, context(clips))
        slots = {e: list(range(setup.algorithm.timesteps)) for e in setup.experts}
        phases |= _updates(setup, state, whole(data), slots, algorithm, grid)
        return state, phases

    if config.algorithm == "dmd2":
        return state, _distillation(setup, state, vector, whole, key)
    size, samples = setup.sampling.batch, config.group_size * config.prompts_per_step
    policy = states.rollout_params(state, algorithm.SAMPLED)
    ids = vector((size,), jnp.int32)
    passes = algorithm.forwards(setup)["collect"] // samples
    if config.algorithm == "grpo":
        steps_W = grpo.sde_steps(setup, 0)
        slot_I = vector((setup.sampling.schedule.steps,), jnp.int32)
        call = grpo._rollout.lower(
            policy, context(size), context(1), key, ids, slot_I, setup=setup, slots=len(steps_W)
        )
    else:
        steps_W = np.arange(0)
        call = states.sample_latents.lower(policy, context(size), context(1), key, ids, setup=setup)
    phases["rollout"], compiled = _measure(call, forward * size * passes, samples // size)
    out = whole(call.out_info)
    if compiled is not None:
        out = jax.tree.map(_abstract, out, compiled.output_shardings)
    x0, trajectory = out if config.algorithm == "grpo" else (out, None)
    decoder = whole(jax.eval_shape(lambda: vae.init(jax.random.key(0), model.vae)))
    decoder = trees.map_paths(
        lambda _, x: _abstract(x, x.sharding, _plain(config.model.param_dtype)), decoder
    )
    phases["decode"], _ = _measure(
        states.to_pixels.lower(decoder, x0, config=model.vae, tile=setup.sampling.vae_tile),
        0,
        samples // size,
    )
    grow = lambda x, axis: jax.ShapeDtypeStruct(
        (*x.shape[:axis], samples, *x.shape[axis + 1 :]), x.dtype, sharding=x.sharding
    )
    ctx, adv = context(samples), vector((samples,))
    if config.algorithm == "grpo":
        kept = jax.tree.map(lambda x: grow(x, 1), trajectory)
        make = lambda kept, ctx, uncond, adv: grpo._replay_data(
            setup, grpo.Batch(kept, ctx, uncond, adv, steps_W, 0, {})
        )
        data = dict(whole(jax.eval_shape(make, kept, ctx, context(1), adv)))
        data |= {"x_WB": kept.x, "x_next_WB": kept.x_next}
        slots = grpo._slots(setup, steps_W)
    else:
        x0 = grow(x0, 0)
        make = lambda x0, ctx, uncond, adv: nft._noised(
            nft.Batch(x0, ctx, uncond, adv, 0, {}), setup=setup
        )
        data = dict(whole(jax.eval_shape(make, x0, ctx, context(1), adv)), x0_B=x0)
        slots = {e: list(range(setup.algorithm.timesteps)) for e in setup.experts}
    phases["rollout"]["trajectory"] = _per_device(data)
    phases |= _updates(setup, state, data, slots, algorithm, grid)
    return state, phases


def _distillation(setup, state, vector, whole, key) -> dict:
    """The phases of DMD2: each trained expert's longest rollout, student and critic update."""
    settings, model, phases = setup.algorithm, setup.model, {}
    size, micro = setup.sampling.batch, settings.micro_samples
    samples = settings.prompts_per_step * settings.group_size
    row = (model.wan.text_len, model.wan.text_dim)
    grid = states.token_grid(setup)
    wide = lambda role: setup.roles[role].wan
    trains = functools.partial(update_flops, grid=grid, lora=bool(setup.lora.rank))
    policy = states.rollout_params(state, dmd2.SAMPLED)
    rows = {"ctx": vector((size, *row)), "cond": None, "x0": None}
    latents = lambda n: vector((n, *states.latent_shape(setup)))
    number = vector((), jnp.int32)
    for expert in setup.experts:
        own = dmd2._phase(setup, expert).steps
        used = {e: policy[e] for e in policy if expert == "low" or e == "high"}
        ids, uncond = vector((size,), jnp.int32), vector((1, *row))
        call = dmd2._rollout.lower(used, rows, uncond, key, ids, number, setup=setup)
        flops = wan.forward_flops(model.wan, grid) * size * (own.stop - 1)
        phases[f"rollout {expert}"], _ = _measure(call, flops, samples // size)
        for name in ("student", "critic"):
            region = dmd2._regions(setup, expert)[0]
            batch = dmd2.Batch(
                {name: {expert: {"x": latents(samples)}}}, vector((samples, *row)), uncond, None,
                0, {},
            )  # fmt: skip
            if settings.adversarial:
                batch.latents[name][expert]["real"] = latents(samples)
            given = functools.partial(
                dmd2._data, state, setup, batch, expert, name, own.start, region
            )
            fixed = jax.eval_shape(lambda f=given: {k: f()[k] for k in ("level", "keys")})
            data = {
                "x": batch.latents[name][expert], "ctx": batch.ctx_BSE, "cond": None,
                "uncond_1SE": uncond, "ratio_mean_N": state.running.get(region.critic),
                **whole(fixed),
            }  # fmt: skip
            role, moved = ("critic", region.critic) if name == "critic" else ("student", expert)
            judges = {}
            if name == "student":
                for judge, serving in (("teacher", region.teacher), ("critic", region.critic)):
                    judges[judge] = states.role_params(state, judge)[serving]
            optims = setup.optim if role == "student" else setup.role_optim[role]
            call = dmd2._optimize.lower(
                states.trainable(state, setup, role)[moved], states.optimizers(state, role)[moved],
                states.frozen(state, setup, role)[moved], judges, data,
                whole(optim.parts(np.arange(samples), micro)), setup=setup, task=name,
                scale=settings.guidance[region.teacher], config=optims[moved],
            )  # fmt: skip
            one = trains(wide("critic") if role == "critic" else model.wan)
            if name == "student":
                one += 2 * wan.forward_flops(wide("teacher"), grid)
                one += wan.forward_flops(wide("critic"), grid)
            phases[f"{name} {expert}"], _ = _measure(call, samples * one, 1)
    return phases


def _plain(dtype: str):
    """The dtype of weights that stay unquantised, see wan.store."""
    return jnp.dtype("bfloat16" if dtype in quant.DTYPES else dtype)


def _updates(setup, state, data, slots, algorithm, grid) -> dict:
    """The phases of one optimizer step, one per expert (or one for both where they mix)."""
    settings, phases, made = setup.algorithm, {}, {}
    updates = 1 if algorithm is sft else settings.updates
    index_sets = optim.micro_batches(
        slots, np.arange(algorithm.share(setup)), micro_samples=settings.micro_samples,
        micro_steps=settings.micro_steps, mix=settings.mix_experts,
    )  # fmt: skip
    mesh = jax.sharding.get_mesh()
    lora = bool(setup.lora.rank)
    for index in index_sets:
        names = list(index)
        pick = lambda tree, names=names: {e: tree[e] for e in names}
        args = [pick(states.trainable(state, setup)), pick(state.opt)]
        args.append(pick(states.frozen(state, setup)))
        if algorithm is nft:
            averages = {n: states.averaged(state, n) for n in ("old", "ema")}
            args.append({e: {n: averages[n][e] for n in averages} for e in names})
        indices = jax.tree.map(lambda x: _abstract(x, NamedSharding(mesh, P())), index)
        static = {"on_policy": settings.recompute_old_logp} if algorithm is grpo else {}
        call = algorithm._minibatch.lower(*args, data, indices, setup=setup, **static)
        flops = 0
        for expert, parts in index.items():
            one = update_flops(setup.model.wan, grid, lora=lora)
            extra = _extra_forwards(setup, algorithm, expert)
            guided = 2 if _guided(setup, expert) and algorithm is not sft else 1
            each = one + extra * wan.forward_flops(setup.model.wan, grid)
            flops += sum(slot.size for slot, _ in parts) * guided * each
        text = re.sub(r'jax\.\w+ = "[^"]*"', "", call.as_text())  # without names of results
        if text in made:  # the other expert's program is often the same
            phases[f"update {'+'.join(names)}"] = dict(phases[made[text]])
            continue
        made[text] = f"update {'+'.join(names)}"
        phases[made[text]], _ = _measure(call, flops, updates)
    return phases


def _extra_forwards(setup, algorithm, expert: str) -> int:
    """Forwards without gradient beside the trained one: reference, and NFT's old policy."""
    if algorithm is sft:
        return 0
    reference = 1 if setup.algorithm.kl_beta[expert] else 0
    return reference + (algorithm is nft)


def _guided(setup, expert: str) -> bool:
    return getattr(setup.sampling.guidance, expert) != 1


def _abstract(x, where, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=where)


def _measure(lowered, flops: int, calls: int) -> tuple[dict, jax.stages.Compiled | None]:
    """Compile, and read memory, collectives and the compiler's own FLOPs per device and call.

    Of a program that XLA:TPU refuses for its memory, the memory it asks for and no executable.
    """
    started = time.time()
    with _Stderr() as printed:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            compiled, needed = None, _needed(str(error))
    seconds = time.time() - started
    print(f"compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
    if compiled is None:
        keys = ("arguments", "output", "alias", "flops_compiler_loops_once", "rematerializations")
        facts = dict.fromkeys(keys, 0) | {"temporaries": needed, "flops": flops, "calls": calls}
        facts |= {"collectives": {}, "compile_seconds": round(seconds, 1), "refused": True}
        return facts, None
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text() or ""
    facts = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "flops": flops,
        "flops_compiler_loops_once": cost.get("flops", 0.0),
        "calls": calls,
        "collectives": collectives(text),
        "compile_seconds": round(seconds, 1),
        "rematerializations": printed.text.count("Involuntary full rematerialization"),
        "refused": False,
    }
    return facts, compiled


def _needed(error: str) -> int:
    """Bytes of device memory that a refused program asks for; raises RuntimeError for other
    errors, such as a kernel that does not fit VMEM."""
    if "RESOURCE_EXHAUSTED" not in error or "vmem" in error.lower():
        raise RuntimeError(error)
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    sizes = re.findall(r"([\d.]+)([KMGT])i?B?\b", error)
    return max((int(float(number) * units[unit]) for number, unit in sizes), default=0)


class _Stderr:
    """What C++ code writes to stderr meanwhile, in `text`; passed on afterwards when it fails."""

    def __enter__(self):
        self.text, self._file = "", tempfile.TemporaryFile()
        sys.stderr.flush()
        self._kept = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, kind, *_):
        os.dup2(self._kept, 2)
        os.close(self._kept)
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()


def describe(result: dict) -> str:
    """The plan in words, memory in GiB per device."""
    gib = lambda n: f"{n / GIB:.1f}"
    mesh = " ".join(f"{axis}={n}" for axis, n in result["mesh"].items() if n > 1)
    lines = [
        f"{result['config']} on {result['topology']}: {result['devices']} devices, "
        f"{gib(result['hbm'])} GiB each, mesh {mesh or 'of one device'}"
    ]
    if result["note"]:
        lines += [f"note     {result['note']}"]
    parts = (f"{name} {gib(n)}" for name, n in result["trees"].items())
    lines.append("resident " + ", ".join(parts) + " GiB per device")
    lines.append(
        f"{'phase':16}{'args':>7}{'temp':>7}{'out':>7}{'peak':>7}{'rest':>7}  fits"
        f"{'PFLOP':>9}{'ideal s':>9}{'links s':>9}{'calls':>6}{'compile':>9}"
        "  collectives per device"
    )
    for name, p in result["phases"].items():
        moved = ", ".join(
            f"{kind} {c['count']}x {gib(c['bytes'])} GiB" for kind, c in p["collectives"].items()
        )
        sizes = (p["arguments"], p["temporaries"], p["output"], p["peak"], p["resident"])
        lines.append(
            f"{name:16}"
            + "".join(f"{gib(n):>7}" for n in sizes)
            + f"  {'yes' if p['fits'] else 'NO':4}{p['flops'] / 1e15:>9.2f}"
            f"{p['ideal_seconds']:>9.2f}{p['link_seconds']:>9.2f}{p['calls']:>6}"
            f"{p['compile_seconds']:>8}s  "
            f"{moved or 'none'}"
        )
        if p["rematerializations"]:
            lines.append(f"  {p['rematerializations']} involuntary full rematerializations (SPMD)")
        if p["link_seconds"] > p["ideal_seconds"] > 0:  # of a decode no products are counted
            lines.append(f"  its collectives take longer than its products: {_relief(name, p)}")
    lines.append(
        f"checkpoint {gib(result['checkpoint_bytes'])} GiB, weights on each host while loading "
        f"{gib(result['host_bytes'])} GiB; proposed mesh "
        + " ".join(f"{a}={n}" for a, n in result["proposed_mesh"].items() if n > 1)
    )
    for option in result.get("advice", ()):
        changes, peak = _in_words(option["changes"]), gib(option["peak"])
        lines.append(f"fits with {changes}: peak {peak} GiB")
    if result.get("advice") == []:
        lines.append("no change that was tried makes it fit; take more devices or a smaller video")
    if result["estimate"]:
        lines.append("estimate: compiled for CPU devices; temporaries of the GPU kernel differ")
    return "\n".join(lines)


def _relief(name: str, phase: dict) -> str:
    """What lowers the bytes of a phase's largest kind of collective."""
    kinds = phase["collectives"]
    if max(kinds, key=lambda kind: kinds[kind]["bytes"]) == "all-gather":
        key = "sampling.batch" if name.startswith("rollout") else "micro_samples"
        return f"raise config.{key}, so that weights are gathered for more samples at a time"
    return "lower config.mesh.context or config.mesh.tensor"


def _command_line(argv) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config = train._CONFIG.value
    blocks.set_xla_flags(config.model.remat, config.mesh.stage)
    try:
        result = make_plan(config, _TOPOLOGY.value or "", _MODEL.value)
    except ValueError as error:
        sys.exit(f"wanjax.plan: {error}")
    if not result["fits"] and _ADVISE.value:
        result["advice"] = advise(config, _TOPOLOGY.value or "", _MODEL.value)
    print(json.dumps(result, default=float) if _JSON.value else describe(result), flush=True)


_TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SIZE, such as v5p:4x4x4 or h100:8")
_MODEL = flags.DEFINE_string("model", "", "preset of wanjax.models.presets; needs no weights")
_ADVISE = flags.DEFINE_bool("advise", True, "look for changes that fit when the config does not")
_JSON = flags.DEFINE_bool("json", False, "print JSON")

if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    app.run(_command_line)
