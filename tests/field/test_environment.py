"""Environment: terminals that close, runs started twice, folders that are none."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from tests import tiny
from tests.field.table import Case, cases
from wanjax import train
from wanjax.parallel import distributed
from wanjax.run import guard

OUTPUT = textwrap.dedent("""
    import os, sys
    from wanjax import console
    console.steady()
    for number in range(2000):
        print("ein größeres Rad, 一只狐狸", number, flush=number % 3 == 0)
        print("and said", file=sys.stderr)
    open(sys.argv[1], "w").write("done")
    os._exit(7)
""")


@cases(
    Case("a pipe whose reader has gone (| head -1)", "the work goes on", "", "| head -1"),
    Case("a full disk behind the log", "the work goes on", "", "> /dev/full 2>&1"),
    Case("standard output closed from the start", "the work goes on", "", ">&- 2>&-"),
    Case("an ASCII terminal", "other characters are escaped", "", "2>/dev/null"),
)
def test_output_ends_no_work(case, tmp_path):
    script, mark = tmp_path / "x.py", tmp_path / "mark"
    script.write_text(OUTPUT, encoding="utf-8")
    root = pathlib.Path(__file__).parents[2]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(root)}
    line = f"{sys.executable} {script} {mark} {case.given}"
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True)
    assert mark.read_text() == "done" and "Error" not in done.stderr, done.stderr
    if "ASCII" in case.brought:
        assert "gr\\xf6\\xdferes Rad, \\u4e00" in done.stdout
        assert len(done.stdout.splitlines()) == 2000


@cases(
    Case(
        "a terminal that closes (SIGHUP)", "checkpoint at once, as for SIGTERM", "", signal.SIG_DFL
    ),
    Case("the same under nohup", "goes on", "", signal.SIG_IGN),
)
def test_a_closed_terminal_asks_to_stop(case, monkeypatch):
    kept = {s: signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGTERM)}
    monkeypatch.setattr(distributed, "_stop_asked", False)
    try:
        signal.signal(signal.SIGHUP, case.given)
        distributed.start()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # the shell and the kernel both say it
        assert distributed.preempted() == (case.given is signal.SIG_DFL)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


HOLD = textwrap.dedent("""
    import sys
    from wanjax.run import guard
    with guard.hold(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
""")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@cases(
    Case(
        "the same run started twice at once",
        "the second is refused, also by wanjax.train",
        "run …/run is already going on: process … on … since … UTC; end that one, or "
        "choose another config.name",
    )
)
def test_a_run_is_started_once(case, model, tmp_path):
    """Until its process ends, however it ends."""
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run)]
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen(command, env=env, **pipes)
    try:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError) as error:
            train.main(tiny.make_config(model, tmp_path))
        case.check(str(error.value))
        assert f"process {other.pid} on" in str(error.value) and not run.exists()
        train.main(tiny.make_config(model, tmp_path), dry_run=True)  # writes nothing
    finally:
        other.kill()
        other.wait()
    for _ in range(2):
        with guard.hold(run):
            pass


@cases(
    Case(
        "a workdir below a file",
        "refused before work",
        "… can't be written (Not a directory); set config.workdir to a folder that can",
        "file/runs",
    ),
    Case(
        "a workdir below /proc",
        "refused before work",
        "… can't be written (No such file or directory); set config.workdir to a folder that can",
        "/proc/none/runs",
    ),
    Case(
        "a file where the run folder goes",
        "refused before work",
        "run folder … is a file; choose another name for the run",
        ".",
    ),
)
def test_folders_are_checked_before_weights(case, model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").write_text("")
    monkeypatch.setattr(train.setup, "load", None)  # nothing gets that far
    with pytest.raises(ValueError) as error:
        train.main(tiny.make_config(model, tmp_path / case.given))
    case.check(str(error.value))
