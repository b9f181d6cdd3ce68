"""Plan: compile the real rollout, decode and update steps of a config for machines you don't have,
and say what they need.

    python -m wanjax.plan --config configs/grpo_wan22.py --topology v5p:4x4x4
    python -m wanjax.plan --config configs/nft_wan22.py --topology h100:8 --json

When a plan does not fit, changes of the config are tried until three alternatives that fit are
found, each compiled as well (--noadvise leaves that out).

The total is the largest phase with all that is on the device meanwhile, which the residents list:
weights, moments, encoders, VAE, reward towers and what they need at work, contexts, the batch of a
step, videos in flight. Not in it: your own reward functions' memory, and the chunks in which
weights are read.
Weights are shapes only. TPU topologies compile with XLA:TPU ahead of time (extra wanjax[plan], no
TPU needed), cpu:N for N CPU devices. Where one GPU of the kind is present, h100:N and h200:N
compile for N of them on one host; elsewhere for N CPU devices with xla attention: residents are
exact then, temporaries an upper *estimate* (the GPU kernel keeps no logits).
Loops are counted as often as they run in collectives, once in the compiler's own FLOP count.
"""

import json
import os
import re
import sys

if __name__ == "__main__":  # before jax starts a backend
    nvidia = any(re.search(r"h.00:\d+$", a) for a in sys.argv) and os.path.exists("/dev/nvidiactl")
    if nvidia:  # a GPU only compiles here, and others may use it
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several plans at a time
    count = next((a.rpartition(":")[2] for a in sys.argv if re.search(r"(cpu|h.00):\d+$", a)), "1")
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    )

from absl import flags, logging

from wanjax import command, setup
from wanjax.parallel import runtime
from wanjax.plan import advice
from wanjax.plan.chips import GIB
from wanjax.plan.compile import make_plan


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
    phases = result["phases"]
    largest = max(phases, key=lambda name: phases[name]["peak"])
    lines.append(f"total    {gib(result['total'])} GiB per device, in phase {largest}")
    parts = (f"{name} {n / GIB:.2f}" for name, n in result["residents"].items() if n)
    lines.append("resident " + ", ".join(parts) + " GiB per device")
    if result["uncounted"]:
        lines.append(f"not counted: what the rewards {', '.join(result['uncounted'])} hold")
    lines.append(
        f"{'phase':18}{'args':>7}{'held':>7}{'temp':>7}{'out':>7}{'peak':>7}  fits"
        f"{'PFLOP':>9}{'ideal s':>9}{'links s':>9}{'calls':>6}{'compile':>9}"
        "  collectives per device"
    )
    for name, p in phases.items():
        moved = ", ".join(
            f"{kind} {c['count']}x {gib(c['bytes'])} GiB" for kind, c in p["collectives"].items()
        )
        new = p["output"] - p["alias"]  # what does not take the place of an argument
        sizes = (p["arguments"], p["held"], p["temporaries"], new, p["peak"])
        lines.append(
            f"{name:18}"
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
        changes, peak = advice.in_words(option["changes"]), gib(option["peak"])
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


def _command_line() -> None:
    logging.set_verbosity(logging.WARNING)
    config = setup.CONFIG.value
    chip = (_TOPOLOGY.value or "").partition(":")[0]
    runtime.set_flags(config.model.remat, config.mesh.to_dict(), chip)
    try:
        result = make_plan(config, _TOPOLOGY.value or "", _MODEL.value)
    except ValueError as error:
        if command.DEBUG.value:
            raise
        sys.exit(f"wanjax.plan: {error}")
    if not result["fits"] and _ADVISE.value:
        result["advice"] = advice.advise(config, _TOPOLOGY.value or "", _MODEL.value)
    print(json.dumps(result, default=float) if _JSON.value else describe(result), flush=True)


_TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SIZE, such as v5p:4x4x4 or h100:8")
_MODEL = flags.DEFINE_string("model", "", "preset of wanjax.models.presets; needs no weights")
_ADVISE = flags.DEFINE_bool("advise", True, "look for changes that fit when the config does not")
_JSON = flags.DEFINE_bool("json", False, "print JSON")

if __name__ == "__main__":
    command.parse("wanjax.plan", __doc__ or "", ("config", "topology"))
    _command_line()
