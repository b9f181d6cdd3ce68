"""Checkpoints that survive a kill at any instant.

    run_dir/checkpoints/step_00000012/
        arrays/                              the state, written by Orbax
        MANIFEST.json                        step, meta, leaf shapes and dtypes, file sizes, crc32
    run_dir/checkpoints/tmp-*                being written
                        trash-*              being deleted
                        corrupt-*            failed verification, kept for inspection

An object store has no renames: there the folder has its final name from the start, the manifest,
written last, makes it a checkpoint, and one that failed verification has its manifest renamed.
Orbax writes to gs:// itself, and digests are of what the store gives back. It does not write to
s3://: there a single process writes to a temporary folder and uploads that.

Orbax commits atomically, but it restores flipped bits without notice, lists empty folders and casts
dtypes silently. So a checkpoint counts only with a manifest whose digests match, every rename is of
a complete folder, and leaves are compared with the manifest before Orbax reads them. Its
CheckpointManager does not serve: it deletes in place and treats any folder it finds as good; only
its preservation policies are used. Random keys are not state: they derive from (seed, step,
purpose).

Training goes on while a checkpoint is written: `Saver.save` returns once the state is on the host.
The thread that writes, digests and commits it runs no collective, which would meet those of the
training step in another order on each process; it waits at barriers of the coordination service.

Several processes must share the file system, or use gs://, and call `Saver.save`, `save`,
`latest_good` and `restore` together. Each digests the files that it wrote; process 0 commits and
prunes.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from wanjax import paths
from wanjax.run import disk

FORMAT = 1
_MANIFEST = "MANIFEST.json"
_DAMAGED = "DAMAGED.json"  # what the manifest becomes where folders cannot be renamed
_STEP = re.compile(r"step_(\d{8,})")
_PART = re.compile(r"arrays/(?:ocdbt\.|array_metadatas/)process_(\d+)(?:/.*)?")  # of one process
_CHUNK = 1 << 24  # bytes read at once
_TIMEOUT = 6 * 3600  # seconds for the other processes' shards; one that dies ends all sooner
_saves = itertools.count()  # of this process; the same on all, as they save together


class NotSaved(OSError):
    """A checkpoint could not be written; the one before it is still good."""


class Saver:
    """Writes the checkpoints of a run while training goes on, one at a time.

    What goes wrong in the thread that writes is raised as NotSaved by the next `check`, `wait`,
    `save` or `close`, once. tidy: called in that thread of process 0 after every commit.
    """

    def __init__(self, run_dir, tidy: Callable[[], Any] = lambda: None):
        self._folder = _root(run_dir)
        self._tidy = tidy
        options = ocp.options.AsyncOptions(_TIMEOUT, create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(_handler(), async_options=options)
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: futures.Future[None] | None = None

    def save(self, step: int, state, meta: dict[str, Any]) -> paths.Path:
        """Begin to write `state` (pytree of arrays) and `meta` (JSON) as checkpoint `step`; return
        the folder it will have.

        On return the arrays are copied to the host and may be donated. The folder gets its final
        name only when complete and on disk; one of the same step is replaced. Waits for an earlier
        save. Raises ValueError for a leaf that is not an array or meta that is not JSON, NotSaved
        for a disk with too little space.
        """
        self.wait()
        meta_text = disk.dump_json(meta, "checkpoint meta")
        leaves = {path: _array(path, leaf) for path, leaf in _flatten(state).items()}
        final = self._folder / _name(step)
        disk.on_first_process(lambda: _make_room(final, leaves))
        work = _work(final)
        self._orbax.save(work / "arrays", args=ocp.args.PyTreeSave(leaves))
        body = {
            "format": FORMAT,
            "step": step,
            "meta": json.loads(meta_text),
            "leaves": {path: [list(leaf.shape), leaf.dtype.name] for path, leaf in leaves.items()},
        }
        self._saving = self._thread.submit(self._finish, work, final, body, next(_saves))
        return final

    def check(self) -> None:
        """Raise the error of a save that has ended; call it every step."""
        if self._saving and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Return when no save is in flight: the last one counts, on all processes."""
        if self._saving:
            futures.wait([self._saving])  # Ctrl-C here leaves it in flight
            ended, self._saving = self._saving, None
            ended.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _finish(self, work, final, body, number):
        """What the thread does: end the writing, digest, commit."""
        try:
            self._orbax.wait_until_finished()
            _commit(work, final, body, ocp.multihost.get_barrier_sync_fn(), number)
            if jax.process_index() == 0:
                self._tidy()
        except Exception as error:
            raise NotSaved(
                f"checkpoint {body['step']} could not be saved "
                f"({type(error).__name__}: {paths.one_line(error)}); the one before it is kept: "
                "mend that and run the same command again"
            ) from error


