"""Which frames of a video a reward looks at."""

from collections.abc import Callable


def picker(frames: str) -> Callable[[int], list[int]]:
    """Return pick(total) -> frame indices for "all", "first" or a number of evenly spaced frames.

    A number counts from the first frame to the last; 1 is the middle frame.
    """
    if frames == "all":
        return lambda total: list(range(total))
    if frames == "first":
        return lambda total: [0]
    if not frames.isdecimal() or int(frames) == 0:
        raise ValueError(f"frames is {frames!r}; expected all, first or a number from 1")
    count = int(frames)
    if count == 1:
        return lambda total: [total // 2]
    return lambda total: sorted({round(i * (total - 1) / (count - 1)) for i in range(count)})
