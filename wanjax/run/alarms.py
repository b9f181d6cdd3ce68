"""Alarms: signs in a run's metrics that training has collapsed.

Groups without reward spread give no gradient; frozen, burnt-out or black videos and velocities far
from the reference's are what reward hacking usually looks like. A limit is a metric's name, which
may be a shell pattern, with its allowed range; the alarm goes off once the metric has been out of
range for a number of recorded steps in a row. Limits of the first step hold before any update:
ratio 1, no distance to the reference or the old policy. Outside them the trainer does not compute
what the rollout did.
"""

import fnmatch
from collections.abc import Callable, Mapping

ACTIONS = ("off", "warn", "stop")
RUNG = -1  # in place of a count, until the metric is inside its limits again


class Collapsed(RuntimeError):
    """An alarm went off and the run must stop."""


def watch(limits: Mapping, patience: int, outside: dict[str, int] | None = None) -> Callable:
    """A function look(metrics of the next step) -> lines, one for each alarm that goes off now.

    outside: metric -> steps in a row that it has been outside its limits, or RUNG; updated in
    place, so that a run that continues counts on. Raises ValueError for limits that are not an
    ascending pair, or a patience below 1.
    """
    if patience < 1:
        raise ValueError(f"config.alarms.patience is {patience}; expected at least 1")
    for name, pair in limits.items():
        if len(pair) != 2 or not pair[0] <= pair[1]:
            raise ValueError(
                f"config.alarms has {name!r}: {tuple(pair)}; expected (lowest, highest)"
            )
    counts = {} if outside is None else outside

    def look(metrics: Mapping) -> list[str]:
        lines = []
        for pattern, (low, high) in limits.items():
            for name in fnmatch.filter(metrics, pattern):
                value = float(metrics[name])
                if low <= value <= high:
                    counts.pop(name, None)
                elif counts.get(name) != RUNG:
                    counts[name] = counts.get(name, 0) + 1
                if counts.get(name, 0) >= patience:
                    counts[name] = RUNG
                    since = f" for {patience} steps" if patience > 1 else ""
                    line = f"{name} is {value:.4g} and has been outside {low:g} to {high:g}{since}"
                    lines.append(f"{line} (config.alarms)")
        return lines

    return look
