"""The shipped prompts and first frames: different, short enough, and those of the script."""

import re

import numpy as np
import pytest

from scripts import make_previews
from wanjax.data import previews, video


def test_both_sets_are_sixteen_different_prompts_without_repeated_openings():
    texts, (of_images, files) = previews.texts(), previews.images()
    for prompts in (texts, of_images):
        assert len({" ".join(prompt.split()[:3]).lower() for prompt in prompts}) == 16
        for prompt in prompts:  # a sentence or two, below the 128 rows of the negative prompt
            assert 12 <= len(re.findall(r"\w+", prompt)) <= 45 and prompt.endswith(".")
    assert not set(texts) & set(of_images)
    assert [file.name for file in files] == [f"{i:02d}.jpg" for i in range(16)]
    assert any('"' in prompt for prompt in texts)  # text on a sign


def test_images_are_small_different_and_of_the_models_size():
    files = previews.images()[1]
    assert sum(file.stat().st_size for file in files) < 400_000
    frames = np.stack([video.read_image(file) for file in files])
    assert frames.shape == (16, 480, 832, 3)
    small = frames[:, ::8, ::8].astype(float)
    apart = np.abs(small[:, None] - small).mean((2, 3, 4)) + 255 * np.eye(16)
    assert apart.min() > 10 and small.std((1, 2, 3)).min() > 10


@pytest.mark.parametrize("number", (0, 7))
def test_images_and_their_prompts_come_from_the_script(number):
    prompts, files = previews.images()
    scene = make_previews.SCENES[number]
    assert [" ".join(scene.__doc__.split()) for scene in make_previews.SCENES] == list(prompts)
    drawn = np.asarray(make_previews.render(scene)).astype(float)
    assert np.abs(drawn - video.read_image(files[number])).mean() < 2  # JPEG's loss
