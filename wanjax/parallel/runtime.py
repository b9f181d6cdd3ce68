"""What has to be said to XLA outside of any program: compiler flags for the chips in use, host
memory for offloading, and where compiled programs are kept.

Flags reach a backend through the environment when it starts, so `set_flags` comes before any use of
devices. One that the user has set, to whatever value, stays as it is. libtpu ends the process at a
flag that it does not know: those below compiled programs for every chip with libtpu 0.0.42, and
python -m wanjax.plan uses them too.
"""

import os
import pathlib
from collections.abc import Mapping

import jax

# PCI devices of Google's vendor id, as jax's own detection has them; what else names the chip
# (device_kind, the metadata server) is known only after the backend has read its flags.
_PCI, _VENDOR = pathlib.Path("/sys/bus/pci/devices"), "0x1ae0"
_TPUS = {
    "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x",
}  # fmt: skip
# The latency hiding scheduler and async collective fusion of all-gathers are on by default. Not so
# for Ulysses' all-to-alls: the first of these makes them asynchronous, the second lets products run
# meanwhile (openxla.org/xla/flags_guidance).
_ALL_TO_ALL = (
    "--xla_tpu_enable_async_all_to_all=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
)
# VMEM of one fused operation, 16 MiB by default: with 64 a product streams larger tiles. By
# XLA:TPU's estimates those of a 14B training step on v5p then take 4.0 s instead of 4.8, and
# compiling takes twice as long; MaxDiffusion's Wan recipes for v6e and 7x set 32 to 64 MiB. For v4
# and v5e nothing is known.
_VMEM = ("--xla_tpu_scoped_vmem_limit_kib=65536",)
TPU_FLAGS = {
    "v4": _ALL_TO_ALL,
    "v5e": _ALL_TO_ALL,
    "v5p": _ALL_TO_ALL + _VMEM,
    "v6e": _ALL_TO_ALL + _VMEM,
    "tpu7x": _ALL_TO_ALL + _VMEM,
}


def set_flags(remat: str, mesh: Mapping[str, int], chip: str | None = None) -> None:
    """Set the XLA flags of a run that the user has not set; call before any use of devices.

    Args:
      remat: policy of `models.blocks`.
      mesh: sizes of the mesh's axes; those left out are 1.
      chip: kind of TPU, a key of TPU_FLAGS; None for what this machine has.
    """
    flags = []
    if remat not in ("none", "full"):
        # this fusion would run the attention kernel a second time to write the kept copy
        flags.append("--xla_gpu_enable_dynamic_slice_fusion=false")
    if remat == "offload" and mesh.get("stage", 1) == 1:
        # fetch what the next block needs during this one; a pipeline has many blocks in flight
        flags.append("--xla_gpu_enable_pipelined_host_offloading=true")
    if mesh.get("context", 1) > 1 or mesh.get("fsdp", 1) > 1:
        # off by default on GPUs, where a layer's collectives then run between its kernels, not
        # beside them; without such collectives it only reorders, at the price of memory:
        # docs.jax.dev/en/latest/gpu_performance_tips.html
        flags.append("--xla_gpu_enable_latency_hiding_scheduler=true")
    _append("XLA_FLAGS", flags)
    _append("LIBTPU_INIT_ARGS", TPU_FLAGS.get(_tpu() if chip is None else chip, ()))
    # otherwise XLA stops at 64 GB of host memory for all GPUs of a process together
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = max(64, int(0.75 * ram / 1e9))
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(limit))


def use_compile_cache(folder: str, workdir: str) -> None:
    """Keep compiled programs in a folder, local or in an object store, for the next start; "" for
    nowhere. Call between `distributed.start` and the first program.

    "auto" is JAX_COMPILATION_CACHE_DIR, else ~/.cache/wanjax for one process and a folder in
    `workdir` for several: process 0 alone writes (jax), so that a folder of each host would stay
    empty on all others. Everybody who can write to it can run code in this process.
    """
    if folder == "auto":
        if jax.config.values["jax_compilation_cache_dir"]:
            return
        shared = os.path.join(workdir, ".compile_cache")
        folder = "~/.cache/wanjax" if jax.process_count() == 1 else shared
    folder = os.path.expanduser(folder)
    jax.config.update("jax_compilation_cache_dir", folder or None)
    if (
        "://" in folder
    ):  # XLA would write its cache of autotuned GPU kernels there, without a client
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _tpu() -> str:
    """Kind of the TPUs of this machine; "" without any, or for one that has no flags."""
    for file in sorted(_PCI.glob("*/vendor")):
        kind = file.with_name("device").read_text().strip()
        if file.read_text().strip() == _VENDOR and kind in _TPUS:
            return _TPUS[kind]
    return ""


def _append(variable: str, flags) -> None:
    """Add flags to an environment variable, but those that it names already."""
    given = os.environ.get(variable, "").split()
    named = {flag.partition("=")[0] for flag in given}
    added = [flag for flag in flags if flag.partition("=")[0] not in named]
    if added:
        os.environ[variable] = " ".join(given + added)
