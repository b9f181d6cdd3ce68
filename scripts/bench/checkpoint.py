"""Seconds that a checkpoint takes out of the training loop: saved and waited for, and saved while
training goes on.

    python scripts/bench/checkpoint.py --gigabytes 3.7 --folder /tmp/bench

Where the state lies in host memory already, `Saver.save` does not copy it; the time of one copy
within memory is added, which is what it costs at least on a device.
"""

import argparse
import pathlib
import shutil
import tempfile
import time

import jax
import numpy as np

from wanjax.run import checkpoint

ARRAYS = 4


def main() -> None:
    """Print the seconds of each way and their ratio; what was written is removed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.7)
    parser.add_argument("--folder", default="/tmp", help="where to write, on the disk of the runs")
    args = parser.parse_args()
    state = make_state(args.gigabytes)
    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    try:
        waited, _ = save(folder, state, 1, wait=True)
        returned, total = save(folder, state, 2, wait=False)
    finally:
        shutil.rmtree(folder)
    copy = seconds_of_copy(state) if jax.default_backend() == "cpu" else 0.0
    print(f"{args.gigabytes} GB on {jax.devices()[0].device_kind}")
    print(f"saved and waited for    {waited:.2f} s in the loop")
    print(f"saved in the background {returned + copy:.2f} s in the loop, {total:.2f} s in all")
    print(f"  of which copying      {copy:.2f} s, added")
    print(f"ratio                   {(returned + copy) / waited:.1%}")


def make_state(gigabytes: float) -> dict[str, jax.Array]:
    """ARRAYS float32 arrays of random values, that many GB together."""
    columns = 1024
    rows = int(gigabytes * 1e9 / 4 / ARRAYS / columns)
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    return {str(n): jax.random.normal(key, (rows, columns)) for n, key in enumerate(keys)}


def save(folder, state, step: int, wait: bool) -> tuple[float, float]:
    """(seconds in the loop, seconds until the checkpoint counts)."""
    jax.block_until_ready(state)
    saver = checkpoint.Saver(folder, lambda: checkpoint.prune(folder, 1))
    start = time.monotonic()
    saver.save(step, state, {})
    if wait:
        saver.wait()
    returned = time.monotonic() - start
    saver.close()
    assert checkpoint.abstract(folder, step)
    return returned, time.monotonic() - start


def seconds_of_copy(state) -> float:
    """Seconds to copy the arrays within host memory."""
    arrays = [np.asarray(leaf) for leaf in state.values()]
    start = time.monotonic()
    for array in arrays:
        array.copy()
    return time.monotonic() - start


if __name__ == "__main__":
    main()
