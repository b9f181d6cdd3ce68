"""OCR reward: does the video show the text that the prompt puts in quotes? (as in Flow-GRPO)

    score of a frame = 1 − min(distance, len(target)) / len(target),    in [0, 1]

distance: Levenshtein, between target and everything read in the frame, both in lower case and
without spaces. Frames are pooled by
    mean      over the chosen frames
    best      the highest
    positive  mean over the frames above zero, 0 if there is none: Flow-GRPO's rule for videos,
              which does not mind text that shows in only one frame

The reader is RapidOCR (PP-OCR models on onnxruntime, Latin and Chinese; the wheel has the models).
It also reads upside-down or half-formed letters, with low confidence: lines below `confidence`
count as not read. On the CPU a frame of 416x240 takes about half a core-second.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import rapidocr

from wanjax.rewards.frames import picker

POOLS = {
    "mean": np.mean,
    "best": np.max,
    "positive": lambda x_T: x_T[x_T > 0].mean() if (x_T > 0).any() else 0.0,
}


def ocr(frames: str = "4", pool: str = "mean", confidence: float = 0.9) -> Callable:
    """The OCR reward; frames as in rewards.frames.picker, confidence of a line in [0, 1]."""
    if pool not in POOLS:
        raise ValueError(f"pool is {pool!r}; expected one of {tuple(POOLS)}")
    pick = picker(frames)
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "critical",  # it warns about every frame without text
            "Global.use_cls": False,  # would turn upside-down lines the right way up
            "Global.text_score": confidence,
            "Det.limit_type": "max",  # frames are not enlarged
            "Det.limit_side_len": 960,
        }
    )

    def read(frame_HWC) -> str:
        found: Any = engine(np.ascontiguousarray(frame_HWC[..., ::-1]))  # it takes BGR
        return "".join(found.txts or ())

    def reward(video_BTHWC, prompts, meta):
        del meta
        video_BTHWC = video_BTHWC[:, pick(video_BTHWC.shape[1])]
        frames_BT = [
            [similarity(read(frame), text) for frame in frames]
            for frames, text in zip(video_BTHWC, map(target, prompts), strict=True)
        ]
        return np.array([POOLS[pool](np.array(row)) for row in frames_BT]), {}

    reward.check = target  # of a prompt, see rewards.combine
    return reward


def target(prompt: str) -> str:
    """The first text in double quotes, straight or curly."""
    quoted = re.split('["“”]', prompt)[1:-1:2]
    wanted = next((text for text in quoted if text.strip()), None)
    if wanted is None:
        raise ValueError(
            f"prompt {prompt!r} has no text in double quotes, which the ocr reward looks for; "
            'write the wanted text in quotes, as in: a shop sign that says "OPEN"'
        )
    return wanted


def similarity(found: str, wanted: str) -> float:
    """1 − normalised edit distance, at least 0; case and spaces do not count."""
    found, wanted = ("".join(text.lower().split()) for text in (found, wanted))
    return 1 - min(edit_distance(found, wanted), len(wanted)) / len(wanted)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and replacements of one character each."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y)))
    return row[-1]
