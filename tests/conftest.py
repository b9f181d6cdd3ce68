"""Eight CPU devices, full float32 matmuls and strict ranks for every test."""

import ctypes
import gc
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0"  # tests compile far more than they compute
    # eight devices on two busy cores may be late at a collective; that is no deadlock
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + " --xla_cpu_collective_timeout_seconds=600"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones lack it
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"  # compiles in half the time
os.environ.setdefault("NPROC", "16")  # threads of XLA:CPU; see wanjax.parallel.distributed.start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests.emulator import bucket, place, stores  # noqa: E402, F401  fixtures

jax.config.update("jax_cpu_enable_async_dispatch", False)  # see wanjax.parallel.distributed.start
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Share compiled programs among this run's processes: tests compile the same ones many times
    over (a new Setup is a new program to jit)."""
    if not hasattr(config, "workerinput"):  # workers and subprocesses inherit the environment
        folder = tempfile.mkdtemp(prefix="wanjax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["XDG_CACHE_HOME"] = folder  # of convert.digest
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def _release_memory_maps():
    """Drop compiled programs before their memory maps reach Linux's limit of 65,530 a process.

    A gradient test adds about a thousand maps; at the limit XLA's compiler crashes (jax 0.10.2).
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        _release()


@pytest.fixture(autouse=True, scope="module")
def _release_memory():
    """Give a finished test file's programs and arrays back: without it a process grows past 4 GB,
    more than small machines have for each of two."""
    yield
    _release()


def _release():
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def rng():
    """A numpy generator with a fixed seed."""
    return np.random.default_rng(0)
