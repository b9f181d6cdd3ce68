"""Start-up of several processes: who they are, who is missing, what differs, how they end.

The roll call is tested with threads and hand-written greetings; agreement, collectives, crashes and
preemption with two real CPU processes over loopback.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests import tiny
from wanjax import train
from wanjax.parallel import distributed
from wanjax.parallel.distributed import Place
from wanjax.run import checkpoint, metrics

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],other3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "h:1"}


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def port():
    return free_port()


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place()),
        ({"TPU_WORKER_HOSTNAMES": "one"}, Place()),
        (
            ADDRESS | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            Place("h:1", 2, 1, None, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "h", "JAX_COORDINATOR_PORT": "6002"}
            | {"NNODES": "2", "NODE_RANK": "0"},
            Place("h:6002", 2, 0, None, "NNODES and NODE_RANK"),
        ),
        (SLURM, Place("gpu07:61441", 8, 5, (1,), "SLURM")),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, Place("gpu07:61441", 8, 5, None, "SLURM")),
        (SLURM | {"SLURM_STEP_NUM_NODES": "8"}, Place("gpu07:61441", 8, 5, None, "SLURM")),
        (SLURM | {"JAX_COORDINATOR_PORT": "7"}, Place("gpu07:7", 8, 5, (1,), "SLURM")),
        (SLURM | {"SLURM_STEP_NODELIST": "a-1,b"}, Place("a-1:61441", 8, 5, (1,), "SLURM")),
        (SLURM | {"SLURM_STEP_NODELIST": "n[3,7]-ib"}, Place("n3-ib:61441", 8, 5, (1,), "SLURM")),
        (SLURM | {"SLURM_NTASKS": "1"}, Place()),
        (OMPI | ADDRESS, Place("h:1", 4, 3, (1,), "Open MPI")),
        (
            OMPI | ADDRESS | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            Place("h:1", 4, 3, None, "Open MPI"),
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Place("auto", source="jax's own detection")),
        ({"MEGASCALE_NUM_SLICES": "2"}, Place("auto", source="jax's own detection")),
    ],
)
def test_place_is_found_in_the_environment(env, place):
    assert distributed.locate(env) == place


def test_flags_win_over_the_environment():
    place = distributed.locate(SLURM, "10.0.0.1:8482", 2, 1, "0,3")
    assert place == Place("10.0.0.1:8482", 2, 1, (0, 3), "flags")
    assert distributed.locate(SLURM, "h:9").process_id == 5  # the rest still comes from SLURM
    assert distributed.locate(SLURM, "auto").coordinator == "auto"


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        ({}, ("", 2, 0), "2 processes are asked for but no coordinator .* --coordinator=HOST:PORT"),
        (OMPI, (), "4 processes are asked for but no coordinator"),
        ({}, ("h:1",), "--num_processes=N and --process_id"),
        ({}, ("h:1", 2, 2), "--process_id is 2, expected 0 to 1"),
        ({}, ("h", 2, 0), "--coordinator is 'h', expected HOST:PORT"),
        ({}, ("h:70000", 2, 0), "--coordinator is 'h:70000'"),
        ({}, ("h:1", 2, 0, "0-3"), "--local_devices is '0-3', expected numbers"),
    ],
)
def test_settings_that_cannot_work_name_the_flag(env, flags, message):
    with pytest.raises(ValueError, match=message):
        distributed.locate(env, *flags)


def call(*places, timeout=10.0):
    """Call the roll in one thread a place; the error, or None, of each."""
    errors = [None] * len(places)

    def one(i):
        try:
            distributed.call_roll(places[i], timeout)
        except (ValueError, distributed.NeedsRestart) as error:
            errors[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def greet(port, line):
    """Say a line to process 0, from another process as it seems; its answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
                peer.sendall(line)
                return peer.makefile().readline()
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("process 0 does not listen")


def test_roll_call_ends_when_everyone_is_there(port):
    places = [Place(f"127.0.0.1:{port}", 3, i) for i in (2, 0, 1)]
    assert call(*places) == [None] * 3
    assert call(*places) == [None] * 3  # the port is free again at once


def test_missing_processes_are_named_with_host_and_port_on_all(port):
    errors = call(*(Place(f"127.0.0.1:{port}", 4, i) for i in (0, 1)), timeout=1.0)
    for error in errors:
        assert isinstance(error, distributed.NeedsRestart)
        assert f"127.0.0.1:{port} for 4 processes; missing: 2, 3" in str(error)


def test_an_absent_coordinator_is_named_with_host_and_port(port):
    (error,) = call(Place(f"127.0.0.1:{port}", 2, 1), timeout=0.5)
    assert isinstance(error, distributed.NeedsRestart)
    assert f"could not reach process 0 at 127.0.0.1:{port} (Connection refused)" in str(error)


def test_another_count_is_refused_on_all(port):
    address = f"127.0.0.1:{port}"
    for error in call(Place(address, 2, 0), Place(address, 3, 1)):
        assert isinstance(error, ValueError) and "--num_processes=3" in str(error)


