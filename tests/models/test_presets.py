"""Published sampling defaults by variant: shift, boundary, guidance by name, prompts, sizes."""

import json
import pathlib

import pytest

from wanjax.models import presets

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan" / "negative_prompts.json"


def test_negative_prompts_are_the_published_ones():
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    by_key = {key.split(" (")[0]: text for key, text in golden.items()}
    assert presets.NEGATIVE == by_key["default"]
    assert presets.NEGATIVE_I2V_21 == by_key["wan2.1 I2V"]
    assert presets.NEGATIVE_FLF2V == by_key["wan2.1 FLF2V"]


@pytest.mark.parametrize("name, shift, boundary, high, low, steps, frames, fps", [
    ("wan2.1_t2v_1.3b", 5.0, None, 5.0, 5.0, 50, 81, 16),
    ("wan2.1_t2v_14b", 5.0, None, 5.0, 5.0, 50, 81, 16),
    ("wan2.1_i2v_14b", 3.0, None, 5.0, 5.0, 40, 81, 16),
    ("wan2.1_flf2v_14b", 16.0, None, 5.0, 5.0, 50, 81, 16),
    ("wan2.2_t2v_a14b", 12.0, 0.875, 4.0, 3.0, 40, 81, 16),
    ("wan2.2_i2v_a14b", 5.0, 0.9, 3.5, 3.5, 40, 81, 16),
    ("wan2.2_ti2v_5b", 5.0, None, 5.0, 5.0, 50, 121, 24),
])  # fmt: skip
def test_sampling_defaults(name, shift, boundary, high, low, steps, frames, fps):
    model = presets.MODELS[name]
    s = model.sampling
    assert (s.shift, model.boundary, s.steps, s.frames, s.fps) == (
        shift,
        boundary,
        steps,
        frames,
        fps,
    )
    assert (s.guidance.high, s.guidance.low) == (high, low)
    assert model.experts == (("high", "low") if boundary else ("high",))
    assert (s.frames - 1) % model.vae.scale_factor_temporal == 0
    side = model.vae.scale_factor_spatial * model.wan.patch_size[1]
    assert s.height % side == 0 and s.width % side == 0
    assert model.wan.out_channels == model.vae.z_dim
