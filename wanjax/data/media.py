"""A folder of captioned videos and images: what each of its files becomes.

`look` is what `python -m wanjax.data` asks for both `inspect` and `cache`, so that they agree.
"""

import collections
import concurrent.futures
import os
import pathlib
from collections.abc import Callable, Generator
from concurrent.futures import process
from dataclasses import dataclass

from wanjax import paths
from wanjax.data import cut, text, video

KINDS = video.IMAGES + video.VIDEOS
_AHEAD = 2  # files that wait for the device, besides those being decoded


@dataclass(frozen=True, eq=False)
class Found:
    """A file of a folder: why it cannot be used, or its caption and content with its frames, or
    with what is `known` of them."""

    file: str  # its path below the folder
    reason: str = ""
    caption: str = ""
    sha256: str = ""
    made: cut.Cut | None = None
    known: dict | None = None


def listing(folder) -> dict[str, str]:
    """{path below the folder: why it cannot be a clip, or ""} of all files but hidden ones and the
    captions of others, in order; ValueError when there is no video or image.

    A folder is listed where its files are not looked at, or where it has the name of a video.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no folder at {folder}; expected videos or images with .txt captions")
    found = {}
    entries = sorted(folder.rglob("*"))
    stems = {e.with_suffix("") for e in entries if e.suffix.lower() in KINDS and not e.is_dir()}
    for entry in entries:
        name = entry.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        captions = entry.suffix == ".txt" and entry.is_file()
        if not (captions and entry.with_suffix("") in stems):
            reason = _fault(entry)
            if reason is not None:
                found[name.as_posix()] = reason
    if "" not in found.values():
        kinds = " ".join(KINDS)
        others = f", but {len(found)} of other kinds" if found else ""
        raise ValueError(f"{folder} holds no video or image ({kinds}){others}")
    return found


def _fault(entry: pathlib.Path) -> str | None:
    """Why an entry of a folder cannot be a clip; "" if it may be one, None for a plain folder."""
    kind = entry.suffix.lower()
    if entry.is_dir():
        if entry.is_symlink():
            return "a link to a folder, whose files are not looked at"
        if not os.access(entry, os.R_OK | os.X_OK):
            return "a folder that may not be read"
        return "a folder with the name of a file" if kind in KINDS else None
    if not entry.is_file():
        return "a link that leads nowhere" if entry.is_symlink() else "not a file"
    if kind == ".txt":
        lone = "a caption without a video or image of its name"
        return lone if entry.suffix == kind else f"captions end in .txt, not {entry.suffix}"
    return "" if kind in KINDS else f"not a video or image ({kind or 'no suffix'})"


def caption_of(file: pathlib.Path) -> str:
    """The caption beside a file; ValueError with the reason why there is none."""
    path = file.with_suffix(".txt")
    if not path.is_file():
        raise ValueError("no caption (a .txt file of the same name)")
    try:
        caption = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("caption is not UTF-8") from None
    if not text.clean(caption):
        raise ValueError("empty caption")
    return caption


def look(
    folder,
    files: dict[str, str],
    settings: cut.Settings,
    known: Callable,
    *,
    keep: bool,
    share: int = 1,
) -> Generator[Found]:
    """What becomes of each of `files` (as `listing` gives them), in order, some decoded ahead.

    known: (caption, sha256) -> what is known of such a clip, which is then not decoded, or None.
    keep: return the frames; share: programs on this machine that do the same. Raises ValueError if
    a process that decodes is lost.
    """  # fmt: skip
    folder, left = pathlib.Path(folder), iter(files.items())
    alone = len(files) == 1  # nothing to decode ahead of
    with (
        concurrent.futures.ThreadPoolExecutor(cut.workers(share) + _AHEAD) as threads,
        concurrent.futures.ThreadPoolExecutor(1) if alone else cut.processes(share) as pool,
    ):
        queue: collections.deque = collections.deque()
        while True:
            while len(queue) < cut.workers(share) + _AHEAD and (item := next(left, None)):
                task = threads.submit(_look, folder, *item, settings, known, keep, pool)
                queue.append((item[0], task))
            if not queue:
                return
            try:
                found = queue[0][1].result()
            except process.BrokenProcessPool:
                names = ", ".join(shown(name) for name, _ in queue)
                raise ValueError(
                    "a process that decodes was lost (killed for memory, or by a fault of the "
                    f"decoder) at one of: {names}; free memory or move that file away, and run the "
                    "same command again"
                ) from None
            queue.popleft()
            yield found


def _look(folder, name: str, reason: str, settings, known, keep: bool, pool) -> Found:
    file = folder / name
    try:
        if reason:
            raise ValueError(reason)
        caption, sha256 = caption_of(file), cut.content(file)
        before = known(caption, sha256)
        if before is not None:
            return Found(name, "", caption, sha256, known=before)
        made = pool.submit(cut.cut, file, settings, keep).result()
    except ValueError as error:
        return Found(name, paths.one_line(str(error).replace(str(file), file.name)))
    except OSError as error:
        return Found(name, f"cannot be read ({error.strerror or error})")
    return Found(name, "", caption, sha256, made)


def shown(name: str) -> str:
    """A file name for a line of text."""
    return "".join(c if c.isprintable() else "?" for c in name)
