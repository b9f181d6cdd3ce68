"""Flags are those of the chips in use and never the user's; the compile cache of several processes
serves all of them."""

import os
import sys
import textwrap

import jax
import pytest

from tests.parallel.test_distributed import free_port, side_by_side
from wanjax.parallel import runtime

KEEP = "--xla_gpu_enable_dynamic_slice_fusion=false"
FETCH = "--xla_gpu_enable_pipelined_host_offloading=true"
HIDE = "--xla_gpu_enable_latency_hiding_scheduler=true"
VMEM = "--xla_tpu_scoped_vmem_limit_kib=65536"


@pytest.fixture
def environment(monkeypatch):
    """Flags of nobody, on a machine of 1,024 GB without TPUs; put back at the end."""
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1024 * 10**9 // 4096}
    monkeypatch.setattr(runtime.os, "sysconf", pages.__getitem__)


@pytest.mark.parametrize("remat, mesh, flags", [
    ("full", {}, []),
    ("full", {"data": -1, "fsdp": 1, "context": 1}, []),  # nothing to overlap
    ("none", {"context": 4}, [HIDE]),
    ("save_matmuls", {"stage": 2}, [KEEP]),
    ("offload", {"stage": 2}, [KEEP]),  # no fetches ahead
    ("offload", {"fsdp": 2}, [KEEP, FETCH, HIDE]),
])  # fmt: skip
def test_flags_of_gpus_and_host_memory(environment, monkeypatch, remat, mesh, flags):
    runtime.set_flags(remat, mesh)
    assert os.environ.get("XLA_FLAGS", "").split() == flags
    assert "LIBTPU_INIT_ARGS" not in os.environ
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "768"
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")
    runtime.set_flags(remat, mesh)
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "100"
    assert os.environ.get("XLA_FLAGS", "").split() == flags  # not twice


def test_what_the_user_has_set_stays(environment, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=d --xla_gpu_enable_dynamic_slice_fusion=true")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    runtime.set_flags("offload", {}, "v6e")
    assert os.environ["XLA_FLAGS"] == (
        "--xla_dump_to=d --xla_gpu_enable_dynamic_slice_fusion=true " + FETCH
    )
    assert os.environ["LIBTPU_INIT_ARGS"].split() == [
        "--xla_tpu_scoped_vmem_limit_kib=98304",
        "--xla_tpu_enable_async_all_to_all=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
    ]


@pytest.mark.parametrize("chip, tuned", [("v4", False), ("v5e", False), ("v5p", True)])
def test_flags_are_those_of_the_chip(environment, chip, tuned):
    runtime.set_flags("full", {}, chip)
    flags = os.environ["LIBTPU_INIT_ARGS"].split()
    assert (VMEM in flags) == tuned and "--xla_tpu_enable_async_all_to_all=true" in flags


@pytest.mark.parametrize("devices, flags", [
    ([("0x10de", "0x2335"), ("0x1ae0", "0x0042")], None),  # an H200, and Google's network card
    ([("0x1ae0", "0x0042"), ("0x1ae0", "0x006f")], runtime.TPU_FLAGS["v6e"]),
    ([("0x1ae0", "0x0063")], runtime.TPU_FLAGS["v5e"]),
])  # fmt: skip
def test_the_chip_is_known_before_its_backend_starts(
    environment, monkeypatch, tmp_path, devices, flags
):
    for number, (vendor, device) in enumerate(devices):
        folder = tmp_path / f"0000:00:0{number}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setattr(runtime, "_PCI", tmp_path)
    runtime.set_flags("full", {})
    assert os.environ.get("LIBTPU_INIT_ARGS") == (flags and " ".join(flags))


CHILD = textwrap.dedent("""
    import os, sys
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    import jax
    import jax.numpy as jnp
    from jax._src import cache_key
    from jax.sharding import NamedSharding, PartitionSpec as P
    from wanjax.parallel import distributed, runtime, sharding
    port, number, rank, folder, workdir = sys.argv[1:]
    distributed.start(f"127.0.0.1:{port}", int(number), int(rank))
    runtime.use_compile_cache(folder, workdir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # accelerators have one topology for all; that of CPU devices has the process's own ones alone
    cache_key._hash_accelerator_config = cache_key._hash_devices
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    where = NamedSharding(sharding.make_mesh({"data": -1}), P("data"))
    x = jax.jit(lambda: jnp.arange(8.0), out_shardings=where)()
    jax.jit(lambda x: jnp.sin(x).sum())(x).block_until_ready()
    print("hits", events.count("/jax/compilation_cache/cache_hits"), "of",
          events.count("/jax/compilation_cache/compile_requests_use_cache"))
""")


def _starts(folders, workdir):
    """What each process found in the cache, of one start."""
    port, number = str(free_port()), str(len(folders))
    places = [(str(rank), folder, str(workdir)) for rank, folder in enumerate(folders)]
    codes, outputs, _ = side_by_side(
        [[sys.executable, "-c", CHILD, port, number, *place] for place in places]
    )
    assert not any(codes), outputs
    return [line for text in outputs for line in text.splitlines() if line.startswith("hits")]


def test_the_second_start_of_several_processes_compiles_nothing_on_any_of_them(tmp_path):
    assert _starts(["auto"] * 2, tmp_path) == ["hits 0 of 2"] * 2
    assert len(list((tmp_path / ".compile_cache").glob("*-cache"))) == 2
    assert _starts(["auto"] * 2, tmp_path) == ["hits 2 of 2"] * 2


@pytest.mark.slow
def test_with_a_folder_of_each_only_the_first_process_finds_programs(tmp_path):
    """Why "auto" is a shared folder."""
    own = [str(tmp_path / "a"), str(tmp_path / "b")]
    _starts(own, tmp_path)
    assert _starts(own, tmp_path) == ["hits 2 of 2", "hits 0 of 2"]


def test_programs_are_kept_in_an_object_store(bucket):
    assert _starts([f"{bucket}/cache"], "unused") == ["hits 0 of 2"]
    assert _starts([f"{bucket}/cache"], "unused") == ["hits 2 of 2"]


@pytest.mark.parametrize("folder, known, expected", [
    ("auto", None, "~/.cache/wanjax"),
    ("auto", "mine", "mine"),  # JAX_COMPILATION_CACHE_DIR
    ("~/programs", "mine", "~/programs"),
    ("", "mine", None),
    ("gs://b/programs", None, "gs://b/programs"),
])  # fmt: skip
def test_where_one_process_keeps_its_programs(folder, known, expected):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: jax.config.values[name] for name in names}
    try:
        jax.config.update(names[0], known)
        runtime.use_compile_cache(folder, "runs")
        found, kernels = (jax.config.values[name] for name in names)
        assert found == (expected and os.path.expanduser(expected))
        assert (kernels == "none") == folder.startswith("gs://")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