def test_an_id_used_twice_is_refused_but_a_second_attempt_is_not(port):
    answers = {}

    def others():
        with socket.create_connection(("127.0.0.1", port), timeout=10) as lost:
            lost.sendall(b"wanjax-roll-call a:1 1 3\n")
        again = threading.Thread(target=lambda: greet(port, b"wanjax-roll-call a:1 1 3\n"))
        again.start()
        time.sleep(0.2)
        answers["twin"] = greet(port, b"wanjax-roll-call b:9 1 3\n")
        again.join(10)

    (error,) = call_with(port, others, Place(f"127.0.0.1:{port}", 3, 0))
    assert isinstance(error, ValueError) and "process 1 on b:9" in str(error)
    assert "id that is taken" in answers["twin"]


def call_with(port, others, place):
    """The roll of `place` while `others` speak to its port."""
    greet_when_up = threading.Thread(target=lambda: (greet(port, b"hello\n"), others()))
    greet_when_up.start()
    errors = call(place, timeout=10)
    greet_when_up.join(20)
    return errors


def test_strangers_on_the_port_are_ignored(port):
    answers = []

    def others():
        greet(port, b"GET / HTTP/1.1\r\n\r\n")
        greet(port, b"someone x 1 2\n")
        answers.append(greet(port, b"wanjax-roll-call a:1 1 2\n"))

    assert call_with(port, others, Place(f"127.0.0.1:{port}", 2, 0)) == [None]
    assert answers == ["go\n"]


def test_a_port_in_use_is_named(port):
    with socket.create_server(("127.0.0.1", port)):
        (error,) = call(Place(f"127.0.0.1:{port}", 2, 0))
    assert isinstance(error, ValueError)
    assert f"cannot listen on port {port} of --coordinator=127.0.0.1:{port}" in str(error)


def test_a_host_name_that_means_this_machine_is_refused(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 8482))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer)
    with pytest.raises(ValueError, match=r"node0:8482 is this machine itself \(127.0.1.1\)"):
        distributed.call_roll(Place("node0:8482", 2, 1), 1.0)


def test_one_process_needs_no_others(capsys):
    distributed.agree({"config": object()})
    assert distributed.everywhere(lambda: 3) == 3
    with pytest.raises(ValueError, match="mine"):
        distributed.everywhere(lambda: (_ for _ in ()).throw(ValueError("mine")))
    with pytest.raises(SystemExit, match="42"):
        distributed.leave(distributed.RESTART, "bye")
    assert "bye" in capsys.readouterr().err


def test_fingerprint_tells_texts_and_their_order_apart():
    texts = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), ()]
    assert len({distributed.fingerprint(t) for t in texts}) == 5
    assert distributed.fingerprint(("a",)) == distributed.fingerprint(["a"])


def test_sigterm_stops_a_single_process_after_its_step(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(distributed, "_stop_asked", False)
    try:
        assert distributed.start() == Place()
        assert not distributed.preempted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert distributed.preempted()
        with pytest.raises(distributed.Stopped):
            distributed.check_stop()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "saved"), [(1, 1), (2, 1), (3, 2)])
def test_a_preempted_run_saves_at_once(tmp_path, monkeypatch, asked, saved):
    """asked: how many steps' looks (one in each rollout, one after the step) come before SIGTERM;
    step 0 has one rollout, so look 1 is after it, look 2 inside the next one."""
    model, looks = tiny.save_model(tmp_path / "model"), itertools.count()
    monkeypatch.setattr(distributed, "preempted", lambda: next(looks) >= asked)
    with pytest.raises(distributed.NeedsRestart, match=f"checkpoint {saved} is kept"):
        train.main(tiny.make_config(model, tmp_path, save_every=100, eval__prompts=""))
    assert checkpoint.latest_good(tmp_path / "run") == saved


def test_a_run_stopped_in_its_first_rollout_says_so(tmp_path, monkeypatch):
    model = tiny.save_model(tmp_path / "model")
    monkeypatch.setattr(distributed, "preempted", lambda: True)
    with pytest.raises(distributed.NeedsRestart, match="asked to stop before step 1"):
        train.main(tiny.make_config(model, tmp_path, eval__prompts=""))
    assert checkpoint.latest_good(tmp_path / "run") is None


CHILD = textwrap.dedent("""
    import os, signal, sys, time
    import numpy as np
    from jax.experimental import multihost_utils
    from wanjax.parallel import distributed

    port, rank, mode, number = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    try:
        distributed.start(f"127.0.0.1:{port}", number, rank)
        if mode == "differ":
            lr = 0.1 * (rank + 1)
            distributed.agree({"config": {"seed": 0, "optim": {"high": {"lr": lr}}}, "n": 1})
        if mode == "fault":
            distributed.everywhere(lambda: int("0x"[rank]))
        distributed.agree({"config": {"seed": 0}})
        if mode == "crash" and rank == 1:
            raise RuntimeError("only here")
        assert distributed.everywhere(lambda: rank) == rank
        assert distributed.gather("é" * rank) == ["é" * i for i in range(number)]
        print("sum", multihost_utils.process_allgather(np.float32(rank + 1)).sum(), flush=True)
        for step in range(1000):
            multihost_utils.process_allgather(np.int32(step))
            if mode == "preempt" and rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if distributed.preempted():
                print("step", step, flush=True)
                raise distributed.NeedsRestart("asked to stop")
            if mode == "plain":
                break
            time.sleep(0.02)
        print("done", flush=True)
    except ValueError as error:
        distributed.leave(1, f"ValueError: {error}")
    except distributed.NeedsRestart as error:
        distributed.leave(distributed.RESTART, f"NeedsRestart: {error}")
""")


