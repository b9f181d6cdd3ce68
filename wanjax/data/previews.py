"""The prompts that ship with the package, so that every run has videos of the same motions before
and after: "previews" in config.eval.prompts.

assets/previews/ has two sets of 16: text.txt, and for models that start from an image images.txt
with 00.jpg, 01.jpg, … in its order, drawn by scripts/make_previews.py.
"""

import pathlib

from wanjax.data import prompts

_FOLDER = pathlib.Path(__file__).parents[1] / "assets" / "previews"


def texts() -> tuple[str, ...]:
    """Prompts of a video from text alone; the first ones are the most different."""
    return prompts.load_prompts(_FOLDER / "text.txt")


def images() -> tuple[tuple[str, ...], tuple[pathlib.Path, ...]]:
    """(prompts of the motion to come, the file of the first frame of each)."""
    return prompts.load_prompts(_FOLDER / "images.txt"), tuple(sorted(_FOLDER.glob("*.jpg")))
