"""Checkpoints that survive a kill at any instant, and the guard of a run folder's config.

    run_dir/config.json                      the resolved config, see `claim`
    run_dir/checkpoints/step_00000012/
        arrays/                              the state, written by Orbax
        MANIFEST.json                        step, meta, leaf shapes and dtypes, file sizes, crc32
    run_dir/checkpoints/tmp-*                being written
                        trash-*              being deleted
                        corrupt-*            failed verification, kept for inspection

Orbax commits atomically, but it restores flipped bits without notice, lists empty folders and casts
dtypes silently. So a checkpoint counts only with a manifest whose digests match, every rename is of
a complete folder, and leaves are compared with the manifest before Orbax reads them. Its
CheckpointManager does not serve: it deletes in place and treats any folder it finds as good; only
its preservation policies are used. Random keys are not state: they derive from (seed, step,
purpose).

Several processes must share the file system and call `save`, `latest_good`, `restore`, `prune` and
`claim` together.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from wanjax import trees

FORMAT = 1
_MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step_(\d{8,})")

# Config keys (dotted; a key covers everything below it) that may differ when a run continues: how
# long it runs, what it writes and how often, where its folder is, and what it runs on.
VARIABLE_KEYS = ("steps", "save_every", "sample_every", "eval_every", "keep_last", "keep_every")
VARIABLE_KEYS += ("alarms", "resume", "wandb", "project", "tensorboard", "name", "workdir", "mesh")


def save(run_dir, step: int, state, meta: dict[str, Any]) -> pathlib.Path:
    """Write `state` (pytree of arrays) and `meta` (JSON) as checkpoint `step`; return its folder.

    The folder gets its final name only when complete and on disk; one of the same step is replaced.
    Raises ValueError for a leaf that is not an array or meta that is not JSON, OSError for a full
    disk.
    """
    meta_text = _dump(meta, "checkpoint meta")
    leaves = {path: _array(path, leaf) for path, leaf in _flatten(state).items()}
    folder = pathlib.Path(run_dir).absolute() / "checkpoints"
    tmp, final = folder / f"tmp-{_name(step)}", folder / _name(step)
    _on_first_process(lambda: _make_room(folder, leaves))
    with _orbax() as checkpointer:
        checkpointer.save(tmp / "arrays", args=ocp.args.PyTreeSave(leaves))
    _on_first_process(lambda: _commit(tmp, final, step, leaves, json.loads(meta_text)))
    return final


def latest_good(run_dir) -> int | None:
    """Return the newest step whose manifest and digests verify, or None.

    Folders that are not a finished checkpoint are named on the console and ignored; one whose
    content differs from its manifest is renamed to corrupt-* and the previous step is tried.
    """
    step = _on_first_process(lambda: _search(pathlib.Path(run_dir) / "checkpoints"))
    return None if step < 0 else step


def restore(run_dir, step: int, abstract_state) -> tuple[Any, dict[str, Any]]:
    """Return (state, meta) of `step`, leaves placed as those of `abstract_state` are.

    A leaf of `abstract_state` is an array or a ShapeDtypeStruct; one without sharding, or of an
    uncommitted array, comes back uncommitted on the default device. Raises ValueError naming the
    leaves that are missing, unexpected, or of a different shape or dtype.
    """
    folder = pathlib.Path(run_dir).absolute() / "checkpoints" / _name(step)
    body = _finished(folder)
    wanted = _flatten(abstract_state)
    _compare(folder, body["leaves"], wanted)
    args = {path: _restore_args(leaf) for path, leaf in wanted.items()}
    how = ocp.args.PyTreeRestore(item=wanted, restore_args=args)
    with _orbax() as checkpointer:
        arrays = checkpointer.restore(folder / "arrays", args=how)
    leaves = [jnp.asarray(arrays[path]) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), body["meta"]


def abstract(run_dir, step: int) -> dict[str, Any]:
    """Shapes and dtypes {path: ShapeDtypeStruct} of a checkpoint, enough to restore it whole."""
    folder = pathlib.Path(run_dir) / "checkpoints" / _name(step)
    body = _finished(folder)
    return {path: jax.ShapeDtypeStruct(*leaf) for path, leaf in body["leaves"].items()}


def prune(run_dir, keep_last: int, keep_every: int = 0, best: int | None = None) -> None:
    """Delete all but the newest `keep_last` steps, the multiples of `keep_every` (0: none) and
    `best`."""
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}; set config.keep_last")
    folder = pathlib.Path(run_dir) / "checkpoints"
    steps = _steps(folder)
    rules: list[policies.PreservationPolicy] = [policies.LatestN(keep_last)]
    rules += [policies.EveryNSteps(keep_every)] if keep_every else []
    rules += [] if best is None else [policies.CustomSteps([best])]
    saved: list[Any] = [SimpleNamespace(step=step) for step in steps]  # all that these rules read
    context = policies.PreservationContext()
    kept = policies.AnyPreservationPolicy(rules).should_preserve(saved, context=context)
    gone = [step for step, stays in zip(steps, kept, strict=True) if not stays]
    _on_first_process(lambda: [_delete(folder / _name(step)) for step in gone])


def claim(run_dir, config: dict[str, Any], resume: bool, defaults: Any = None) -> bool:
    """Claim `run_dir` for a run of `config`, write config.json; return True if a run continues.

    Only the keys in VARIABLE_KEYS may differ from those the run was started with; a key that did
    not exist then had its value in `defaults`. Raises ValueError for a folder that holds another
    run or anything else, and, when `resume` is False, any run.
    """
    run_dir = pathlib.Path(run_dir)
    return bool(_on_first_process(lambda: _claim(run_dir, config, resume, defaults or {})))


def write_json(path, value) -> None:
    """Write `value` to `path`; a reader or a crash sees the old file or the new one, never half."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    with open(tmp, "w", encoding="utf-8") as file:
        file.write(_dump(value, str(path)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp, path)
    _fsync_folder(path.parent)


def _claim(run_dir, config, resume, defaults):
    file = run_dir / "config.json"
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run folder {run_dir} is a file; choose another name for the run")
    if not file.exists():
        if run_dir.is_dir() and (others := sorted(p.name for p in run_dir.iterdir())):
            raise ValueError(
                f"run folder {run_dir} has no config.json but holds {', '.join(others[:3])}"
                f"{', …' if len(others) > 3 else ''}; choose another name for the run"
            )
        write_json(file, config)
        return False
    if not resume:
        raise ValueError(
            f"run folder {run_dir} already holds a run; "
            "choose another name, let it resume, or move it away"
        )
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is not JSON ({error}); repair it or move {run_dir} away"
        ) from None
    new = json.loads(_dump(config, "config"))
    defaults = json.loads(_dump(defaults, "defaults"))
    changes = _differences(old, new, defaults)
    free = tuple(f"{name}." for name in VARIABLE_KEYS)
    fixed = {key: pair for key, pair in changes.items() if not f"{key}.".startswith(free)}
    if fixed:
        listed = ", ".join(f"{key}: {a} -> {b}" for key, (a, b) in fixed.items())
        raise ValueError(
            f"run folder {run_dir} was started with a different config ({listed}); "
            "set these keys back, choose another name for the run, or move the folder away"
        )
    for key, (a, b) in changes.items():
        print(f"checkpoint: {run_dir.name} continues with {key} {a} -> {b}", flush=True)
    if changes:
        write_json(file, new)
    return True


