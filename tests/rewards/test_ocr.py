"""The OCR reward on rendered text, read for real, and its distance against hand-computed values."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from wanjax import rewards
from wanjax.rewards import ocr

PROMPT = 'A green wall with "Hello World" on it'


def frame(text, angle=0):
    image = Image.new("RGB", (320, 128), (40, 90, 60))
    at = dict(anchor="mm", font=ImageFont.load_default(44))
    ImageDraw.Draw(image).text((160, 64), text, fill="white", **at)
    return np.asarray(image.rotate(angle))


def video(*frames):
    return np.stack(frames)[None]


@pytest.fixture(scope="module")
def reward():
    return rewards.find("ocr?frames=all")


def test_right_text_scores_above_wrong_above_upside_down_and_none(reward):
    clips = [frame("Hello World"), frame("Hello Word"), frame("Goodbye"), frame("")]
    clips += [frame("Hello World", 180)]
    scores, info = reward(np.stack(clips)[:, None], [PROMPT] * 5, None)
    right, near, wrong, none, upside_down = scores
    assert info == {} and right == 1
    assert near == pytest.approx(0.9)  # one of ten letters is missing
    assert none == 0 and upside_down == 0
    assert near > 0.5 > wrong


def test_pools_over_frames(reward):
    clip = video(frame("Hello World"), frame(""), frame("Hello"))  # 1, 0, 1/2
    assert reward(clip, [PROMPT], None)[0] == pytest.approx([0.5])
    # One engine is enough for the three.
    for pool, want in (("mean", 0.5), ("best", 1.0), ("positive", 0.75)):
        assert ocr.POOLS[pool](np.array([1.0, 0.0, 0.5])) == want
    assert ocr.POOLS["positive"](np.zeros(3)) == 0
    with pytest.raises(ValueError, match="pool is 'max'; expected one of"):
        rewards.find("ocr?pool=max")


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distance(a, b, distance):
    assert ocr.edit_distance(a, b) == ocr.edit_distance(b, a) == distance


def test_similarity_ignores_case_and_spaces_and_ends_at_zero():
    assert ocr.similarity("hELLO  wor ld", "Hello World") == 1
    assert ocr.similarity("Hallo World", "Hello World") == pytest.approx(0.9)
    assert ocr.similarity("something else altogether", "Hi") == 0
    assert ocr.similarity("", "Hi") == 0


def test_target_is_the_first_text_in_double_quotes():
    assert ocr.target('it\'s "OPEN", not "CLOSED"') == "OPEN"
    assert ocr.target("says “Good day”") == "Good day"
    for prompt in ("a sign that says OPEN", 'a sign that says ""', 'a 15" screen'):
        with pytest.raises(ValueError, match="no text in double quotes"):
            ocr.target(prompt)


def test_a_prompt_without_quotes_is_refused_before_there_is_a_video():
    reward = rewards.combine(["ocr"])
    reward.check([PROMPT])
    with pytest.raises(ValueError, match="reward ocr: prompt 'a green wall' has no text in double"):
        reward.check([PROMPT, "a green wall"])