def check(run_dir: paths.Path) -> None:
    """Raise ValueError where the checkpoints of this many processes cannot be."""
    if _is_s3(run_dir) and jax.process_count() > 1:
        raise ValueError(
            f"{run_dir}: the checkpoints of several processes go to a shared folder or to gs://, "
            "not to s3://; set config.workdir to one of these"
        )


def save(run_dir, step: int, state, meta: dict[str, Any]) -> paths.Path:
    """Save as `Saver.save` does and wait for it; return the folder."""
    saver = Saver(run_dir)
    try:
        return saver.save(step, state, meta)
    finally:
        saver.close()


def latest_good(run_dir) -> int | None:
    """Return the newest step whose manifest and digests verify, or None.

    Folders that are not a finished checkpoint are named on the console and ignored; one whose
    content differs from its manifest is renamed to corrupt-* and the previous step is tried.
    """
    step = disk.on_first_process(lambda: _search(_root(run_dir)))
    return None if step < 0 else step


def restore(run_dir, step: int, abstract_state) -> tuple[Any, dict[str, Any]]:
    """Return (state, meta) of `step`, leaves placed as those of `abstract_state` are.

    A leaf of `abstract_state` is an array or a ShapeDtypeStruct; one without sharding, or of an
    uncommitted array, comes back uncommitted on the default device. Raises ValueError naming the
    leaves that are missing, unexpected, or of a different shape or dtype.
    """
    folder = _root(run_dir) / _name(step)
    body = _finished(folder)
    wanted = _flatten(abstract_state)
    _compare(folder, body["leaves"], wanted)
    args = {path: _restore_args(leaf) for path, leaf in wanted.items()}
    how = ocp.args.PyTreeRestore(item=wanted, restore_args=args)
    with _here(folder) as place, ocp.Checkpointer(_handler()) as checkpointer:
        arrays = checkpointer.restore(place / "arrays", args=how)
    leaves = [jnp.asarray(arrays[path]) for path in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), body["meta"]


def vacate(tree):
    """The shapes of a tree of arrays, as `restore` takes them, after giving back their memory: what
    is restored finds the place of what it replaces, and leaves no holes."""

    def shape(x):
        where = x.sharding if x.committed else None
        found = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        x.delete()
        return found

    return jax.tree.map(shape, tree)


def abstract(run_dir, step: int) -> dict[str, Any]:
    """Shapes and dtypes {path: ShapeDtypeStruct} of a checkpoint, enough to restore it whole."""
    body = _finished(_root(run_dir) / _name(step))
    return {path: jax.ShapeDtypeStruct(*leaf) for path, leaf in body["leaves"].items()}


