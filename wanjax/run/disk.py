"""Files of a run folder: JSON written whole or not at all, and what one process does for all."""

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax import paths


def write_json(path, value) -> None:
    """Write `value` to `path`; a reader or a crash sees the old file or the new one, never half."""
    path = paths.resolve(path)
    text = dump_json(value, str(path)) + "\n"
    with paths.whole_file(path) as part, open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def dump_json(value, what: str) -> str:
    """`value` as JSON text; ValueError naming `what` where it cannot be."""
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None


def on_first_process(fn: Callable[[], Any]):
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


def sync_folder(folder) -> None:
    """Force the entries of a local folder to disk."""
    if paths.is_remote(folder):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
