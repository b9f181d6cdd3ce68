"""Parts of scripts/fullsize.sh: clips to cache for SFT, and its table.

    python scripts/bench/fullsize.py clips FOLDER 480x480    captioned clips in FOLDER/clips
    python scripts/bench/fullsize.py table FOLDER            its stages and steps, in fullsize.md

FOLDER/stages.txt has a line per stage: algorithm, stage, seconds, and the steps of the newest
checkpoint after it, if there is one. A stage's peak memory is what its own steps logged, of the
fullest device, or of the process on a CPU; what runs no step logs none.

T frames  H W pixels  C colour
"""

import pathlib
import re
import sys

import numpy as np
from report_table import table

from wanjax.data import video
from wanjax.run import metrics

SHOWN = (  # columns of the steps, of those that an algorithm logs
    r"time/(collect|update|checkpoint)|perf/(peak_\w+_gb|mfu)|reward/(mean|std)"
    r"|\w+/loss(/\w+)?|grad_norm/\w+"
)


def main() -> None:
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    if command == "clips":
        write_clips(folder / "clips", *map(int, sys.argv[3].split("x")))
        return
    text = report(folder)
    (folder / "fullsize.md").write_text(text, encoding="utf-8")
    print(text, end="", flush=True)


def write_clips(folder: pathlib.Path, height: int, width: int, count: int = 8) -> None:
    """Write clips of 5 frames, coloured squares that move right, each with a caption."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rows, columns = (-(-side // 16) for side in (height, width))
        colours = np.random.default_rng(number).integers(0, 256, (rows, columns, 3), np.uint8)
        still_HWC = colours.repeat(16, 0).repeat(16, 1)[:height, :width]
        frames_THWC = np.stack([np.roll(still_HWC, 4 * t, axis=1) for t in range(5)])
        video.write_mp4(folder / f"{number}.mp4", frames_THWC, 16)
        caption = f"squares moving right on the {('red', 'green', 'blue')[number % 3]}\n"
        (folder / f"{number}.txt").write_text(caption, encoding="utf-8")


def report(folder: pathlib.Path) -> str:
    """Markdown tables of the stages in FOLDER/stages.txt, and of each run's steps."""
    stages, runs, done = [], {}, 0
    for line in (folder / "stages.txt").read_text(encoding="utf-8").splitlines():
        name, stage, seconds, *saved = line.split()
        if name not in runs:
            runs[name], done = metrics.read(folder / "runs" / name), 0
        own, done = runs[name][done : int(saved[0])] if saved else [], int(saved[0]) if saved else 0
        peaks = [value for row in own for key, value in row.items() if "perf/peak_" in key]
        peak = f"{max(peaks) * 1e9 / 2**30:.1f}" if peaks else ""
        row = {"algorithm": name, "stage": stage, "seconds": seconds}
        stages.append(row | {"steps": len(own) or "", "peak GiB": peak})
    parts = ["\n".join(table(stages))]
    for name, rows in runs.items():
        keys = [key for key in dict.fromkeys(k for row in rows for k in row) if _shown(key)]
        cells = [{"step": row["step"], **{k: _cell(row.get(k)) for k in keys}} for row in rows]
        parts += [f"{name}, by step:", "\n".join(table(cells))] if cells else []
    return "\n\n".join(parts) + "\n"


def _shown(key: str) -> bool:
    return re.fullmatch(SHOWN, key) is not None


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
