"""Eight CPU devices, full float32 matmuls and strict ranks for every test."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # eight devices on two busy cores may be late at a collective; that is no deadlock
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + " --xla_cpu_collective_timeout_seconds=600"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Many tests compile the same programs: compile each once per checkout.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng():
    """A numpy generator with a fixed seed."""
    return np.random.default_rng(0)