def side_by_side(commands):
    """Run the commands side by side; (exit codes, outputs, seconds)."""
    flags = (flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    env["JAX_NUM_CPU_DEVICES"] = "2"
    env["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = time.monotonic()
    processes = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs, time.monotonic() - started


def test_cpu_devices_have_threads_to_spare_for_collectives():
    """With two threads, a collective of one device starved the other device of its only helper."""
    code = """
import os
from wanjax.parallel import distributed
distributed.start()
import jax
jax.numpy.zeros(3).block_until_ready()
print(sum("XLAEigen" in open(f"/proc/self/task/{t}/comm").read()
          for t in os.listdir("/proc/self/task")))
"""
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) >= 8, done.stdout + done.stderr


def children(port, mode, number=2):
    child = lambda rank: [sys.executable, "-c", CHILD, str(port), str(rank), mode, str(number)]
    return side_by_side([child(rank) for rank in range(number)])


@pytest.mark.parametrize("number, total", [(2, "3.0"), (4, "10.0")])
def test_processes_meet_agree_and_compute_together(port, number, total):
    codes, outputs, _ = children(port, "plain", number)
    assert codes == [0] * number, outputs
    for rank, output in enumerate(outputs):
        assert f"process  {rank} of {number} on " in output
        assert f"2 of {2 * number} devices, by flags" in output
        assert f"sum {total}" in output and "done" in output


def test_a_difference_is_named_on_both_and_ends_both(port):
    codes, outputs, _ = children(port, "differ")
    assert codes == [1, 1], outputs
    for output in outputs:
        assert "config.optim.high.lr is 0.1 on process 0 (" in output
        assert "0.2 on process 1 (" in output
        assert "seed" not in output and "Traceback" not in output


def test_a_fault_of_one_is_reported_by_both(port):
    codes, outputs, _ = children(port, "fault")
    assert codes == [1, 1], outputs
    assert "ValueError: invalid literal" in outputs[1]
    assert "ValueError: process 1: invalid literal" in outputs[0]


def test_an_exception_of_one_ends_both_soon_with_its_traceback(port):
    codes, outputs, seconds = children(port, "crash")
    assert 0 not in codes and codes[1] == 1, outputs
    assert "RuntimeError: only here" in outputs[1]
    assert "sum" not in outputs[0] and seconds < 45


def test_sigterm_of_one_stops_both_at_the_same_step_with_code_42(port):
    codes, outputs, _ = children(port, "preempt")
    assert codes == [42, 42], outputs
    steps = [line for output in outputs for line in output.splitlines() if line[:5] == "step "]
    assert len(steps) == 2 and steps[0] == steps[1], outputs


@pytest.mark.slow
def test_the_trainer_refuses_processes_with_other_configs_before_loading_a_model(port):
    command = [sys.executable, "-m", "wanjax.train", "--config=configs/quickstart.py", "--dry_run"]
    command += [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    codes, outputs, _ = side_by_side(
        [[*command, f"--process_id={i}", f"--config.seed={7 * i}"] for i in (0, 1)]
    )
    assert codes == [1, 1], outputs
    for output in outputs:
        assert "wanjax.train: the processes of this run disagree: config.seed is 0 on" in output
        assert "7 on process 1" in output and "model  " not in output


TRAIN = textwrap.dedent("""
    import sys
    from tests import tiny
    from wanjax import train
    from wanjax.parallel import distributed
    port, rank, model, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    distributed.start(f"127.0.0.1:{port}", 2, rank)
    train.main(tiny.make_config(model, out))
""")


@pytest.mark.slow
def test_two_processes_train_like_one(port, tmp_path):
    model = tiny.save_model(tmp_path)
    alone = train.main(tiny.make_config(model, tmp_path / "alone"))
    command = [sys.executable, "-c", TRAIN, str(port)]
    codes, outputs, _ = side_by_side(
        [[*command, str(i), model, str(tmp_path / "pair")] for i in (0, 1)]
    )
    assert codes == [0, 0], outputs
    both = metrics.read(tmp_path / "pair" / "run")
    for one, two in zip(metrics.read(alone), both, strict=True):
        for name in ("reward/mean", "grad_norm/high", "grad_norm/low"):
            assert two[name] == pytest.approx(one[name], rel=2e-2), name
    assert (tmp_path / "pair/run/report.html").exists() and "report  " not in outputs[1]
