"""checkpoint.py: exact round trips, only whole checkpoints count, one config per run folder."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax import paths
from wanjax.run import checkpoint


def make_state(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    lora = {
        "high": {"blocks/attn1/to_q": {"a": jax.random.normal(keys[0], (2, 8, 4))}},
        "low": {"to_out.0": {"b": jax.random.normal(keys[1], (2, 4, 8)).astype(jnp.bfloat16)}},
    }
    return {
        "adapters": {"default": lora},
        "opt": optax.adamw(1e-3).init(lora),
        "count": jnp.int32(seed),
        "host": np.arange(3, dtype=np.float64) / 3,
    }


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def assert_bits_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def newest_data_file(run_dir, step):
    """The largest array file of a checkpoint."""
    files = [
        p for p in (run_dir / f"checkpoints/step_{step:08d}/arrays").rglob("d/*") if p.is_file()
    ]
    return max(files, key=lambda p: p.stat().st_size)


def test_one_part_is_read_into_host_memory_alone(tmp_path, monkeypatch):
    state = make_state()
    del state["host"]
    checkpoint.save(tmp_path, 1, state, {})
    asked, original = [], ocp.args.PyTreeRestore
    spy = lambda item, *args, **given: asked.extend(item) or original(item, *args, **given)
    monkeypatch.setattr(ocp.args, "PyTreeRestore", spy)
    found = checkpoint.read(tmp_path, 1, "adapters")
    names = ("default/high/blocks/attn1/to_q/a", "default/low/to_out.0/b")
    assert set(found) == set(names) and asked == [f"adapters/{name}" for name in names]
    for array, want in zip(found.values(), jax.tree.leaves(state["adapters"]), strict=True):
        assert type(array) is np.ndarray and array.dtype == want.dtype
        np.testing.assert_array_equal(array, want)
    assert checkpoint.read(tmp_path, 1, "adapter") == {}  # names are compared whole
    with pytest.raises(ValueError, match="step_00000002 is not a finished checkpoint"):
        checkpoint.read(tmp_path, 2, "adapters")


def test_state_and_meta_come_back_bit_for_bit(tmp_path):
    state = make_state()
    del state["host"]
    meta = {"cursor": 12, "lr": 0.1 + 0.2, "schedule": [1.0, 0.9375], "note": "größer"}
    folder = checkpoint.save(tmp_path, 12, state, meta)
    assert folder == tmp_path / "checkpoints" / "step_00000012"
    restored, meta_back = checkpoint.restore(tmp_path, 12, abstract(state))
    assert_bits_equal(restored, state)
    assert meta_back == meta
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_restore_places_leaves_on_the_asked_sharding_of_another_mesh(tmp_path):
    from_mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    to_mesh = jax.make_mesh(
        (2, 2),
        ("data", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    state = {"w": jax.device_put(x, NamedSharding(from_mesh, P("fsdp")))}
    checkpoint.save(tmp_path, 0, state, {})
    target = NamedSharding(to_mesh, P("tensor", "data"))
    restored, _ = checkpoint.restore(
        tmp_path, 0, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=target)}
    )
    assert restored["w"].sharding == target
    np.testing.assert_array_equal(restored["w"], x)


def test_leaf_without_sharding_comes_back_uncommitted(tmp_path):
    checkpoint.save(tmp_path, 0, {"w": jnp.ones(4)}, {})
    for leaf in (jax.ShapeDtypeStruct((4,), jnp.float32), jnp.ones(4)):
        restored, _ = checkpoint.restore(tmp_path, 0, {"w": leaf})
        assert not restored["w"].committed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["w"].update(a=jnp.ones((3, 2))),
            r"w/a: got float32\[2, 3\], expected float32\[3, 2\]",
        ),
        (
            lambda s: s["w"].update(a=jnp.ones((2, 3), jnp.bfloat16)),
            r"w/a: got float32\[2, 3\], expected bfloat16\[2, 3\]",
        ),
        (lambda s: s["w"].update(c=jnp.ones(5)), r"w/c: missing, expected float32\[5\]"),
        (lambda s: s["w"].pop("b"), r"w/b: stored but not expected"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named_in_one_line(tmp_path, change, message):
    state = {"w": {"a": jnp.ones((2, 3)), "b": jnp.zeros(2)}}
    checkpoint.save(tmp_path, 1, state, {})
    change(state)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.restore(tmp_path, 1, abstract(state))
    assert "\n" not in str(error.value)


def test_leaves_and_meta_that_cannot_be_stored_are_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="leaf x/key is ArrayImpl|leaf x/key is PRNGKeyArray"):
        checkpoint.save(tmp_path, 0, {"x": {"key": jax.random.key(0)}}, {})
    with pytest.raises(ValueError, match="leaf x is float"):
        checkpoint.save(tmp_path, 0, {"x": 1.5}, {})
    with pytest.raises(ValueError, match="meta cannot be written as JSON"):
        checkpoint.save(tmp_path, 0, {"x": jnp.ones(1)}, {"f": float("nan")})
    assert not (tmp_path / "checkpoints").exists()


def test_latest_good_is_none_without_checkpoints(tmp_path):
    assert checkpoint.latest_good(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.latest_good(tmp_path) is None


def test_empty_foreign_and_partial_folders_are_named_and_ignored(tmp_path, capsys):
    checkpoint.save(tmp_path, 3, {"w": jnp.ones(2)}, {})
    folder = tmp_path / "checkpoints"
    for name in ("step_00000009", "9", "notes", "tmp-step_00000004"):
        (folder / name).mkdir()
    (folder / "tmp-step_00000004" / "half").write_text("x")
    assert checkpoint.latest_good(tmp_path) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("not a finished checkpoint" in line for line in lines)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "bit flip": flip_bit,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "emptied": lambda p: p.write_bytes(b""),
    "deleted": lambda p: p.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("which", ["data", "_METADATA", "MANIFEST.json"])
def test_damage_is_found_moved_aside_and_the_step_before_is_used(tmp_path, capsys, kind, which):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"w": jnp.arange(1000.0) * step}, {})
    folder = tmp_path / "checkpoints/step_00000002"
    file = newest_data_file(tmp_path, 2) if which == "data" else next(folder.rglob(which))
    DAMAGE[kind](file)
    assert checkpoint.latest_good(tmp_path) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    restored, _ = checkpoint.restore(tmp_path, 1, {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)})
    np.testing.assert_array_equal(restored["w"], jnp.arange(1000.0))
    if not (which == "MANIFEST.json" and kind == "deleted"):  # then it is merely unfinished
        assert (tmp_path / "checkpoints/corrupt-step_00000002-0").is_dir()


def test_an_edited_manifest_is_damage(tmp_path):
    checkpoint.save(tmp_path, 5, {"w": jnp.ones(2)}, {"cursor": 5})
    file = tmp_path / "checkpoints/step_00000005/MANIFEST.json"
    file.write_text(file.read_text().replace('"cursor": 5', '"cursor": 6'))
    assert checkpoint.latest_good(tmp_path) is None
    assert (tmp_path / "checkpoints/corrupt-step_00000005-0").is_dir()


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 2, {"w": jnp.zeros(2)}, {"try": 1})
    checkpoint.save(tmp_path, 2, {"w": jnp.ones(2)}, {"try": 2})
    restored, meta = checkpoint.restore(tmp_path, 2, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert meta == {"try": 2}
    np.testing.assert_array_equal(restored["w"], [1.0, 1.0])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_leftovers_are_removed_by_the_next_save(tmp_path, capsys):
    for name in ("tmp-step_00000001", "trash-step_00000000"):
        (tmp_path / "checkpoints" / name / "arrays").mkdir(parents=True)
    checkpoint.save(tmp_path, 1, {"w": jnp.zeros(2)}, {})
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_prune_keeps_the_last_the_multiples_and_the_best(tmp_path):
    for step in (0, 2, 5, 10, 12, 15, 17):
        folder = tmp_path / f"checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "MANIFEST.json").write_text("{}")
    (tmp_path / "checkpoints/notes").mkdir()
    checkpoint.prune(tmp_path, keep_last=2, keep_every=10)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["notes", *(f"step_{step:08d}" for step in (0, 10, 15, 17))]
    checkpoint.prune(tmp_path, keep_last=1, best=10)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["notes", "step_00000010", "step_00000017"]
    with pytest.raises(ValueError, match="keep_last"):
        checkpoint.prune(tmp_path, keep_last=0)


def test_deletion_renames_first(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"w": jnp.zeros(2)}, {})

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(tmp_path, keep_last=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000002",
        "trash-step_00000001",
    ]


def test_too_little_space_is_said_with_numbers_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"w": jnp.zeros(2)}, {})
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(checkpoint.NotSaved, match=r"needs 0\.004 GB .* has 0\.000 GB free"):
        checkpoint.save(tmp_path, 2, {"w": jnp.zeros(1_000_000)}, {})
    assert checkpoint.latest_good(tmp_path) == 1


@pytest.fixture
def saver(tmp_path):
    saver = checkpoint.Saver(tmp_path)
    yield saver
    saver.close()


@pytest.fixture
def gate(monkeypatch):
    """An event that every commit waits for."""
    event, commit = threading.Event(), checkpoint._commit
    held = lambda *args: (event.wait(60), commit(*args))
    monkeypatch.setattr(checkpoint, "_commit", held)
    yield event
    event.set()


def test_a_checkpoint_in_flight_does_not_count_and_is_not_pruned(tmp_path, saver, gate):
    gate.set()
    saver.save(1, {"w": jnp.zeros(2)}, {})
    saver.wait()
    gate.clear()
    final = saver.save(2, {"w": jnp.ones(2)}, {})
    saver.check()  # nothing has gone wrong
    checkpoint.prune(tmp_path, keep_last=1)
    names = lambda: sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names() == ["step_00000001", "tmp-step_00000002"]
    assert checkpoint.latest_good(tmp_path) == 1 and not final.exists()
    gate.set()
    saver.wait()
    assert names() == ["step_00000001", "step_00000002"] and checkpoint.latest_good(tmp_path) == 2


def test_a_save_waits_for_the_one_before_and_tidies_after_each(tmp_path):
    seen = []
    saver = checkpoint.Saver(tmp_path, lambda: seen.append(checkpoint.latest_good(tmp_path)))
    for step in (1, 2, 3):
        saver.save(step, {"w": jnp.full(2, step)}, {})
    saver.close()
    assert seen == [1, 2, 3]


def test_a_state_that_is_donated_right_after_the_save_is_written_as_it_was(tmp_path, saver, gate):
    donated = jnp.arange(1 << 16, dtype=jnp.float32) + 1
    deleted, host = jnp.full(1 << 16, 5.0), np.full(9, 3.0)
    saver.save(1, {"a": donated, "b": deleted, "c": host}, {})
    step = jax.jit(lambda x: 0 * x - 7, donate_argnums=0)
    for _ in range(3):
        donated = step(donated)
    donated.block_until_ready()
    deleted.delete()
    host[:] = -1
    gate.set()
    saver.wait()
    like = {name: jax.ShapeDtypeStruct((1 << 16,), jnp.float32) for name in "ab"}
    like["c"] = jax.ShapeDtypeStruct((9,), np.float64)
    with jax.enable_x64(True):
        state, _ = checkpoint.restore(tmp_path, 1, like)
    np.testing.assert_array_equal(state["a"], np.arange(1 << 16) + 1)
    assert np.all(np.asarray(state["b"]) == 5) and np.all(np.asarray(state["c"]) == 3)


def test_an_error_in_the_background_is_one_line_at_the_next_check_once(
    tmp_path, saver, monkeypatch
):
    saver.save(1, {"w": jnp.zeros(2)}, {})
    saver.wait()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device\nat block 7")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digests", full)
        saver.save(2, {"w": jnp.ones(2)}, {})
        futures.wait([saver._saving])
    with pytest.raises(checkpoint.NotSaved) as error:
        saver.check()
    assert str(error.value) == (
        "checkpoint 2 could not be saved (OSError: [Errno 28] No space left on device at block 7); "
        "the one before it is kept: mend that and run the same command again"
    )
    saver.check()
    assert checkpoint.latest_good(tmp_path) == 1
    saver.save(3, {"w": jnp.ones(2)}, {})
    saver.wait()
    assert checkpoint.latest_good(tmp_path) == 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000001",
        "step_00000003",
    ]


LIMITED = textwrap.dedent("""
    import resource, sys, time, numpy as np
    from wanjax.run import checkpoint
    saver = checkpoint.Saver(sys.argv[1])
    saver.save(1, {"w": np.zeros(9)}, {})
    saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # bytes of a file
    saver.save(2, {"w": np.random.default_rng(0).random(1 << 17)}, {})
    try:
        while True:
            saver.check()
            time.sleep(0.01)
    except checkpoint.NotSaved as error:
        print(repr(str(error)))
    saver.close()