def _differences(old, new, defaults):
    old, new = trees.dotted(old), trees.dotted(new)
    old |= {k: v for k, v in trees.dotted(defaults).items() if k in new and k not in old}
    old, new = ({k: json.dumps(v, ensure_ascii=False) for k, v in c.items()} for c in (old, new))
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in old | new}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def _orbax():
    # weights and moments hardly shrink, and compressing them took most of a save's time
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _make_room(folder, leaves):
    """Remove what interrupted saves and deletions left, then check the free space."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(("tmp-", "trash-")):
            print(f"checkpoint: removing {path}, left by an interrupted run", flush=True)
            shutil.rmtree(path)
    need = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(
            f"checkpoint needs {need / 1e9:.3f} GB but {folder} has {free / 1e9:.3f} GB free; "
            "free some space, or lower config.keep_last"
        )


def _commit(tmp, final, step, leaves, meta):
    names = sorted(str(p.relative_to(tmp)) for p in tmp.rglob("*") if p.is_file())
    body = {
        "format": FORMAT,
        "step": step,
        "meta": meta,
        "leaves": {path: [list(leaf.shape), leaf.dtype.name] for path, leaf in leaves.items()},
        "files": _digests(tmp, names, sync=True),
    }
    write_json(tmp / _MANIFEST, {"crc32": _crc(body), "body": body})
    for folder in {(tmp / name).parent for name in body["files"]}:
        _fsync_folder(folder)
    if final.exists():
        _delete(final)
    os.rename(tmp, final)
    _fsync_folder(final.parent)


def _search(folder):
    finished = {_name(step) for step in _steps(folder)}
    for path in sorted(folder.glob("*")):
        if path.name not in finished and not path.name.startswith("corrupt-"):
            print(f"checkpoint: ignoring {path}, not a finished checkpoint", flush=True)
    for step in reversed(_steps(folder)):
        path = folder / _name(step)
        fault = _fault(path)
        if fault is None:
            return step
        asides = (folder / f"corrupt-{path.name}-{n}" for n in itertools.count())
        aside = next(aside for aside in asides if not aside.exists())
        os.rename(path, aside)
        print(f"checkpoint: {path} is damaged ({fault}); moved to {aside.name}", flush=True)
    return -1


def _fault(path):
    """Say how a checkpoint folder differs from its manifest, or None."""
    body = _read_manifest(path)
    if body is None:
        return f"{_MANIFEST} does not match its digest"
    for name, (size, _) in body["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, expected {size}"
    found = _digests(path, body["files"])
    for name, digest in body["files"].items():
        if digest != found[name]:
            return f"{name} has a different crc32 from when it was written"
    return None


def _steps(folder):
    """Steps of the folders that have a manifest, which is not checked here, in order."""
    named = (_STEP.fullmatch(file.parent.name) for file in folder.glob(f"*/{_MANIFEST}"))
    return sorted(int(match[1]) for match in named if match)


def _finished(folder):
    """The manifest of a checkpoint; ValueError when it has no valid one."""
    body = _read_manifest(folder)
    if body is None:
        raise ValueError(f"{folder} is not a finished checkpoint (no valid {_MANIFEST})")
    return body


def _read_manifest(path):
    try:
        wrapped = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if wrapped["crc32"] != _crc(wrapped["body"]):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    body = wrapped["body"]
    if body["format"] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {body['format']}, this version reads {FORMAT}"
        )
    return body


def _compare(folder, stored, wanted):
    faults = []
    for path, leaf in wanted.items():
        expected = f"{leaf.dtype.name}{list(leaf.shape)}"
        if path not in stored:
            faults.append(f"{path}: missing, expected {expected}")
        elif (got := f"{stored[path][1]}{stored[path][0]}") != expected:
            faults.append(f"{path}: got {got}, expected {expected}")
    faults += [f"{path}: stored but not expected" for path in stored if path not in wanted]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(
            f"{folder} does not fit the configured model: {'; '.join(faults[:5])}{more}; "
            "use the config the run was started with"
        )


def _restore_args(leaf):
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def _flatten(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _array(path, leaf):
    if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    raise ValueError(
        f"checkpoint leaf {path} is {type(leaf).__name__}, expected an array of numbers"
    )


def _on_first_process(fn: Callable[[], Any]):
    """Run fn on process 0; the others wait and get its int, or 0. A failure there fails all."""
    if jax.process_count() == 1:
        return fn()
    error, result = None, None
    if jax.process_index() == 0:
        try:
            result = fn()
        except Exception as caught:  # tell the others before this process raises it
            error = caught
    number = result if isinstance(result, int) else 0
    told = np.array([error is not None, number], np.int32)
    failed, number = multihost_utils.broadcast_one_to_all(told)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("process 0 failed in a checkpoint operation; its own message says why")
    return int(number)


def _delete(path):
    """Rename, then delete: a kill in between leaves no folder that looks like a checkpoint."""
    trash = path.with_name(f"trash-{path.name}")
    os.rename(path, trash)
    shutil.rmtree(trash)


def _name(step):
    return f"step_{step:08d}"


def _digests(folder, names, sync=False):
    """{name: [bytes, crc32]} of files, after forcing them to disk where asked."""

    def digest(name):
        size = crc = 0
        with open(folder / name, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            while chunk := file.read(1 << 22):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return [size, crc]

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _crc(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _dump(value, what):
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None


def _fsync_folder(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
