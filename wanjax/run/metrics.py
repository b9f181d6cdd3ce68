"""What a run reports on the way: metrics.jsonl, the progress line, trackers, phase times, memory.

A metric is a scalar named `group/name`, with the expert as one more component where it has one:
`reward/mean`, `loss/high`, `grpo/kl/low`, `grad_norm/high`, `lr/low`. Names that start with `time/`
(seconds) or `perf/` depend on the machine; all others are bit for bit the same in a run that was
killed and resumed. metrics.jsonl has one JSON object per step; values that JSON cannot hold are the
strings "NaN", "Infinity" and "-Infinity", and `read` turns them back into floats.

An object store cannot append: there the file is kept locally and uploaded whole by `flush`, so a
kill loses the lines since the last one, which is before the last checkpoint.

Values may be device arrays: they are fetched when the next step is written, so nothing blocks.
"""

import collections
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import pathlib
import platform
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from wanjax import paths
from wanjax.parallel import distributed

EXPERTS = ("high", "low")
WANDB = ("off", "offline", "online")
# What the progress line shows of each role, if present: metric name -> label.
_PROGRESS = {name: name for name in ("reward", "success", "loss", "lr")} | {"grad_norm": "grad"}
_WINDOW = 20  # steps over which the rate and the remaining time are averaged


class Tracker(Protocol):
    """Another destination of metrics; what it raises is reported once and never stops the run."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def video(self, step: int, name: str, path: paths.Path, caption: str) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Write metrics.jsonl, the progress line and the trackers of a run, on process 0 only.

    `start` is the first step that will be written: lines a killed run left from there on are
    removed. Call `flush` before a checkpoint is saved, so that no line of an earlier step is lost.
    """

    def __init__(self, run_dir, *, total: int, start: int = 0, trackers: Sequence[Tracker] = ()):
        self.total, self.trackers = total, list(trackers)
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._next = start
        self._broken: set[int] = set()
        self._times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._file = None
        if jax.process_index() == 0:
            self._path = paths.resolve(run_dir) / "metrics.jsonl"
            _rewind(self._path, start)
            self._file = _appending(self._path)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the scalars of `step` and emit the previous step; the same step again is merged."""
        if self._file is None:
            return
        if step < self._next:
            raise ValueError(f"metrics of step {step} come after those of step {self._next}")
        if self._pending is not None and step > self._pending[0]:
            self._emit()
        if self._pending is None or step > self._pending[0]:
            self._times.append(time.monotonic())
        self._next = step
        self._pending = (step, {**(self._pending[1] if self._pending else {}), **metrics})

    def video(self, step: int, name: str, path, caption: str) -> None:
        """Give a video file to the trackers."""
        self._track("video", step, name, paths.resolve(path), caption)

    def say(self, text: str) -> None:
        """Print a line without disturbing the progress line."""
        if self._file is not None:
            print(("\r\x1b[2K" if sys.stdout.isatty() else "") + text, flush=True)

    def flush(self) -> None:
        """Write what is pending and force metrics.jsonl to disk."""
        if self._file is not None:
            if self._pending is not None:
                self._emit()
            self._file.flush()
            os.fsync(self._file.fileno())
            if paths.is_remote(self._path):
                self._path.write_bytes(pathlib.Path(self._file.name).read_bytes())

    def close(self) -> None:
        """Flush, end the progress line and close the trackers."""
        if self._file is not None:
            self.flush()
            self._file.close()
            if sys.stdout.isatty():
                print(flush=True)
            self._track("close")

    def _emit(self):
        assert self._pending is not None and self._file is not None
        (step, values), self._pending = self._pending, None
        self._next = step + 1
        fetched = jax.device_get(values)  # sorts the keys; `values` has the given order
        record = {key: _scalar(key, fetched[key]) for key in values}

        record["time/wall"] = time.time()
        spent = self._times[-1] - self._times[0]  # 0 at the first step, which compiles
        record["perf/steps_per_second"] = (len(self._times) - 1) / max(spent, 1e-9)
        record.update(peak_memory())
        line = {k: v if math.isfinite(v) else json.dumps(v) for k, v in record.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        self._file.flush()
        shown, width = progress_line(step, self.total, record), shutil.get_terminal_size().columns
        if sys.stdout.isatty():
            print("\r\x1b[2K" + shown[: width - 1], end="", flush=True)
        else:
            print(shown, flush=True)
        self._track("log", step, record)

    def _track(self, method, *args):
        for tracker in self.trackers if self._file is not None else ():
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # a tracker must never stop a training run
                if id(tracker) not in self._broken:
                    self._broken.add(id(tracker))
                    self.say(_tracker_warning(type(tracker).__name__, error))


def read(run_dir) -> list[dict[str, float]]:
    """Return the records of metrics.jsonl in order; a line truncated by a kill is left out."""
    path = paths.resolve(run_dir) / "metrics.jsonl"
    lines = _lines(path) if path.exists() else []
    return [record for line in lines if (record := _parse(line)) is not None]


def split_name(key: str) -> tuple[str, str]:
    """Split a metric name into the name without its expert, and the expert or "".

    >>> split_name("grpo/kl/low")
    ('grpo/kl', 'low')
    """
    parts = key.split("/")
    expert = next((part for part in parts if part in EXPERTS), "")
    return "/".join(part for part in parts if part not in EXPERTS), expert


def progress_line(step: int, total: int, record: dict[str, float]) -> str:
    """Return one line of plain text for the console; `step` counts from 0."""
    rate = record.get("perf/steps_per_second", 0.0)
    speed = f"{rate:.2f} it/s" if rate >= 0.1 or not rate else f"{1 / rate:.1f} s/it"
    left = clock(max(total - step - 1, 0) / rate) if rate else "-"
    parts = [f"step {min(step + 1, total)}/{total}", speed if rate else "- it/s", f"ETA {left}"]
    critic = {k.removeprefix("critic/"): v for k, v in record.items() if k.startswith("critic/")}
    others = ("critic/", "eval/")  # evaluations have their own line
    parts += _progress({k: v for k, v in record.items() if not k.startswith(others)})
    parts += [f"critic {part}" for part in _progress(critic)]
    memory = [value for key, value in record.items() if key.startswith("perf/peak_")]
    return "  ".join(parts + [f"mem {value:.1f} GB" for value in memory])


def clock(seconds: float) -> str:
    """Return a duration in words: 42s, 5m12s, 3h04m, 2d07h."""
    whole = round(seconds)
    for size, unit, part, sub in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{sub}"
    return f"{whole}s"


@contextlib.contextmanager
def phase(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds spent inside to times["time/<name>"], and name them in a profile.

    Device work counts only if it is waited for inside (jax.block_until_ready).
    """
    start = time.monotonic()
    try:
        with jax.profiler.TraceAnnotation(name):
            yield
    finally:
        key = f"time/{name}"
        times[key] = times.get(key, 0.0) + time.monotonic() - start