""")


def test_a_write_that_fails_is_raised_by_a_later_check(tmp_path):
    """The kernel refuses to write more, as on a full disk."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("'checkpoint 2 could not be saved ("), done.stdout + done.stderr
    assert "the one before it is kept" in done.stdout and "\\n" not in done.stdout
    assert checkpoint.latest_good(tmp_path) == 1


WRITER = textwrap.dedent("""
    import sys, jax.numpy as jnp
    from wanjax.run import checkpoint, guard
    for step in range(1000):
        state = {"w": jnp.full((64, 64), step, jnp.float32)}
        checkpoint.save(sys.argv[1], step, state, {"step": step})
        checkpoint.prune(sys.argv[1], keep_last=2)
        print(step, flush=True)
""")


def test_a_kill_at_any_instant_leaves_a_good_checkpoint(tmp_path):
    """SIGKILL a process that saves and prunes without pause; what it reported must verify."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for attempt, steps_before in enumerate((2, 3, 5)):
        run = tmp_path / str(attempt)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True, env=env
        )
        for _ in range(steps_before):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout] or [steps_before - 1]
        process.wait()
        step = checkpoint.latest_good(run)
        assert step >= reported[-1]
        restored, meta = checkpoint.restore(
            run, step, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
        )
        assert meta == {"step": step}
        assert np.all(np.asarray(restored["w"]) == step)
        assert not list(run.glob("checkpoints/corrupt-*"))


IN_FLIGHT = textwrap.dedent("""
    import sys, threading, jax.numpy as jnp
    from wanjax.run import checkpoint
    saver = checkpoint.Saver(sys.argv[1])
    state = {"w": jnp.ones((512, 512))}
    saver.save(1, state, {})
    saver.wait()
    def hold(*args, **kwargs):
        print("held", flush=True)
        threading.Event().wait()
    setattr(checkpoint.os if sys.argv[2] == "rename" else checkpoint, sys.argv[2], hold)
    saver.save(2, state, {})
    threading.Event().wait()
