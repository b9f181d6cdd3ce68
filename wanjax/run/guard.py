"""The claim of a run folder: one config per run, and what of it may change when the run continues.

A key of the config is of one of four kinds, by the lists below:

    FREE    how long, what is written, where and in what parts: the same run but for rounding
    MOVED   where something lies: prompts, clips, base weights and VAE are compared by their
            digests, which the checkpoint has; adapters to start from and reward models are not
    FIXED   what the arrays of a checkpoint are for; cannot change once there is one
    others  change the result from here on: seed, rates, losses, sampling, precision, what is
            evaluated. Accepted only with config.allow_changes

What may change the result, and what moved, is noted in run_dir/changes.json with the step from
which it holds. A pattern covers every key below it; an argument of a reward is
reward.NAME?ARGUMENT.
"""

import contextlib
import datetime
import fcntl
import fnmatch
import json
import os
import socket
import time
import urllib.parse
from typing import Any

import jax

from wanjax import paths, trees
from wanjax.parallel import distributed
from wanjax.run import disk

_CLIP = ("pickscore", "clipscore", "hpsv2")
FREE = (
    # how long a run is, what it writes and how often, and the name of its folder
    *("name", "workdir", "steps", "resume", "allow_changes", "alarms"),
    *("save_every", "keep_last", "keep_every", "sample_every", "eval_every"),
    *("wandb", "project", "tensorboard", "profile"),
    # what it runs on, and parts of the same sums: noise belongs to samples, not to batches
    *(
        "mesh",
        "compile_cache",
        "text_cache",
        "micro_samples",
        "micro_steps",
        "sampling.batch",
        "guidance.mode",
    ),
    *(
        f"model.{name}"
        for name in ("attention", "context", "remat", "offload", "interleave", "text_encoder")
    ),
    # how rewards are asked and how long; a sample that got its score keeps it
    *("reward_deadline", "reward_failure", "reward_lost_steps"),
    *(f"reward.http*[?]{name}" for name in ("batch", "parallel", "deadline", "retries", "wait")),
    *(f"reward.{name}*[?]batch" for name in _CLIP),
)
MOVED = (
    *("model.path", "roles.*.path", "lora.start.*", "data.path", "prompts", "eval.prompts"),
    *(f"reward.{name}*[?]{part}" for name in _CLIP for part in ("model", "tokenizer")),
    "reward.http*[?]url",
)
FIXED = ("algorithm", "experts", "lora.rank", "lora.alpha", "lora.targets")
_ABSENT = "(absent)"


def claim(
    run_dir, config: dict[str, Any], resume: bool, defaults: Any = None, *, allow: bool = False
) -> bool:
    """Claim `run_dir` for a run of `config`; return True if a run continues there.

    A new run gets its config.json; that of one that continues is left to `record`. A key that did
    not exist when it started had its value in `defaults`. Raises ValueError for a folder that holds
    anything else or, when `resume` is False, any run; for a key that changes the result unless
    `allow`; and for one that the run's checkpoints do not fit.
    """
    run_dir = paths.resolve(run_dir)
    return bool(disk.on_first_process(lambda: _claim(run_dir, config, resume, defaults, allow)))


@contextlib.contextmanager
def hold(run_dir):
    """Keep other processes of this machine, and of those that share the folder's locks, from
    starting the same run meanwhile.

    The lock is the kernel's, on a file beside the run folder, and ends with the process however it
    ends. Raises ValueError naming the holder where there is one, and for a folder that can't be
    written. Object stores have no locks: nothing is held there.
    """
    run_dir, file = paths.resolve(run_dir), None
    if jax.process_index() == 0 and not paths.is_remote(run_dir):
        file = distributed.everywhere(lambda: _lock(run_dir))
    else:
        distributed.everywhere(lambda: None)
    try:
        yield
    finally:
        if file:
            file.close()


def _lock(run_dir):
    path = run_dir.with_name(f".{run_dir.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{run_dir.parent} can't be written ({error.strerror}); set config.workdir to a folder "
            "that can"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"run {run_dir} is already going on: {holder}; end that one, or choose another "
            "config.name"
        ) from None
    except OSError as error:
        print(f"lock     {path} can't be locked ({error.strerror}): start the run only once")
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
    file.flush()
    return file


def record(
    run_dir, config: dict[str, Any], defaults: Any, step: int, content: dict[str, tuple]
) -> None:
    """Continue a claimed run with `config` from its checkpoint `step`, 0 if it has none.

    Says what differs, notes what may change the result in changes.json, removes the evaluations
    that such a change makes void, and writes config.json. content: {name: (old, new)} of data that
    differ under the same config.
    """
    run_dir = paths.resolve(run_dir)
    disk.on_first_process(lambda: _record(run_dir, config, defaults, step, content))


