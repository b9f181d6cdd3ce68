"""metrics.py: one line a step, the same lines after a kill, and trackers that cannot stop a run."""

import doctest
import json
import math
import pathlib
import re
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.run import metrics


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def reproducible(record):
    return {k: v for k, v in record.items() if not k.startswith(("time/", "perf/"))}


def test_a_step_is_written_when_the_next_one_comes(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, total=3)
    writer.write(0, {"loss/high": jnp.float32(0.1), "count": jnp.int32(3)})
    assert lines(tmp_path) == []
    writer.write(1, {"loss/high": jnp.float32(0.2)})
    (record,) = lines(tmp_path)
    assert reproducible(record) == {"step": 0, "loss/high": float(np.float32(0.1)), "count": 3}
    assert {"time/wall", "perf/steps_per_second"} <= set(record)
    writer.close()
    assert [record["step"] for record in lines(tmp_path)] == [0, 1]


def test_metrics_of_one_step_are_merged_and_steps_only_grow(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, total=3)
    writer.write(0, {"eval/reward": 0.5})
    writer.write(0, {"loss": 1.0})
    writer.flush()
    assert [reproducible(r) for r in lines(tmp_path)] == [
        {"step": 0, "eval/reward": 0.5, "loss": 1.0}
    ]
    with pytest.raises(ValueError, match="step 0 come after"):
        writer.write(0, {"loss": 1.0})


def test_non_finite_values_survive_strict_json(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, total=1)
    writer.write(0, {"a": float("nan"), "b": jnp.inf, "c": -np.inf, "d": jnp.bfloat16(2)})
    writer.close()
    refuse = lambda text: pytest.fail(f"{text} is not JSON")
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert (record["a"], record["b"], record["c"], record["d"]) == (
        "NaN",
        "Infinity",
        "-Infinity",
        2,
    )
    (back,) = metrics.read(tmp_path)
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf


@pytest.mark.parametrize("value", [jnp.ones(3), "text", None])
def test_only_single_numbers_are_metrics(tmp_path, value):
    writer = metrics.MetricsWriter(tmp_path, total=1)
    with pytest.raises((ValueError, TypeError), match="kl|not a valid"):
        writer.write(0, {"kl": value})
        writer.flush()


def train(run_dir, start, stop, total=8):
    """A fake loop that saves at every even step, killed (not closed) at `stop`."""
    writer = metrics.MetricsWriter(run_dir, total=total, start=start)
    for step in range(start, stop):
        writer.write(step, {"loss": jnp.float32(1 / (step + 3)), "time/update": time.monotonic()})
        if step % 2 == 1:
            writer.flush()  # a checkpoint that resumes at step + 1
    return writer


@pytest.mark.parametrize("killed_at", [1, 3, 4, 7])
def test_a_killed_and_resumed_run_has_the_same_lines(tmp_path, killed_at):
    train(tmp_path / "whole", 0, 8).close()
    train(tmp_path / "cut", 0, killed_at)
    with open(tmp_path / "cut/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # the kill came in the middle of a line
    assert all("loss" in record for record in metrics.read(tmp_path / "cut"))
    train(tmp_path / "cut", killed_at // 2 * 2, 8).close()
    whole, cut = (list(map(reproducible, lines(tmp_path / name))) for name in ("whole", "cut"))
    assert [record["step"] for record in whole] == list(range(8))
    assert cut == whole


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, step, record):
        self.calls += 1
        raise ConnectionError("no route")

    video = close = log


class Keeps:
    def __init__(self):
        self.seen = []

    def log(self, step, record):
        self.seen.append((step, reproducible(record)))

    def video(self, step, name, path, caption):
        self.seen.append((step, name, path.name, caption))

    def close(self):
        self.seen.append("closed")


def test_a_tracker_that_raises_is_reported_once_and_stops_nothing(tmp_path, capsys):
    broken, keeps = Broken(), Keeps()
    writer = metrics.MetricsWriter(tmp_path, total=3, trackers=[broken, keeps])
    for step in range(3):
        writer.write(step, {"loss": 1.0})
    writer.video(2, "samples/000", tmp_path / "000.mp4", "a red circle")
    writer.close()
    assert len(lines(tmp_path)) == 3
    out = capsys.readouterr().out
    assert out.count("Broken failed (ConnectionError: no route)") == 1
    assert broken.calls == 3
    assert keeps.seen[0] == (0, {"loss": 1.0})
    assert keeps.seen[-2:] == [(2, {"loss": 1.0}), "closed"]
    assert (2, "samples/000", "000.mp4", "a red circle") in keeps.seen


def trackers(run_dir, **changes):
    settings = {"start": 0, "wandb": "off", "project": "test", "tensorboard": False, **changes}
    return metrics.make_trackers(run_dir, {"seed": 0}, **settings)


def test_tracker_settings_are_checked_before_anything_starts(tmp_path, monkeypatch):
    assert trackers(tmp_path) == []
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboardX"):
        trackers(tmp_path, tensorboard=True)


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, monkeypatch, capsys):
    def refuse(*args):
        raise RuntimeError("no key")

    monkeypatch.setattr(metrics, "Wandb", refuse)
    assert trackers(tmp_path, wandb="online") == []
    assert "Wandb failed (RuntimeError: no key)" in capsys.readouterr().out


