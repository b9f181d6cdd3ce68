"""Standard output and error that no work depends on."""

import io
import os
import sys


def steady() -> None:
    """Let neither a closed pipe or terminal nor a character that it can't show end the program:
    what can't be written is dropped, what can't be encoded is shown escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed from the start, or redirected in Python
        stream.flush()
        raw = io.BufferedWriter(_Sink(stream.fileno()))
        options = {"encoding": stream.encoding, "errors": "backslashreplace"}
        setattr(sys, name, io.TextIOWrapper(raw, line_buffering=True, **options))


class _Sink(io.RawIOBase):
    """A file descriptor whose failures are not told."""

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data, /) -> int:
        view = memoryview(data)
        try:
            return os.write(self._number, view)
        except OSError:  # nobody reads it any more, or the disk behind it is full
            return len(view)