def changes(run_dir) -> list[dict[str, Any]]:
    """The entries of changes.json: step, time (UTC), key, old and new value (null: none)."""
    file = paths.resolve(run_dir) / "changes.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def kind(key: str, old: str, new: str) -> str:
    """Kind of a key whose JSON text changes: free, moved, fixed or changed."""
    if _covers(FREE, key):
        return "free"
    if _covers(MOVED, key) and not {old, new} & {_ABSENT, '""'}:  # from one place to another
        return "moved"
    return "fixed" if _covers(FIXED, key) else "changed"


def _claim(run_dir, config, resume, defaults, allow):
    file = run_dir / "config.json"
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run folder {run_dir} is a file; choose another name for the run")
    if not file.exists():
        if run_dir.is_dir() and (others := sorted(p.name for p in run_dir.iterdir())):
            raise ValueError(
                f"run folder {run_dir} has no config.json but holds {', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}; choose another name for the run"
            )
        disk.write_json(file, config)
        return False
    if not resume:
        raise ValueError(
            f"run folder {run_dir} already holds a run; choose another config.name, set "
            "config.resume to True, or move it away"
        )
    found = _changes(file, config, defaults)
    kinds = {key: kind(key, *pair) for key, pair in found.items()}
    trained = any((run_dir / "checkpoints").glob("step_*"))
    stuck = [key for key in found if kinds[key] == "fixed" and trained]
    refused = stuck if allow else [key for key in found if kinds[key] in ("fixed", "changed")]
    if refused:
        listed = ", ".join(f"{key}: {' -> '.join(found[key])}" for key in refused)
        advice = "set these keys back or choose another config.name"
        if stuck:
            advice = f"its checkpoints fit no other {' or '.join(stuck)}: {advice}"
        else:
            advice += ", or let the result change from here on with --config.allow_changes=True"
        raise ValueError(
            f"run folder {run_dir} was started with a different config ({listed}); {advice}"
        )
    return True


def _record(run_dir, config, defaults, step, content):
    file, time = run_dir / "config.json", datetime.datetime.now(datetime.UTC)
    found = _changes(file, config, defaults)
    kinds = {key: kind(key, *pair) for key, pair in found.items()}
    for key, pair in found.items():
        print(f"checkpoint: {run_dir.name} continues with {key} {' -> '.join(pair)}", flush=True)
    noted = {key: map(_value, pair) for key, pair in found.items() if kinds[key] != "free"}
    entries = [
        dict(step=step, time=time.isoformat(timespec="seconds"), key=key, old=old, new=new)
        for key, (old, new) in (noted | content).items()
    ]
    if entries:
        disk.write_json(run_dir / "changes.json", changes(run_dir) + entries)
    if content or {"changed", "fixed"} & set(kinds.values()):
        _forget(run_dir, step)
    if found:  # last: until then, starting again finds the same changes
        disk.write_json(file, config)


def _forget(run_dir, step):
    """Remove evaluations and sample videos from `step` on; they are made again where they are
    due."""
    for path in (*run_dir.glob("evals/step_*.json"), *run_dir.glob("samples/step_*")):
        if int(path.stem.removeprefix("step_")) >= step:
            paths.remove(path)


def _changes(file, config, defaults) -> dict[str, tuple[str, str]]:
    """{key: (JSON text in config.json, JSON text now)} of all keys that differ."""
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is not JSON ({error}); repair it or move {file.parent} away"
        ) from None
    old, new, usual = map(_flat, (old, config, defaults or {}))
    old |= {key: value for key, value in usual.items() if key in new and key not in old}
    pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in old | new}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def _flat(config) -> dict[str, str]:
    """{dotted key: JSON text}; adapter files, and the arguments of rewards, each have a key."""
    config = json.loads(disk.dump_json(config, "config"))
    flat, named = trees.dotted({k: v for k, v in config.items() if k != "reward"}), set()
    for number, path in enumerate(flat.pop("lora.start", ())):
        flat[f"lora.start.{number}"] = path
    for name, weight in config.get("reward", {}).items():
        base, made, arguments = name.partition("?")
        while base in named:  # the same reward with other arguments
            base += "_"
        named.add(base)
        flat[f"reward.{base}{made}"] = weight
        for argument, text in urllib.parse.parse_qsl(arguments, keep_blank_values=True):
            flat[f"reward.{base}?{argument}"] = text
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}


def _covers(patterns, key: str) -> bool:
    return any(
        fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"{pattern}.*")
        for pattern in patterns
    )


def _value(text: str):
    return None if text == _ABSENT else json.loads(text)