def test_wandb_works_offline_and_keeps_its_id_on_resume(tmp_path):
    for start in (0, 1):
        (tracker,) = trackers(tmp_path, wandb="offline", start=start)
        tracker.log(start, {"loss": 1.0})
        tracker.close()
        run_id = (tmp_path / "wandb_id.txt").read_text().strip()
        assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert (
        len({path.name for path in tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")}) == 1
    )
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_tensorboard_gets_the_scalars(tmp_path):
    (tracker,) = trackers(tmp_path, tensorboard=True)
    tracker.log(0, {"loss/high": 0.25})
    tracker.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss/high" in file.read_bytes()


def test_progress_line_reads_as_text():
    record = {
        "reward/mean": 0.61234,
        "grpo/loss/high": 0.01,
        "grpo/loss/low": -0.02,
        "lr/high": 1e-4,
        "lr/low": 1e-4,
        "grad_norm/high": 1.5,
        "perf/steps_per_second": 0.5,
        "perf/peak_host_gb": 1.26,
    }
    record = {"eval/reward": 9.0, **record}  # of an evaluation before the step
    assert metrics.progress_line(11, 100, record) == (
        "step 12/100  0.50 it/s  ETA 2m56s  reward 0.612  loss high 0.01 low -0.02  "
        "lr 0.0001  grad high 1.5  mem 1.3 GB"
    )
    assert metrics.progress_line(0, 9, {"loss": math.nan}) == "step 1/9  - it/s  ETA -  loss nan"
    past = metrics.progress_line(9, 9, {"perf/steps_per_second": 1.0})  # evaluation after the last
    assert past == "step 9/9  1.00 it/s  ETA 0s"
    slow = metrics.progress_line(0, 11, {"perf/steps_per_second": 0.02})
    assert slow == "step 1/11  50.0 s/it  ETA 8m20s"


@pytest.mark.parametrize("record, line", [
    (  # DMD2: both trained in this step, the critic with a GAN head
        {"dmd2/critic_gap/high": 0.0, "critic/loss/high": 0.5, "critic/gan/loss/high": 7.0,
         "critic/grad_norm/high": 2.0, "critic/lr/high": 2e-5, "dmd2/loss/high": 0.12,
         "gan/loss/high": 8.0, "dmd2/loss/low": 0.3, "grad_norm/high": 1.0, "lr/high": 1e-5,
         "critic/loss/low": 0.6},
        "loss high 0.12 low 0.3  lr high 1e-05  grad high 1  critic loss high 0.5 low 0.6  "
        "critic lr high 2e-05  critic grad high 2",
    ),
    ({"critic/loss/low": 0.5}, "critic loss low 0.5"),  # a step of the critic alone
    ({"warm/loss/low": 0.5, "grad_norm/low": 2.0}, "loss low 0.5  grad low 2"),
    (
        {"reward/mean": 0.5, "reward/success": 0.25, "nft/loss/high": 0.1, "nft/loss/low": 0.2},
        "reward 0.5  success 0.25  loss high 0.1 low 0.2",
    ),
    ({"loss/high": 0.1, "error/high": 9.0, "eval/loss/high": 3.0}, "loss high 0.1"),  # SFT
])  # fmt: skip
def test_the_progress_line_separates_student_and_critic(record, line):
    assert metrics.progress_line(0, 9, record) == f"step 1/9  - it/s  ETA -  {line}"


def test_piped_output_has_a_line_a_step_and_a_terminal_one_updating_line(
    tmp_path, capsys, monkeypatch
):
    train(tmp_path / "piped", 0, 3).close()
    piped = capsys.readouterr().out
    assert len(piped.splitlines()) == 3 and "\r" not in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    writer = train(tmp_path / "tty", 0, 3)
    writer.say("saved")
    writer.close()
    tty = capsys.readouterr().out
    assert "\r\x1b[2Ksaved\n" in tty and tty.endswith("\n") and tty.count("\n") == 2
    updates = [part.removeprefix("\x1b[2K") for part in tty.split("\r")[1:]]
    assert len(updates) == 4 and max(len(u.rstrip("\n")) for u in updates) == 19


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (42.4, "42s"),
        (312, "5m12s"),
        (11040, "3h04m"),
        (59.7, "1m00s"),
        (198000, "2d07h"),
    ],
)
def test_clock_gives_the_two_largest_units(seconds, text):
    assert metrics.clock(seconds) == text


