"""Frames that rewards look at, by hand."""

import pytest

from wanjax.rewards import frames


def test_picker():
    picked = {name: frames.picker(name)(9) for name in ("all", "first", "1", "3", "4", "20")}
    assert picked == {
        "all": list(range(9)),
        "first": [0],
        "1": [4],
        "3": [0, 4, 8],
        "4": [0, 3, 5, 8],  # 8/3 and 16/3
        "20": list(range(9)),
    }
    assert frames.picker("5")(1) == [0]
    for wrong in ("0", "-1", "2.5", ""):
        with pytest.raises(ValueError, match="expected all, first or a number"):
            frames.picker(wrong)
