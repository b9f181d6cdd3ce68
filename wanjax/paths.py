"""What a user types where a file or folder is asked for: a local path, an object of a store as
gs://BUCKET/… or s3://BUCKET/…, or for models a name org/name of the Hugging Face hub.

A local path becomes a pathlib.Path, a remote one an etils.epath.Path, which has the same methods;
byte ranges of remote files are read through fsspec, by gcsfs and s3fs (extra `cloud`).
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import huggingface_hub
from etils import epath
from etils.epath import backend

Path = pathlib.Path | epath.Path
STORES = {"gs": "gcsfs", "s3": "s3fs"}  # the package that reads each
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.safetensors)(?<!\.pth)(?<!\.gguf)", re.ASCII)
_PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")
WAN = (  # files of a hub repository, in diffusers layout and in the original one
    *("model_index.json", "wanjax.json", "config.json", "scheduler/*.json", "tokenizer/*"),
    *(f"{part}/*.{end}" for part in _PARTS for end in ("json", "safetensors")),
    *("*_noise_model/*.json", "*_noise_model/*.safetensors", "diffusion_pytorch_model*"),
    *("models_*.pth", "Wan2.?_VAE.pth", "google/umt5-xxl/*"),
)


def resolve(text) -> Path:
    """The path that a shell would take `text` for: `~` is a home folder, a relative one starts from
    the working directory; gs:// and s3:// stay as they are.

    Raises ValueError for another scheme, an unknown user, a store whose package is not installed,
    and one that does not answer.
    """
    if isinstance(text, epath.Path):  # resolved before
        return text
    text = os.fspath(text)
    scheme, is_url, _ = text.partition("://")
    if not is_url:
        try:
            return pathlib.Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{text}: {one_line(error)}; write the path of the folder") from None
    if scheme not in STORES:
        raise ValueError(f"{text}: {scheme}:// is not read; give a local path, gs:// or s3://")
    if importlib.util.find_spec(STORES[scheme]) is None:
        raise ValueError(
            f"{text}: {scheme}:// needs the package {STORES[scheme]}; pip install 'wanjax[cloud]'"
        )
    path = epath.Path(text)

    def reach():
        _store(path).invalidate_cache()  # an old listing would hide what was stored since
        path.exists()

    _ask(path, reach)
    return path


def local(text) -> pathlib.Path:
    """The local path that a shell would take `text` for; ValueError for one of an object store."""
    if "://" in os.fspath(text):
        raise ValueError(f"{text}: must be a local path; copy from or to the store yourself")
    path = resolve(text)
    assert isinstance(path, pathlib.Path)
    return path


def model(text, needed: tuple[str, ...] = WAN) -> Path:
    """Where a model is: the path of `text`, or the snapshot of a hub name such as
    Wan-AI/Wan2.2-T2V-A14B-Diffusers, from the local cache if it is complete there, else downloaded.

    needed: patterns of the files of a repository. A path that exists comes before a name. One that
    is neither is returned as it is, a name that is nowhere is a ValueError.
    """
    path = resolve(text)
    if is_remote(path) or path.exists() or not _NAME.fullmatch(os.fspath(text)):
        return path
    return _snapshot(os.fspath(text), needed)


def is_remote(path: Path) -> bool:
    """Whether a path is one of an object store."""
    return isinstance(path, epath.Path)


def size(path: Path) -> int:
    """Bytes of a file."""
    if not is_remote(path):
        return os.stat(path).st_size
    return _ask(path, lambda: _store(path).info(str(path))["size"])


def read_range(path: Path, start: int, stop: int) -> bytes:
    """Bytes start..stop-1 of a file; fewer where it ends before. Threads may read at once."""
    if stop <= start:
        return b""
    if is_remote(path):
        return _ask(path, lambda: _store(path).cat_file(str(path), start=start, end=stop))
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def copy_folder(source, to: pathlib.Path) -> None:
    """Copy a local or remote folder to a local one that is not there yet."""
    path = resolve(source)
    if is_remote(path):
        _ask(path, lambda: _store(path).get(f"{path}/", f"{to}/", recursive=True))
    else:
        shutil.copytree(path, to)


def files(folder: Path) -> dict[str, int]:
    """{name below it: bytes} of all files of a folder, in order; of a store as it is now, whichever
    client wrote them."""
    if not is_remote(folder):
        found = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(folder)): os.stat(path).st_size for path in found}
    refresh(folder)
    listed = _ask(folder, lambda: _store(folder).find(str(folder), detail=True))
    start = str(folder).partition("://")[2] + "/"
    return {name.removeprefix(start): listed[name]["size"] for name in sorted(listed)}


def refresh(folder: Path) -> None:
    """Forget listings of a store, which would hide what another client has written."""
    if is_remote(folder):
        _store(folder).invalidate_cache()


def remove(path: Path) -> None:
    """Delete a file or a whole folder."""
    if isinstance(path, epath.Path):
        refresh(path)
        _ask(path, lambda: _store(path).rm(str(path), recursive=True))
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def upload(folder: pathlib.Path, to: Path) -> None:
    """Copy the files of a local folder into a folder of a store."""
    for name in files(folder):
        source, target = str(folder / name), str(to / name)
        _ask(to, lambda source=source, target=target: _store(to).put_file(source, target))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[pathlib.Path]:
    """Yield a local file to write; it takes the place of `path` when the block has succeeded, so
    that nobody sees half of it."""
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="wanjax-") as folder:
            yield pathlib.Path(folder) / path.name
            upload(pathlib.Path(folder), path.parent)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(path.with_name(f".{path.stem}.tmp{path.suffix}"))
    yield part
    os.replace(part, path)


@contextlib.contextmanager
def local_folder(path: Path) -> Iterator[pathlib.Path]:
    """Yield a local folder for what is to be in `path`: itself, or for one of a store an empty one
    that is uploaded when the block has succeeded."""
    if not is_remote(path):
        yield pathlib.Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="wanjax-") as folder:
        yield pathlib.Path(folder)
        upload(pathlib.Path(folder), path)


def one_line(error) -> str:
    """An error as one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."


def _store(path: Path) -> fsspec.AbstractFileSystem:
    """The client that epath asks too: one of a process, so that all threads share connections."""
    return backend.fsspec_backend.fs(path)


def _ask(path: Path, question: Callable) -> Any:
    """question(), with whatever a store's client raises as one line."""
    try:
        return question()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such object; check the address") from None
    except Exception as error:  # of three client libraries: network, credentials, permissions
        raise ValueError(
            f"{path}: cannot be reached ({type(error).__name__}: {one_line(error)}); check "
            "address, credentials and network"
        ) from None


def _snapshot(name: str, needed: tuple[str, ...]) -> pathlib.Path:
    """The folder of a hub repository in the local cache, filled or completed from the hub."""
    get = functools.partial(huggingface_hub.snapshot_download, name, allow_patterns=[*needed])
    try:
        try:
            return pathlib.Path(get(local_files_only=True))
        except huggingface_hub.errors.LocalEntryNotFoundError:  # or incomplete
            return pathlib.Path(get())
    except Exception as error:  # network, permissions, a full disk: see the text
        raise ValueError(
            f"{name}: no such folder here ({pathlib.Path(name).absolute()}); as a Hugging Face "
            f"model it is not complete in the cache {huggingface_hub.constants.HF_HUB_CACHE} and "
            f"cannot be downloaded ({type(error).__name__}: {one_line(error)}); give a model "
            f"folder, or where there is a network run: hf download {name}"
        ) from None