""")


@pytest.mark.parametrize("instant", ["_commit", "rename"])
def test_a_kill_while_a_save_is_in_flight_leaves_the_one_before(tmp_path, instant):
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", IN_FLIGHT, str(tmp_path), instant]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "checkpoints/tmp-step_00000002").is_dir()
    assert checkpoint.latest_good(tmp_path) == 1
    checkpoint.save(tmp_path, 2, {"w": jnp.ones(2)}, {})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000001",
        "step_00000002",
    ]


TWO_PROCESSES = textwrap.dedent("""
    import sys, threading, jax, jax.numpy as jnp, numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec as P
    from wanjax.run import checkpoint, guard
    def guarded(collective):
        def call(*args, **kwargs):
            assert threading.current_thread() is threading.main_thread(), "collective in a thread"
            return collective(*args, **kwargs)
        return call
    for name in ("broadcast_one_to_all", "sync_global_devices", "process_allgather"):
        setattr(multihost_utils, name, guarded(getattr(multihost_utils, name)))
    digested, digests = [], checkpoint._digests
    spy = lambda folder, names, **how: digested.extend(names) or digests(folder, names, **how)
    checkpoint._digests = spy
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as distributed.start
    run, port, rank = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("fsdp"))
    make = jax.jit(lambda: {"w": jnp.arange(16.0)}, out_shardings={"w": sharding})
    assert guard.claim(run, {"seed": 0}, resume=True) is False
    assert checkpoint.latest_good(run) is None
    saver = checkpoint.Saver(run, lambda: checkpoint.prune(run, keep_last=2))
    train = jax.jit(lambda s: {"w": s["w"] + s["w"].sum()}, donate_argnums=0)
    for step in (1, 2, 3):
        state = make()
        saver.save(step, state, {"step": step})
        for _ in range(20):  # collectives of the steps that follow
            state = train(state)
        jax.block_until_ready(state)
        saver.check()
    saver.close()
    own = [name for name in digested if f"process_{rank}" in name]
    others = [name for name in digested if f"process_{1 - int(rank)}" in name]
    assert own and not others and (rank == "0" or own == digested), digested
    assert checkpoint.latest_good(run) == 3
    state, meta = checkpoint.restore(run, 3, jax.eval_shape(make) | {"w": make()["w"]})
    assert state["w"].sharding == sharding and meta == {"step": 3}
    for shard in state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(16.0)[shard.index])
    try:
        guard.claim(run, {"seed": 1}, resume=True)
    except ValueError:
        assert jax.process_index() == 0
    except RuntimeError as error:
        assert jax.process_index() == 1 and "process 0" in str(error)
    else:
        raise AssertionError("a run of another config was taken")
    print("done")
