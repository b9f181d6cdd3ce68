"""Prompt files and the endless, seeded, random-access stream of prompts that rollouts draw from.

Each epoch is a fresh permutation of all prompts (grain's shuffle, a function of seed and position),
so the batch of a step is a function of (prompts, batch, seed, step). The cursor of a run is then
one integer, the step, whatever the number of hosts; the number of samples per prompt (the group
size) is up to the algorithm.
"""

import pathlib
import zlib
from dataclasses import dataclass

import grain
import numpy as np


def load_prompts(path) -> tuple[str, ...]:
    """Read a UTF-8 text file with one prompt per line; lines that start with # are comments.

    Blank lines are skipped with a notice. Raises ValueError for a file without any prompt.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(
            f"no prompts file at {path}; config.prompts and eval.prompts take text files"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise ValueError(f"{path} holds no prompt in its {len(lines)} lines; expected one per line")
    blank = [number for number, line in enumerate(lines, 1) if not line]
    if blank:
        listed = ", ".join(map(str, blank[:5])) + (", …" if len(blank) > 5 else "")
        print(f"prompts: skipped {len(blank)} blank lines of {path} (line {listed})", flush=True)
    return prompts


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
        order = grain.MapDataset.range(len(self.prompts)).seed(self.seed).shuffle().repeat()
        first = step * self.batch
        return np.array([order[i] for i in range(first, first + self.batch)], np.int64)

    def at(self, step: int) -> list[str]:
        """Return the prompts of a step."""
        return [self.prompts[i] for i in self.indices(step)]

    def state(self, step: int) -> dict[str, int]:
        """Return what a checkpoint must hold (JSON) to continue with `step` as the next step."""
        digest = zlib.crc32("\n".join(self.prompts).encode())
        return {"step": step, "batch": self.batch, "seed": self.seed, "prompts_crc32": digest}

    def resume(self, state: dict[str, int]) -> int:
        """Return the next step of a saved state; ValueError if it is of a different stream."""
        expected = self.state(state["step"])
        return next_step(state, expected, "prompts", "the prompts file and the prompts per step")


def next_step(state: dict, expected: dict, what: str, restore: str) -> int:
    """Return the step of a saved stream state; ValueError if it differs from the expected one."""
    changed = [key for key in expected if state.get(key) != expected[key]]
    if changed:
        listed = ", ".join(f"{key} {state.get(key)} -> {expected[key]}" for key in changed)
        raise ValueError(
            f"the {what} of this run have changed since its checkpoint ({listed}); restore "
            f"{restore}, or choose another run name"
        )
    return state["step"]
