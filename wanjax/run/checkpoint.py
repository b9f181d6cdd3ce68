"""Checkpoints that survive a kill at any instant.

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

Several processes must share the file system and call `save`, `latest_good`, `restore` and
`prune` together.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from wanjax.run import disk

FORMAT = 1
_MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step_(\d{8,})")


def save(run_dir, step: int, state, meta: dict[str, Any]) -> pathlib.Path:
    """Write `state` (pytree of arrays) and `meta` (JSON) as checkpoint `step`; return its folder.

    The folder gets its final name only when complete and on disk; one of the same step is replaced.
    Raises ValueError for a leaf that is not an array or meta that is not JSON, OSError for a full
    disk.
    """
    meta_text = disk.dump_json(meta, "checkpoint meta")
    leaves = {path: _array(path, leaf) for path, leaf in _flatten(state).items()}
    folder = pathlib.Path(run_dir).absolute() / "checkpoints"
    tmp, final = folder / f"tmp-{_name(step)}", folder / _name(step)
    disk.on_first_process(lambda: _make_room(folder, leaves))
    with _orbax() as checkpointer:
        checkpointer.save(tmp / "arrays", args=ocp.args.PyTreeSave(leaves))
    disk.on_first_process(lambda: _commit(tmp, final, step, leaves, json.loads(meta_text)))
    return final


def latest_good(run_dir) -> int | None:
    """Return the newest step whose manifest and digests verify, or None.

    Folders that are not a finished checkpoint are named on the console and ignored; one whose
    content differs from its manifest is renamed to corrupt-* and the previous step is tried.
    """
    step = disk.on_first_process(lambda: _search(pathlib.Path(run_dir) / "checkpoints"))
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


def read(run_dir, step: int, part: str) -> dict[str, np.ndarray]:
    """{path below it: host array} of one part of a checkpoint, such as "trained"; {} without it.

    Nothing else is read, and nothing touches a device. Raises ValueError for an unfinished folder.
    """
    folder = pathlib.Path(run_dir).absolute() / "checkpoints" / _name(step)
    below = [path for path in _finished(folder)["leaves"] if path.startswith(f"{part}/")]
    wanted = dict.fromkeys(below, ocp.RestoreArgs(restore_type=np.ndarray))
    if not wanted:
        return {}
    how = ocp.args.PyTreeRestore(wanted, wanted, partial_restore=True)
    with _orbax() as checkpointer:
        found = checkpointer.restore(folder / "arrays", args=how)
    return {path.removeprefix(f"{part}/"): array for path, array in found.items()}


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
    disk.on_first_process(lambda: [_delete(folder / _name(step)) for step in gone])


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
    disk.write_json(tmp / _MANIFEST, {"crc32": _crc(body), "body": body})
    for folder in {(tmp / name).parent for name in body["files"]}:
        disk.sync_folder(folder)
    if final.exists():
        _delete(final)
    os.rename(tmp, final)
    disk.sync_folder(final.parent)


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
