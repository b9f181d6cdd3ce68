"""Prompt files and the endless, seeded, random-access stream of prompts that rollouts draw from.

Each epoch is a fresh permutation of all prompts (grain's shuffle, a function of seed and position),
so the batch of a step is a function of (prompts, batch, seed, step). The cursor of a run is then
one integer, the step, whatever the number of hosts; the number of samples per prompt (the group
size) is up to the algorithm.
"""

import csv
import io
import json
import re
import zlib
from dataclasses import dataclass

import grain
import numpy as np

from wanjax import paths

_INSTEAD = {  # fields of other projects' files: what does the same here
    "negative": "config.negative_prompt is that of all prompts",
    "negative_prompt": "config.negative_prompt is that of all prompts",
    "seed": "config.seed and config.eval.seed are those of all prompts",
    "image": "first frames come with config.eval.prompts='previews', or from clips",
    "meta": "a reward gets the prompts alone",
}
_OPTIONS = {"n": "negative", "d": "seed", "s": "", "w": "", "h": "", "f": "", "g": "", "l": ""}
_OPTIONS |= {"i": "image", "negative": "negative", "seed": "seed", "image": "image", "fs": ""}


def load_prompts(path) -> tuple[str, ...]:
    """Read a UTF-8 text file with one prompt per line (lines that start with # are comments), the
    `prompt` of every object of a .jsonl file, or that column of a .csv file.

    path: as `paths.resolve` takes it. Blank lines are skipped with a notice. Raises ValueError for
    a file without any prompt, and naming the line for fields and options that a prompt can't have.
    """
    path = paths.resolve(path)
    if not path.is_file():
        raise ValueError(
            f"no prompts file at {path}; config.prompts and eval.prompts take text files"
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if path.suffix.lower() == ".csv":
        prompts, lines = _of_csv(text, path), lines and ["-"]
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        rows = ((n, line) for n, line in enumerate(lines, 1) if line)
        prompts = tuple(_of_json(line, f"{path}, line {n}") for n, line in rows)
    else:
        prompts = tuple(line for line in lines if line and not line.startswith("#"))
        _check_options(lines, path)
    if not prompts:
        raise ValueError(f"{path} holds no prompt in its {len(lines)} lines; expected one per line")
    blank = [number for number, line in enumerate(lines, 1) if not line]
    if blank:
        listed = ", ".join(map(str, blank[:5])) + (", …" if len(blank) > 5 else "")
        print(f"prompts: skipped {len(blank)} blank lines of {path} (line {listed})", flush=True)
    return prompts


def _of_json(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({paths.one_line(error)})") from None
    return _prompt(row if isinstance(row, dict) else {"prompt": row}, where)


def _of_csv(text: str, path) -> tuple[str, ...]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        return tuple(_prompt(row, f"{path}, line {reader.line_num}") for row in reader)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _prompt(row: dict, where: str) -> str:
    """The prompt of a row that has nothing else."""
    more = [name for name, value in row.items() if name != "prompt" and value not in (None, "")]
    if more:
        known = f"; {_INSTEAD[more[0]]}" if more[0] in _INSTEAD else ""
        raise ValueError(f"{where}: field {more[0]!r} is not one that a prompt has here{known}")
    text = row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: prompt is {text!r}; expected a text in the field prompt")
    return " ".join(text.split())


def _check_options(lines: list[str], path) -> None:
    """Refuse options behind a prompt, as other trainers have them: they would be read as words."""
    for number, line in enumerate(lines, 1):
        found = re.search(r"\s--([a-z]{1,12})\s+\S", line)
        if found and not line.startswith("#") and found[1] in _OPTIONS:
            name = _OPTIONS[found[1]]
            raise ValueError(
                f"{path}, line {number}: option {found[0].split()[0]} would be read as words of "
                f"the prompt; {_INSTEAD.get(name, 'leave it out')}"
            )


@dataclass(frozen=True)
class PromptStream:
    """An endless shuffled stream, `batch` prompts per step; equal fields give equal batches."""

    prompts: tuple[str, ...]
    batch: int
    seed: int

    def __post_init__(self):
        if self.batch < 1 or not self.prompts:
            raise ValueError(
                f"a prompt stream needs prompts and a batch of at least 1, got {len(self.prompts)} "
                f"prompts and batch {self.batch}; set config.prompts and the prompts per step"
            )

    def indices(self, step: int) -> np.ndarray:
        """Return the [batch] indices into `prompts` of a step."""
        return self._order(step * self.batch, (step + 1) * self.batch)

    def _order(self, first: int, stop: int) -> np.ndarray:
        order = grain.MapDataset.range(len(self.prompts)).seed(self.seed).shuffle().repeat()
        return np.array([order[i] for i in range(first, stop)], np.int64)

    def at(self, step: int) -> list[str]:
        """Return the prompts of a step."""
        return [self.prompts[i] for i in self.indices(step)]

    def within(self, steps: int) -> list[str]:
        """The different prompts of the first steps of a run."""
        if steps * self.batch >= len(self.prompts):
            return list(dict.fromkeys(self.prompts))
        return list(dict.fromkeys(self.prompts[i] for i in self._order(0, steps * self.batch)))

    def state(self, step: int) -> dict[str, int]:
        """Return what a checkpoint must hold (JSON) to continue with `step` as the next step."""
        digest = zlib.crc32("\n".join(self.prompts).encode())
        return {"step": step, "batch": self.batch, "seed": self.seed, "prompts_crc32": digest}

    def resume(self, state: dict[str, int], allow: bool = False) -> int:
        """Return the next step of a saved state; ValueError if it is of a different stream, unless
        `allow`."""
        restore = "the prompts file and the prompts per step"
        return next_step(state, self.state(state["step"]), "prompts", restore, allow)


def next_step(state: dict, expected: dict, what: str, restore: str, allow: bool) -> int:
    """Return the step of a saved stream state; ValueError if it differs from the expected one,
    unless `allow`."""
    changed = differences(state, expected)
    if changed and not allow:
        listed = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
        raise ValueError(
            f"the {what} of this run have changed since its checkpoint ({listed}); restore "
            f"{restore}, choose another config.name, or let the result change from here on with "
            "--config.allow_changes=True"
        )
    return state["step"]


def differences(state: dict, expected: dict) -> dict[str, tuple]:
    """{key: (saved, expected)} of what differs between two stream states."""
    pairs = {key: (state.get(key), value) for key, value in expected.items()}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}