def ready(pending, times: dict[str, float]) -> Iterator:
    """Yield the videos of (latents, video) pairs, queued on the device in this order, as they
    become ready; the waits are added to time/collect/rollout and time/collect/decode."""
    pending = iter(pending)
    while True:
        with phase(times, "collect/rollout"):  # a GPU's queue takes a loop when the last one ends
            pair = next(pending, None)
            if pair is None:
                return
            latents, video = pair
            jax.block_until_ready(latents)
        with phase(times, "collect/decode"):
            jax.block_until_ready(video)
        yield video


def clocked(function: Callable, times: dict[str, float], name: str) -> Callable:
    """The function, adding the seconds of each call to time/<name>; callable from any thread."""
    return phase(times, name)(function)


# Dense bf16 FLOP/s of one device by part of its device_kind; from NVIDIA's data sheets (SXM) and
# Google Cloud's TPU pages.
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v6": 918e12,
    "TPU7x": 1153.5e12,
}


def speed(flops: dict[str, float], times: dict[str, float]) -> dict[str, float]:
    """perf/tflops/<phase> of one device for each phase {name: model FLOPs of all devices}, and
    perf/mfu over these phases where the device's peak is known."""
    seconds = {name: times[f"time/{name}"] * jax.device_count() for name in flops}
    found = {f"perf/tflops/{name}": flops[name] / seconds[name] / 1e12 for name in flops}
    kind = jax.devices()[0].device_kind
    peaks = [peak for part, peak in PEAKS.items() if part in kind]
    if peaks and flops:
        found["perf/mfu"] = sum(flops.values()) / sum(seconds.values()) / peaks[0]
    return found