""")


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_that_one_process_can_read(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run = tmp_path / "run"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    env["NPROC"] = "8"  # as distributed.start
    command = [sys.executable, "-c", TWO_PROCESSES, str(run), str(port)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [*command, rank], env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        for rank in "01"
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [output.splitlines()[-1] for output in outputs] == ["done", "done"], "\n".join(outputs)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000003",
    ]
    state, _ = checkpoint.restore(run, 3, {"w": jax.ShapeDtypeStruct((16,), jnp.float32)})
    np.testing.assert_array_equal(state["w"], np.arange(16.0))


def test_what_is_restored_takes_the_place_of_what_was_there(tmp_path):
    state = {"a": jnp.arange(4.0), "b": {"c": jax.device_put(jnp.ones(3), jax.devices()[1])}}
    want = jax.tree.map(np.array, state)
    checkpoint.save(tmp_path, 1, state, {})
    shapes = checkpoint.vacate(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    back, _ = checkpoint.restore(tmp_path, 1, shapes)
    assert jax.tree.map(np.array_equal, back, want) == {"a": True, "b": {"c": True}}
    assert not back["a"].committed and back["b"]["c"].devices() == {jax.devices()[1]}


# ------------------------------------------------------------------------------ object stores


def names(folder):
    """First two parts of the addresses below a folder of a store."""
    return sorted({"/".join(name.split("/")[:2]) for name in paths.files(folder)})


def test_checkpoints_in_a_store_come_back_bit_for_bit_and_are_pruned(bucket):
    run, state = f"{bucket}/runs/a", make_state()
    del state["host"]
    saver = checkpoint.Saver(run, lambda: checkpoint.prune(run, keep_last=2))
    for step in (1, 2, 3):
        folder = saver.save(step, {**state, "count": jnp.int32(step)}, {"cursor": step})
    saver.close()
    assert str(folder) == f"{bucket}/runs/a/checkpoints/step_00000003"
    assert names(bucket / "runs/a/checkpoints") == [
        f"step_0000000{step}/{name}" for step in (2, 3) for name in ("MANIFEST.json", "arrays")
    ]
    assert checkpoint.latest_good(run) == 3
    for step in (2, 3):
        restored, meta = checkpoint.restore(run, step, abstract(state))
        assert_bits_equal(restored, {**state, "count": jnp.int32(step)})
        assert meta == {"cursor": step}
    assert set(checkpoint.read(run, 3, "adapters")) == {
        "default/high/blocks/attn1/to_q/a",
        "default/low/to_out.0/b",
    }


def test_what_a_kill_or_damage_leaves_in_a_store_is_not_used(bucket, capsys):
    run = bucket / "run"
    for step in (1, 2, 3):
        checkpoint.save(run, step, {"w": jnp.full(1000, step)}, {})
    at = lambda step: run / f"checkpoints/step_0000000{step}"
    (at(3) / "MANIFEST.json").unlink()  # as if killed before the commit
    file = max(paths.files(at(2)), key=paths.files(at(2)).__getitem__)
    data = bytearray((at(2) / file).read_bytes())
    data[len(data) // 2] ^= 1
    (at(2) / file).write_bytes(bytes(data))
    assert checkpoint.latest_good(run) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "step_00000003, not a finished checkpoint" in said[0]
    assert f"is damaged ({file} has a different crc32" in said[1]
    checkpoint.save(run, 4, {"w": jnp.full(1000, 4)}, {})  # keeps the damaged one for inspection
    assert "removing" in capsys.readouterr().out
    assert names(run / "checkpoints") == [
        "step_00000001/MANIFEST.json",
        "step_00000001/arrays",
        "step_00000002/DAMAGED.json",
        "step_00000002/arrays",
        "step_00000004/MANIFEST.json",
        "step_00000004/arrays",
    ]
    checkpoint.save(run, 2, {"w": jnp.full(1000, 2)}, {})  # the step is reached again
    assert "step_00000002/DAMAGED.json" not in names(run / "checkpoints")
    restored, _ = checkpoint.restore(run, 2, {"w": jax.ShapeDtypeStruct((1000,), jnp.int32)})
    assert np.all(np.asarray(restored["w"]) == 2)


def test_several_processes_and_s3_is_one_line(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    checkpoint.check(epath.Path("gs://bucket/run"))
    with pytest.raises(ValueError, match="^s3://bucket/run: .*; set config.workdir") as error:
        checkpoint.check(epath.Path("s3://bucket/run"))
    assert "\n" not in str(error.value)
