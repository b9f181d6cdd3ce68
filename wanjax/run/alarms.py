"""Alarms: signs in a run's metrics that training has collapsed.

Groups without reward spread give no gradient; still, burnt-out or black videos and velocities far
from the reference's are how reward hacking usually looks. A limit is a metric's name, which may be
a shell pattern, with the lowest and highest value that is all right; it rings once the metric has
been outside for a number of recorded steps in a row. Limits of the first step hold before anything
has moved: ratio 1, no distance to the reference or the old policy. Outside them the trainer does
not compute what the rollout did.
"""

import collections
import fnmatch
from collections.abc import Callable, Mapping

ACTIONS = ("off", "warn", "stop")


class Collapsed(RuntimeError):
    """An alarm rang and the run is to stop."""


def watch(limits: Mapping, patience: int) -> Callable:
    """A function look(metrics of the next step) -> lines, one for each alarm that rings now.

    Raises ValueError for limits that are no pair of rising numbers, or a patience below 1.
    """
    if patience < 1:
        raise ValueError(f"config.alarms.patience is {patience}; expected at least 1")
    for name, pair in limits.items():
        if len(pair) != 2 or not pair[0] <= pair[1]:
            raise ValueError(
                f"config.alarms has {name!r}: {tuple(pair)}; expected (lowest, highest)"
            )
    outside: dict[str, int] = collections.Counter()

    def look(metrics: Mapping) -> list[str]:
        lines = []
        for pattern, (low, high) in limits.items():
            for name in fnmatch.filter(metrics, pattern):
                value = float(metrics[name])
                outside[name] = 0 if low <= value <= high else outside[name] + 1
                if outside[name] == patience:
                    since = f" for {patience} steps" if patience > 1 else ""
                    lines.append(
                        f"{name} is {value:.4g} and has been outside {low:g} to {high:g}{since} "
                        f"(config.alarms)"
                    )
        return lines

    return look