def read(run_dir, step: int, part: str) -> dict[str, np.ndarray]:
    """{path below it: host array} of one part of a checkpoint, such as "trained"; {} without it.

    Nothing else is read, and nothing touches a device. Raises ValueError for an unfinished folder.
    """
    folder = _root(run_dir) / _name(step)
    below = [path for path in _finished(folder)["leaves"] if path.startswith(f"{part}/")]
    wanted = dict.fromkeys(below, ocp.RestoreArgs(restore_type=np.ndarray))
    if not wanted:
        return {}
    how = ocp.args.PyTreeRestore(wanted, wanted, partial_restore=True)
    with _here(folder) as place, ocp.Checkpointer(_handler()) as checkpointer:
        found = checkpointer.restore(place / "arrays", args=how)
    return {path.removeprefix(f"{part}/"): array for path, array in found.items()}


def prune(run_dir, keep_last: int, keep_every: int = 0, best: int | None = None) -> None:
    """Delete all but the newest `keep_last` steps, the multiples of `keep_every` (0: none) and
    `best`; for process 0 alone, in any thread. One that is being written is no step yet."""
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}; set config.keep_last")
    folder = _root(run_dir)
    steps = _steps(folder)
    rules: list[policies.PreservationPolicy] = [policies.LatestN(keep_last)]
    rules += [policies.EveryNSteps(keep_every)] if keep_every else []
    rules += [] if best is None else [policies.CustomSteps([best])]
    saved: list[Any] = [SimpleNamespace(step=step) for step in steps]  # all that these rules read
    context = policies.PreservationContext()
    kept = policies.AnyPreservationPolicy(rules).should_preserve(saved, context=context)
    for step in (step for step, stays in zip(steps, kept, strict=True) if not stays):
        _delete(folder / _name(step))


def _handler():
    # weights and moments hardly shrink, and compressing them took most of a save's time
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _root(run_dir) -> paths.Path:
    folder = paths.resolve(run_dir)
    return (folder if paths.is_remote(folder) else folder.absolute()) / "checkpoints"


def _is_s3(folder):
    return str(folder).startswith("s3://")


def _work(final) -> paths.Path:
    """Where the arrays of a checkpoint are written."""
    if _is_s3(final):
        return pathlib.Path(tempfile.mkdtemp(prefix="wanjax-"))
    return final if paths.is_remote(final) else final.with_name(f"tmp-{final.name}")


@contextlib.contextmanager
def _here(folder) -> Iterator[paths.Path]:
    """The folder of a checkpoint where Orbax can read it."""
    if not _is_s3(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="wanjax-") as copy:
        paths.copy_folder(folder / "arrays", pathlib.Path(copy) / "arrays")
        yield pathlib.Path(copy)


def _make_room(final, leaves):
    """Remove what interrupted saves and deletions left, then check the free space."""
    folder, local = final.parent, pathlib.Path(tempfile.gettempdir())
    if paths.is_remote(final):
        left = _unfinished(folder)
        left += [final] if paths.files(final) and final not in left else []
    else:
        folder.mkdir(parents=True, exist_ok=True)
        left = [p for p in sorted(folder.iterdir()) if p.name.startswith(("tmp-", "trash-"))]
        local = folder
    for path in left:
        print(f"checkpoint: removing {path}, left by an interrupted run", flush=True)
        _delete(path) if paths.is_remote(path) else shutil.rmtree(path)
    if paths.is_remote(final) and not _is_s3(final):
        return
    need = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    free = shutil.disk_usage(local).free
    if need > free:
        raise NotSaved(
            f"checkpoint needs {need / 1e9:.3f} GB but {local} has {free / 1e9:.3f} GB free; "
            "free some space, or lower config.keep_last"
        )


def _unfinished(folder) -> list[paths.Path]:
    """Folders of steps in a store without a manifest, neither a good nor a damaged one."""
    names = [name.split("/") for name in paths.files(folder)]
    known = {name for name, *rest in names if rest in ([_MANIFEST], [_DAMAGED])}
    return [folder / name for name in sorted({name for name, *_ in names} - known)]