def peak_memory() -> dict[str, float]:
    """Return the peak memory in GB (1e9 bytes) of the fullest local device, or of this process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return {"perf/peak_device_gb": max(peaks) / 1e9}
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return {"perf/peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def environment() -> dict[str, str]:
    """Return the versions and devices that results may depend on."""
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    return {
        **distributed.versions(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "processes": str(jax.process_count()),
        "platform": platform.platform(),
    }


def make_trackers(
    run_dir, config: dict[str, Any], *, start: int, wandb: str, project: str, tensorboard: bool
) -> list[Tracker]:
    """Return the trackers asked for, on process 0; wandb: one of WANDB.

    A missing package raises ValueError; a service that fails to start is reported and left out.
    """
    if tensorboard and paths.is_remote(paths.resolve(run_dir)):
        raise ValueError(
            "config.tensorboard writes to a local config.workdir only; set one of them differently"
        )
    if tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "config.tensorboard is on but the package tensorboardX is missing; "
            "pip install tensorboardX, or set config.tensorboard=False"
        )
    makers = {}
    if wandb != "off":
        makers["Wandb"] = functools.partial(Wandb, run_dir, config, project, wandb)
    if tensorboard:
        makers["TensorBoard"] = functools.partial(TensorBoard, run_dir, start)
    trackers = []
    for name, make in makers.items() if jax.process_index() == 0 else ():
        try:
            trackers.append(make())
        except Exception as error:  # no network, no key: the run goes on without it
            print(_tracker_warning(name, error), flush=True)
    return trackers


class Wandb:
    """Weights & Biases; the run folder keeps its run id, so a resumed run extends the curves."""

    def __init__(self, run_dir, config: dict[str, Any], project: str, mode: str):
        import wandb  # slow to import, and only some runs want it

        run_dir = paths.resolve(run_dir)
        file = run_dir / "wandb_id.txt"
        if not file.exists():
            file.write_text(secrets.token_hex(4) + "\n")
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=run_dir.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=None if paths.is_remote(run_dir) else run_dir,
            mode=mode,  # pyright: ignore[reportArgumentType]  (checked by make_trackers)
            config=config,
            settings=wandb.Settings(init_timeout=60, silent=True),
        )
        # The x axis is our step: wandb's own counter drops steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def video(self, step: int, name: str, path: paths.Path, caption: str) -> None:
        film = self._wandb.Video(io.BytesIO(path.read_bytes()), caption=caption, format="mp4")
        self._run.log({"step": step, name: film})

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """TensorBoard event files in run_dir/tensorboard; scalars only."""

    def __init__(self, run_dir, start: int):
        import tensorboardX  # an optional package

        folder = str(paths.resolve(run_dir) / "tensorboard")
        self._writer = tensorboardX.SummaryWriter(folder, purge_step=start)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def video(self, step: int, name: str, path: paths.Path, caption: str) -> None:
        """Do nothing: TensorBoard shows GIFs only, and the mp4 is in the samples folder."""

    def close(self) -> None:
        self._writer.close()


def _progress(record: dict[str, float]) -> list[str]:
    """What the progress line shows of the metrics of one role."""
    parts = []
    for name, label in _PROGRESS.items():
        values = {}
        for key, value in record.items():
            base, expert = split_name(key)
            if f"/{base}".endswith((f"/{name}", f"/{name}/mean")):
                values.setdefault(expert, value)
        if len(values) > 1 and len(set(values.values())) == 1:
            values = {"": next(iter(values.values()))}
        if values:
            parts.append(f"{label} " + " ".join(f"{e} {v:.3g}".strip() for e, v in values.items()))
    return parts


def _tracker_warning(name, error):
    return f"metrics: {name} failed ({type(error).__name__}: {error}); training goes on without it"


def _rewind(path, start):
    """Remove lines of steps >= start, and any truncated line, from metrics.jsonl."""
    if not path.exists():
        return
    lines = _lines(path)
    kept = [line for line in lines if (r := _parse(line)) is not None and r["step"] < start]
    if len(kept) < len(lines):
        with paths.whole_file(path) as part:
            part.write_text("".join(kept), encoding="utf-8")


def _appending(path):
    """The open file that lines are added to: metrics.jsonl, or a local copy of one in a store."""
    if not paths.is_remote(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", encoding="utf-8")
    file = tempfile.NamedTemporaryFile("a", encoding="utf-8", prefix="wanjax-")
    if path.exists():
        file.write(path.read_text(encoding="utf-8"))
    return file


def _lines(path):
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def _parse(line):
    try:
        record = json.loads(line if line.endswith("\n") else "")
    except ValueError:
        return None
    return {key: float(value) if isinstance(value, str) else value for key, value in record.items()}


def _scalar(key, value):
    value = np.asarray(value)
    if value.size != 1 or value.dtype.kind not in "biuf" and value.dtype.name != "bfloat16":
        raise ValueError(f"metric {key} is {value.dtype}{list(value.shape)}, expected one number")
    return int(value.item()) if value.dtype.kind in "biu" else float(value.item())
