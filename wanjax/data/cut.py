"""What a video or image is cut to, and the processes that cut ahead of the device.

Nothing here imports jax, so that a process that decodes starts fast and holds no device.
"""

import contextlib
import hashlib
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from multiprocessing import connection

import numpy as np

from wanjax.data import video

_SLOWER = 0.9  # a source below this share of the requested frame rate would repeat frames
_WORKERS = 16  # at most; 81 frames of 1080p take a core about 10 s


@dataclass(frozen=True)
class Settings:
    """What clips are cut to; () allows all. A clip gets the longest length it fills and, of the
    sizes that need no enlarging, the one closest to its aspect ratio (the largest of equals)."""

    frames: tuple[int, ...] = ()  # allowed lengths
    sizes: tuple[tuple[int, int], ...] = ()  # allowed (height, width) in pixels
    fps: float | None = None  # frames per second after retiming; None keeps every frame
    stills: bool = False  # a video, too, may be cut to one frame
    image_to_video: bool = False  # of the model, for which one frame is no clip


@dataclass(frozen=True, eq=False)
class Cut:
    """A file that can be used, cut to its bucket."""

    shape: tuple[int, int, int]  # frames, height, width
    fps: float  # of the cut frames; 0 for an image
    meta: dict  # of the file, by video.probe
    frames: np.ndarray | None  # uint8 [T,H,W,3]; None where they were not asked for


def cut(path, settings: Settings, keep: bool) -> Cut:
    """Decode a file and cut it to its bucket; keep: return the frames.

    Raises ValueError with the reason for a file that cannot be used.
    """
    meta = video.probe(path)
    length = _length(meta, settings)
    height, width = _size((meta["height"], meta["width"]), settings.sizes)
    frames, count = [], 0
    for frame in video.read_frames(path, length, settings.fps):
        fitted = video.fit(frame, height, width)
        frames += [fitted] if keep else []
        count += 1
    if count != length:
        raise ValueError(f"{count} of {length} frames decode the second time")
    fps = (settings.fps or meta["fps"]) if meta["fps"] else 0.0
    return Cut((length, height, width), fps, meta, np.stack(frames) if keep else None)


def content(path) -> str:
    """SHA-256 of a file's bytes, hexadecimal; of an image's hashed with a word more, because what
    bytes are read as goes by the file's name."""
    with open(path, "rb") as data:
        found = hashlib.file_digest(data, "sha256")
    if path.suffix.lower() in video.IMAGES:
        found.update(b"image")
    return found.hexdigest()


def _length(meta: dict, settings: Settings) -> int:
    """The longest allowed number of frames."""
    fps, rate, count = settings.fps, meta["fps"], meta["frames"]
    if fps and rate:
        if rate < _SLOWER * fps:
            raise ValueError(f"{rate:g} frames a second would be repeated to give {fps:g} (--fps)")
        count = max(1, math.floor(meta["seconds"] * fps + 0.5))
    allowed = [n for n in settings.frames if n > 1 or settings.stills or not rate]
    allowed = allowed if settings.frames else [count]
    fitting = [n for n in allowed if n <= count]
    if not fitting:
        frames = f"{count} frame{'s' if count > 1 else ''}"
        retimed = f" at {fps:g} a second (--fps)" if fps and rate else ""
        raise ValueError(f"{frames}{retimed}, shorter than --frames {min(allowed)}")
    if settings.image_to_video and max(fitting) == 1:
        raise ValueError("one frame has nothing to learn for an image-to-video model")
    return max(fitting)


def _size(source: tuple[int, int], sizes) -> tuple[int, int]:
    """The allowed size closest in aspect ratio to (height, width), among those it covers."""
    if not sizes:
        return source
    fitting = [s for s in sizes if s[0] <= source[0] and s[1] <= source[1]]
    if not fitting:
        smallest = min(sizes, key=math.prod)
        listed = "x".join(map(str, smallest))
        raise ValueError(f"{source[0]}x{source[1]} would have to be enlarged to {listed} (--size)")

    def distance(size):
        stretch = abs(math.log(size[0] / size[1]) - math.log(source[0] / source[1]))
        return round(stretch, 6), -math.prod(size)

    return min(fitting, key=distance)


def workers(share: int = 1) -> int:
    """Processes that one of `share` programs on this machine may have."""
    return max(1, min(_WORKERS, (os.cpu_count() or 1) // share))


@contextlib.contextmanager
def processes(share: int = 1) -> Iterator[futures.ProcessPoolExecutor]:
    """Processes to call `cut` in.

    They start when work comes, finish the files in hand when the block is left by whatever cause,
    and end with this process even where it is killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy jax's threads and locks
    pool = futures.ProcessPoolExecutor(workers(share), context, _begin)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Prepare a worker: Ctrl-C is its parent's to handle, and it ends when the parent has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end():
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