def _commit(work, final, body, barrier, number):
    """Digest this process's files; process 0 adds them all to the manifest, which makes the folder
    a checkpoint.

    A process that fails here does not reach the barrier; it ends, and with it the run.
    """
    meet = functools.partial(barrier, timeout_ms=_TIMEOUT * 1000)
    here, count = jax.process_index(), jax.process_count()
    names = [f"arrays/{name}" for name in paths.files(work / "arrays")]
    digests = _digests(work, [name for name in names if _writer(name) % count == here], sync=True)
    if here:
        disk.write_json(work / f"digests-{here}.json", digests)
    meet(key=f"wanjax.checkpoint.{number}.digested")
    if here == 0:
        for part in [work / f"digests-{other}.json" for other in range(1, count)]:
            digests |= json.loads(part.read_text(encoding="utf-8"))
            part.unlink()
        body = {**body, "files": dict(sorted(digests.items()))}
        manifest = {"crc32": _crc(body), "body": body}
        if paths.is_remote(final):
            _publish(work, final, manifest)
        else:
            _rename(work, final, manifest)
    meet(key=f"wanjax.checkpoint.{number}.committed")


def _publish(work, final, manifest):
    """Make a checkpoint of the folder in a store."""
    if work != final:
        paths.upload(work, final)
        shutil.rmtree(work)
    disk.write_json(final / _MANIFEST, manifest)


def _rename(work, final, manifest):
    """Force the folder to disk and give it its name."""
    disk.write_json(work / _MANIFEST, manifest)
    for folder in {(work / name).parent for name in manifest["body"]["files"]}:
        disk.sync_folder(folder)
    if final.exists():
        _delete(final)
    os.rename(work, final)
    disk.sync_folder(final.parent)


def _writer(name):
    """The process that wrote a file of a checkpoint."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else 0


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
        aside = _set_aside(path)
        print(f"checkpoint: {path} is damaged ({fault}); moved to {aside.name}", flush=True)
    return -1


def _set_aside(path):
    """Rename a damaged checkpoint so that it counts no more; returns what was renamed, now."""
    if paths.is_remote(path):
        (path / _DAMAGED).write_bytes((path / _MANIFEST).read_bytes())
        (path / _MANIFEST).unlink()
        return path / _DAMAGED
    asides = (path.with_name(f"corrupt-{path.name}-{n}") for n in itertools.count())
    aside = next(aside for aside in asides if not aside.exists())
    os.rename(path, aside)
    return aside


def _fault(path):
    """Say how a checkpoint folder differs from its manifest, or None."""
    body = _read_manifest(path)
    if body is None:
        return f"{_MANIFEST} does not match its digest"
    sizes = paths.files(path)
    for name, (size, _) in body["files"].items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes, expected {size}"
    found = _digests(path, body["files"])
    for name, digest in body["files"].items():
        if digest != found[name]:
            return f"{name} has a different crc32 from when it was written"
    return None


def _steps(folder):
    """Steps of the folders that have a manifest, which is not checked here, in order."""
    paths.refresh(folder)
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
        text = (path / _MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError:
        if paths.is_remote(path):
            raise  # a network says nothing about the checkpoint
        return None
    try:
        wrapped = json.loads(text)
        if wrapped["crc32"] != _crc(wrapped["body"]):
            return None
    except (ValueError, KeyError, TypeError):
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
    if paths.is_remote(path):
        (path / _MANIFEST).unlink(missing_ok=True)
        paths.remove(path)
        return
    trash = path.with_name(f"trash-{path.name}")
    os.rename(path, trash)
    shutil.rmtree(trash)


def _name(step):
    return f"step_{step:08d}"


def _digests(folder, names, sync=False):
    """{name: [bytes, crc32]} of files, after forcing them to disk where asked."""

    def digest(name):
        path, crc = folder / name, 0
        if sync and not paths.is_remote(path):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        size = paths.size(path)
        for start in range(0, size, _CHUNK):
            crc = zlib.crc32(paths.read_range(path, start, start + _CHUNK), crc)
        return [size, crc]

    with futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _crc(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
