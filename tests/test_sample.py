"""The sampling command: fixed seeds, adapters by file, errors in one line."""

import dataclasses

import imageio.v3 as iio
import jax
import numpy as np
import pytest

from convert.lora import adapter, write
from tests import tiny
from wanjax import sample, trees
from wanjax.models import lora


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def _command(model, out, *more):
    sizes = ["--height", "16", "--width", "16", "--frames", "5", "--steps", "3", "--seed", "1"]
    return ["--model", model, "--prompt", "red circle", "--out", str(out), *sizes, *more]


def test_adapters_from_files_change_the_video_and_strength_zero_does_not(model, tmp_path):
    sample.main(_command(model, tmp_path / "plain"))
    params = tiny.parameters()
    adapters = {
        expert: trees.map_paths(
            lambda path, x: x if path.endswith("scale") else x + 0.3,
            lora.init(jax.random.key(0), params[expert], rank=2, alpha=2.0),
        )
        for expert in ("high", "low")
    }
    files = [
        str(f) for f in write.write(adapter.of_trees(adapters), tmp_path / "lora", "diffusers")
    ]
    both = [flag for file in files for flag in ("--lora", file)]
    sample.main(_command(model, tmp_path / "both", *both))
    none = [flag for file in files for flag in ("--lora", f"{file}@0")]
    sample.main(_command(model, tmp_path / "none", *none))
    read = lambda name: (tmp_path / name / "000.mp4").read_bytes()
    assert read("plain") == read("none") != read("both")
    assert (tmp_path / "plain" / "000.txt").read_text() == "red circle\n"


def test_a_video_starts_from_its_image(tmp_path, monkeypatch):
    """--image of a random I2V model: the image decides the video, and each prompt may have one."""
    wan = dataclasses.replace(tiny.WAN, in_channels=12)
    model = tiny.save_model(tmp_path, dataclasses.replace(tiny.MODEL, name="i2v", wan=wan))
    for name, level in (("dark", 20), ("bright", 230)):
        iio.imwrite(tmp_path / f"{name}.png", np.full((40, 30, 3), level, np.uint8))
    image = lambda *names: [f for n in names for f in ("--image", str(tmp_path / f"{n}.png"))]
    prompts = ["--prompt", "red circle"]  # two in all
    sample.main(_command(model, tmp_path / "each", *prompts, *image("dark", "bright")))
    sample.main(_command(model, tmp_path / "one", *prompts, *image("dark")))
    read = lambda folder, n: (tmp_path / folder / f"{n:03d}.mp4").read_bytes()
    assert read("each", 0) == read("one", 0) and read("each", 1) != read("one", 1)
    for more, line in (([], "model i2v starts from an image"),
                       ([*prompts, *prompts, *image("dark", "dark")], "2 --image for 3 --prompt"),
                       (image("none"), "none.png is not readable as an image")):  # fmt: skip
        with pytest.raises(SystemExit, match=line):
            sample.main(_command(model, tmp_path / "out", *more))


@pytest.mark.parametrize("more, text", [
    (("--lora", "none.safetensors"), "none.safetensors"),
    (("--lora", "none.safetensors@much"), "strength 'much' is not a number"),
    (("--height", "20"), "height"),
    (("--image", "a.png"), "makes videos from text only; leave out --image"),
    (("--frames", "6"), "frames"),
    (("--vae_tile", "20"), "vae_tile is 20"),
    (("--batch", "0"), "--batch is 0"),
    (("--guidance_low", "nan"), "--guidance_low is nan"),
])  # fmt: skip
def test_wrong_arguments_end_with_one_line(model, tmp_path, more, text):
    with pytest.raises(SystemExit) as stop:
        sample.main(_command(model, tmp_path / "out", *more))
    assert str(stop.value).startswith("wanjax.sample: ") and text in str(stop.value)
    assert "\n" not in str(stop.value) and not (tmp_path / "out").exists()
