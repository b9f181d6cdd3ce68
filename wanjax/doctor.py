"""Doctor: check this machine before a run; every line is OK, WARN or FAIL with what to change.

    python -m wanjax.doctor [--model FOLDER] [--workdir runs] [--json]

Exit code 1 when a line is FAIL.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable

import av
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convert import disk
from wanjax.models import attention
from wanjax.parallel import sharding

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu")
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
Line = tuple[str, str, str]  # OK, WARN or FAIL; what was checked; finding and what to change


def run(model: str, workdir: str) -> list[Line]:
    """All lines; a check that raises is a FAIL with its error."""
    checks: dict[str, Callable[[], list[Line]]] = {
        "versions": versions,
        "environment": environment,
        "devices": devices,
        "matmul": matmul,
        "collective": collective,
        "kernels": kernels,
        "storage": functools.partial(storage, workdir),
        "video": video,
        "checkpoint": functools.partial(checkpoint, model),
    }
    lines: list[Line] = []
    for name, check in checks.items():
        try:
            lines += check()
        except Exception as error:  # a report must not stop at its first finding
            lines.append(("FAIL", name, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
    return lines


def _judged(status: str, check: str, finding: str, hint: str) -> Line:
    """The line of a check that is OK if there is nothing to change, else of this status."""
    return (status, check, f"{finding}; {hint}") if hint else ("OK", check, finding)


def versions() -> list[Line]:
    """Versions, and GPU plugins that cannot be installed together."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    lines = [("OK", name, found[name]) for name in (*PACKAGES, *PLUGINS) if name in found]
    plugins = [name for name in PLUGINS if name in found]
    if len(plugins) > 1:
        lines.append(("FAIL", "plugins", f"{' and '.join(plugins)} are installed; uninstall one"))
    return lines


def environment() -> list[Line]:
    """Variables and limits known to break or slow down runs."""
    lines: list[Line] = []
    platforms = os.environ.get("JAX_PLATFORMS", "")
    accelerator = os.path.exists("/dev/accel0") or shutil.which("nvidia-smi")
    if platforms == "cpu" and accelerator:
        lines.append(("WARN", "JAX_PLATFORMS", "is cpu; unset it to use an accelerator"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = f"run ulimit -n {min(hard, 65536)}" if soft < 4096 else ""
    lines.append(_judged("WARN", "open files", f"limit {soft}", hint))
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total / 2**30
        hint = "start the container with --shm-size=16g" if size < 1 else ""
        lines.append(_judged("WARN", "/dev/shm", f"{size:.1f} GiB", hint))
    lock = pathlib.Path(tempfile.gettempdir()) / "libtpu_lockfile"
    if lock.exists() and jax.default_backend() != "tpu":
        lines.append(("WARN", "TPU", f"{lock} exists: another process may hold the TPU; stop it"))
    return lines


def devices() -> list[Line]:
    """Devices and their memory."""
    found = jax.devices()
    limit = (found[0].memory_stats() or {}).get("bytes_limit")
    memory = f", {limit / 2**30:.1f} GiB each" if limit else ""
    lines: list[Line] = [("OK", "devices", f"{len(found)} x {found[0].device_kind}{memory}")]
    if found[0].platform == "cpu":
        lines.append(("WARN", "backend", "cpu; install wanjax[gpu] or wanjax[tpu] to train fast"))
    return lines


def matmul() -> list[Line]:
    """A float32 matmul on every device against float64 numpy."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(256, 256)).astype(np.float32) for _ in range(2))
    want, worst = a.astype(np.float64) @ b, 0.0
    for device in jax.local_devices():
        x, y = jax.device_put((a, b), device)
        got = jnp.matmul(x, y, precision="highest")
        worst = max(worst, float(np.abs(np.asarray(got) - want).max() / np.abs(want).max()))
    hint = "" if worst < 1e-5 else "a device computes wrongly: replace the machine"
    return [_judged("FAIL", "matmul", f"relative error {worst:.1e}", hint)]


def collective() -> list[Line]:
    """An integer sum over all devices, which must be exact."""
    mesh = sharding.make_mesh({"data": -1})
    number = len(jax.devices())
    x = jax.device_put(np.arange(number, dtype=np.int32), NamedSharding(mesh, P("data")))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
    want, got = number * (number - 1) // 2, int(total)
    hint = "" if got == want else f", expected {want}; check NCCL or ICI"
    return [("FAIL" if hint else "OK", "collective", f"sum over {number} devices {got}{hint}")]


def kernels() -> list[Line]:
    """Each attention kernel of this backend against xla, values and gradients."""
    available = {"cpu": (), "tpu": ("splash",), "gpu": ("cudnn", "fa3")}[jax.default_backend()]
    if importlib.util.find_spec("flash_attn3_jax") is None:
        available = tuple(name for name in available if name != "fa3")
    keys = jax.random.split(jax.random.key(0), 3)
    # drawn in float32: jax's normal in bfloat16 has 128 values
    qkv = [jax.random.normal(key, (1, 1000, 2, 128)).astype(jnp.bfloat16) for key in keys]

    def value(kernel):
        def loss(q, k, v):
            return attention.attend(q, k, v, kernel=kernel).astype(jnp.float32).var()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*qkv)

    want, lines = jax.tree.leaves(value("xla")), []
    for name in available:
        pairs, norm = zip(jax.tree.leaves(value(name)), want, strict=True), jnp.linalg.norm
        worst = max(float(norm((a - b).astype(jnp.float32)) / norm(b)) for a, b in pairs)
        hint = "" if worst < 0.03 else "set config.model.attention to another kernel"
        lines.append(_judged("FAIL", f"attention {name}", f"error {worst:.1e}", hint))
    return lines or [("OK", "attention", "xla is the only kernel of this backend")]


def storage(workdir: str) -> list[Line]:
    """Free disk space where runs are written."""
    folder = pathlib.Path(workdir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if not os.access(folder, os.W_OK):
        hint = "set config.workdir to a folder that is"
        return [("FAIL", "workdir", f"{folder} is not writable; {hint}")]
    hint = "free some or set config.workdir, an A14B LoRA checkpoint takes 10 GiB"
    return [_judged("WARN", "workdir", f"{folder}: {free:.0f} GiB free", hint * (free < 50))]


def video() -> list[Line]:
    """The encoder for sample videos."""
    found = "libx264" in av.codecs_available
    hint = "" if found else "reinstall PyAV from its wheel, which has it: pip install av"
    return [_judged("FAIL", "video", f"PyAV {av.__version__}, {'H.264' * found}", hint)]


def checkpoint(model: str) -> list[Line]:
    """Components and tokenizer of a model folder."""
    if not model:
        return []
    found = disk.read(model)
    config = disk.model_config(found)
    text = f"{config.name}: {', '.join(found.tensors)}"
    if not config.tokenizer:
        return [("FAIL", "model", f"{text}; no tokenizer: download the whole model folder")]
    return [("OK", "model", text)]


def main(argv=None) -> int:
    """Print the lines; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m wanjax.doctor", description=__doc__)
    parser.add_argument("--model", default="", help="model folder to check")
    parser.add_argument("--workdir", default="runs", help="where runs are written")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    lines = run(args.model, args.workdir)
    if args.json:
        keys = ("status", "check", "finding")
        print(json.dumps([dict(zip(keys, line, strict=True)) for line in lines]))
    else:
        print("\n".join(f"{status:5} {name:18} {finding}" for status, name, finding in lines))
    return int(any(status == "FAIL" for status, _, _ in lines))


if __name__ == "__main__":
    sys.exit(main())