def test_phase_adds_up_and_counts_failed_work():
    times = {}
    for _ in range(2):
        with metrics.phase(times, "rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), metrics.phase(times, "update"):
        raise KeyError
    assert 0.04 <= times["time/rollout"] < 1 and "time/update" in times


def test_peak_memory_is_the_devices_or_the_process(monkeypatch):
    (value,) = metrics.peak_memory().values()
    if sys.platform == "linux":
        status = pathlib.Path("/proc/self/status").read_text()
        peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
        assert value == pytest.approx(peak_kib * 1024 / 1e9, rel=0.05)

    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 3_000_000_000}

    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [Device(), Device()])
    assert metrics.peak_memory() == {"perf/peak_device_gb": 3.0}


def test_environment_names_versions_and_devices():
    facts = metrics.environment()
    assert facts["jax"] == metrics.jax.__version__
    assert facts["devices"].startswith("8 x ")


def test_docstring_examples():
    assert doctest.testmod(metrics).failed == 0


def test_speed_is_flops_per_second_and_device(monkeypatch):
    device = type("Device", (), {"device_kind": "NVIDIA H100 80GB HBM3"})()
    monkeypatch.setattr(metrics.jax, "devices", lambda: [device, device])
    monkeypatch.setattr(metrics.jax, "device_count", lambda: 2)
    found = metrics.speed({"update": 4e15}, {"time/update": 4.0, "time/collect": 9.0})
    assert found == {"perf/tflops/update": 500.0, "perf/mfu": pytest.approx(500 / 989)}
    assert metrics.speed({}, {}) == {}


def test_ready_splits_the_wait_between_rollout_and_decode():
    times: dict = {}
    pairs = [(jnp.zeros(2), jnp.full(2, float(i))) for i in range(3)]
    seen = [float(video[0]) for video in metrics.ready(pairs, times)]
    assert seen == [0.0, 1.0, 2.0] and set(times) == {"time/collect/rollout", "time/collect/decode"}
    doubled = metrics.clocked(lambda x: 2 * x, times, "collect/reward")
    assert doubled(4) == 8 and times["time/collect/reward"] >= 0


def test_lines_of_a_run_in_a_store_are_there_after_each_flush_and_a_resume_keeps_them(bucket):
    """The first writer is killed after step 2, of which nothing was flushed."""
    run = bucket / "run"
    for start, stop in ((0, 3), (2, 4)):
        writer = metrics.MetricsWriter(run, total=4, start=start)
        for step in range(start, stop):
            if step == 2:
                writer.flush()
                assert [record["step"] for record in metrics.read(run)] == [0, 1]
            writer.write(step, {"loss": float(step + 10 * start)})
        if stop == 4:
            writer.close()
    kept = [(record["step"], record["loss"]) for record in metrics.read(run)]
    assert kept == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_in_a_store_is_one_line(bucket):
    with pytest.raises(ValueError, match="config.tensorboard writes to a local") as error:
        trackers(bucket / "run", tensorboard=True)
    assert "\n" not in str(error.value)
