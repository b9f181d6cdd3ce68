"""Damaged files: every command ends in 0 or in one line, whatever bytes it is given.

200 files by default; FUZZ=2000 python -m pytest tests/field/test_fuzz.py for more.
"""

import io
import json
import os
import random
import shutil
import subprocess
import warnings

import hypothesis
import imageio_ffmpeg
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from convert import save
from convert import weights as convert_weights
from convert.lora import __main__ as convert_lora
from tests.convert import published
from tests.convert import tiny as tiny_model
from wanjax.data import __main__ as data_command
from wanjax.data import prompts

COUNT = int(os.environ.get("FUZZ", 200))  # files in all, an equal share of each kind
FORMATS = {  # suffix: encoder
    ".mp4": "libx264", ".mkv": "ffv1", ".webm": "libvpx-vp9", ".mov": "prores_ks",
    ".avi": "mpeg4", ".ts": "mpeg2video", ".gif": "gif",
}  # fmt: skip
PROMPTS = {
    ".txt": "red\n# no\nblue\n",
    ".jsonl": '{"prompt": "red"}\n{"prompt": "blue", "seed": null}\n"green"\n',
    ".csv": 'prompt,seed\n"a red, round fox",\nblue,\n',
}
NUMBERS = (b"\xff" * 8, b"\0" * 8, b"\x7f" * 4, b"1e999", b"-1", b"NaN", b"\xef\xbb\xbf", b"\r\n")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{kind: [(suffix, bytes of a good file)]}."""
    folder = tmp_path_factory.mktemp("whole")
    media = []
    for suffix, codec in FORMATS.items():
        file = folder / f"a{suffix}"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-f", "lavfi"]
        command += ["-i", "testsrc2=size=32x32:rate=8", "-frames:v", "9", "-c:v", codec, file]
        subprocess.run(command, check=True)
        media.append((suffix, file.read_bytes()))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for suffix, kind in ((".png", "PNG"), (".jpg", "JPEG"), (".webp", "WEBP"), (".bmp", "BMP")):
        Image.fromarray(pixels).save(data := io.BytesIO(), kind)
        media.append((suffix, data.getvalue()))
    adapters = [(".safetensors", f.read_bytes()) for f in published.ADAPTERS.glob("*.safetensors")]
    config = tiny_model.dataclasses.replace(tiny_model.CONFIG, experts=("high",), boundary=None)
    save.save_diffusers(tiny_model.params(config), config, folder / "model")
    files = sorted((folder / "model/transformer").glob("*.safetensors"))
    return {
        "media": media,
        "adapter": sorted(adapters),
        "checkpoint": [(".safetensors", file.read_bytes()) for file in files],
        "prompts": [(suffix, text.encode()) for suffix, text in PROMPTS.items()],
    }


def damage(data: bytes, rng: random.Random) -> bytes:
    """One to three damages of random kinds."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        data = rng.choice([
            lambda data, at: data[:at],
            lambda data, at: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            lambda data, at: data[:at] + rng.choice(NUMBERS) + data[at:],
            lambda data, at: data[:at] + data[at + rng.randrange(64) :],
            lambda data, at: data[:at] + data[: rng.randrange(64)] + data[at:],
            lambda data, at: data[at:] + data[:at],
            lambda data, at: rng.randbytes(at % 999),
            lambda data, at: data + b"\0" * rng.randrange(9),
        ])(data, at)  # fmt: skip
    return data


def bring(kind: str, path) -> None:
    """Give a file to the command that reads its kind."""
    if kind == "media":
        path.with_suffix(".txt").write_text("red\n")
        data_command.main(["inspect", str(path.parent)])
    elif kind == "adapter":
        out = str(path.parent / "out")
        raise SystemExit(convert_lora.main([str(path), "--to", "diffusers", "--out", out]))
    elif kind == "checkpoint":
        out = str(path.parent / "out")
        raise SystemExit(convert_weights.main([str(path), "--to", "original", "--out", out]))
    else:
        try:
            prompts.load_prompts(path)
        except ValueError as error:  # the commands print it as it is
            raise SystemExit(f"wanjax.train: {error}") from None


def ends_well(kind: str, path, capsys) -> bool:
    """Whether the command took the file; fails unless it did or said why in one line."""
    code = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            bring(kind, path)
        except SystemExit as end:
            code = end.code
    said = capsys.readouterr()
    if code in (0, None):
        return "not used: " not in said.out
    lines = (code if isinstance(code, str) else said.err).strip().splitlines()
    assert len(lines) == 1 and ": " in lines[0], (kind, code, said.err)
    return False


@pytest.mark.parametrize("kind", ["media", "adapter", "checkpoint", "prompts"])
def test_damaged_files(kind, whole, tmp_path, capsys):
    rng, refused = random.Random(kind), 0
    for number in range(COUNT // 4):
        suffix, data = whole[kind][number % len(whole[kind])]
        if number % 10 == 9:  # the bytes of another kind under this name
            data = rng.choice(whole[rng.choice([*whole])])[1]
        folder = tmp_path / f"{kind}{number}"
        folder.mkdir()
        path = folder / f"x{suffix}"
        path.write_bytes(damage(data, rng))
        refused += not ends_well(kind, path, capsys)
        shutil.rmtree(folder)
    assert 0 < refused, "no damage was found"


@hypothesis.settings(
    max_examples=max(20, COUNT // 10), deadline=None, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
@hypothesis.given(data=st.binary(max_size=200), suffix=st.sampled_from(
    [*FORMATS, *PROMPTS, ".png", ".safetensors", ".gguf", ".pt", ".json"]
))  # fmt: skip
def test_any_bytes(data, suffix, tmp_path_factory, capsys):
    kinds = ["media"] if suffix in FORMATS or suffix == ".png" else ["prompts"]
    kinds = ["adapter", "checkpoint"] if suffix in (".safetensors", ".gguf", ".pt") else kinds
    folder = tmp_path_factory.mktemp("any")
    path = folder / f"x{suffix}"
    path.write_bytes(data)
    for kind in kinds:
        ends_well(kind, path, capsys)
    shutil.rmtree(folder)


def test_a_good_file_is_taken(whole, tmp_path, capsys):
    """What the others damage is good."""
    for kind, files in whole.items():
        if kind == "adapter":
            continue  # some are partial on purpose
        for suffix, data in files:
            folder = tmp_path / f"{kind}{suffix}"
            folder.mkdir()
            (folder / f"x{suffix}").write_bytes(data)
            assert ends_well(kind, folder / f"x{suffix}", capsys), (kind, suffix)
    assert json.loads((tmp_path / "prompts.jsonl/x.jsonl").read_text().splitlines()[0])
