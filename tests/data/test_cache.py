"""Caching clips: what is used, what is not and why, the arrays, continuing after an interrupt."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import diffusers
import imageio.v3 as iio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch

from convert import digest, load, weights
from tests import tiny
from wanjax import setup as setups
from wanjax.data import __main__ as command
from wanjax.data import cache, cut, latents, text, video
from wanjax.models import umt5, vae

SETTINGS = cut.Settings(frames=(1, 5), sizes=((16, 16), (24, 32)), stills=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """(parameters, ModelConfig, path) as cache.build takes them."""
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    return *setups.load_model(path, components=cache.ENCODERS), path


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Good clips and one file of every kind that cannot be used."""
    folder = tiny.write_clips(tmp_path_factory.mktemp("clips"))
    copy = lambda source, name: shutil.copy(folder / source, folder / name)
    iio.imwrite(folder / "image.png", np.full((40, 60, 3), 90, np.uint8))
    iio.imwrite(folder / "small.png", np.zeros((8, 8, 3), np.uint8))
    for name in ("image", "small", "cut", "latin", "empty", "copy"):
        (folder / f"{name}.txt").write_text("red circle\n")
    (folder / "cut.mp4").write_bytes((folder / "five.mp4").read_bytes()[:-900])
    copy("one.mp4", "no_caption.mp4")
    copy("one.mp4", "latin.mp4")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    copy("one.mp4", "empty.mp4")
    (folder / "empty.txt").write_text(" \n")
    copy("one.mp4", "copy.mp4")
    return folder


@pytest.fixture(scope="module")
def built(clips, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("cache") / "cache"
    return out, cache.build(clips, out, SETTINGS, *model)


def _files(out):
    return {path.name: path.read_bytes() for path in sorted((out / "clips").iterdir())}


def test_each_file_is_used_at_its_bucket_or_named_with_the_reason(built):
    out, outcomes = built
    found = {o.file: o.bucket or o.reason for o in outcomes}
    buckets = {
        "one.mp4": "1x24x32", "two.mp4": "1x24x32", "five.mp4": "5x24x32",
        "more/half.mkv": "5x24x32", "more/three.mp4": "5x24x32", "more/whole.mkv": "5x24x32",
        "image.png": "1x24x32",
    }  # fmt: skip
    # copies of one.mp4 with the same caption: the first in order is used
    assert found.pop("copy.mp4") == buckets["one.mp4"]
    assert found.pop("one.mp4") == "the same file and caption as another"
    reasons = {
        "no_caption.mp4": "no caption", "latin.mp4": "not UTF-8", "empty.mp4": "empty caption",
        "small.png": "8x8 would have to be enlarged to 16x16 (--size)",
        "cut.mp4": "not readable as a video",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert reason in found.pop(name), name
    assert found == {name: b for name, b in buckets.items() if name != "one.mp4"}
    assert len(_files(out)) == 7
    table = cache.table(outcomes)
    assert "5x24x32                     4" in table and "(latin.mp4)" in table
    report = json.loads((out / "report.json").read_text())
    assert [cache.Outcome(**row) for row in report] == outcomes


def test_arrays_are_those_of_the_models_own_encoders(built, clips, model):
    out, outcomes = built
    params, config, _ = model
    outcome = next(o for o in outcomes if o.file == "more/half.mkv")
    arrays = safetensors.numpy.load_file(out / "clips" / f"{outcome.key}.safetensors")
    frames = np.stack(list(video.read_frames(clips / outcome.file, 5)))
    x_BTHWC = jnp.asarray(frames, jnp.float32)[None] / 127.5 - 1
    want = jax.jit(functools.partial(vae.encode, config=config.vae))(params["vae"], x_BTHWC)[0]
    np.testing.assert_allclose(arrays["latents"], want, atol=1e-5)
    ids, mask = text.tokenize(text.load_tokenizer(config.tokenizer), ["red circle"])
    want = umt5.encode(params["text_encoder"], ids, mask, config=config.text)[0]
    np.testing.assert_allclose(arrays["text"], want[mask[0] == 1], atol=1e-5)
    known = cache.header(out / "clips" / f"{outcome.key}.safetensors")
    assert (known["caption"], known["fps"], known["bucket"]) == ("red circle", 24, "5x24x32")


I2V = dataclasses.replace(
    tiny.MODEL, wan=dataclasses.replace(tiny.WAN, in_channels=12),
    vae=dataclasses.replace(tiny.VAE, latents_mean=(1.0, 2.0, 3.0, 4.0), latents_std=(0.5,) * 4),
)  # fmt: skip
TI2V = dataclasses.replace(
    tiny.MODEL, experts=("high",), boundary=None,
    wan=dataclasses.replace(tiny.WAN, in_channels=48, out_channels=48),
    vae=dataclasses.replace(
        tiny.VAE, z_dim=48, is_residual=True, latents_mean=(0.3,) * 48, latents_std=(1.5,) * 48
    ),
)  # fmt: skip


@pytest.mark.parametrize("model", [I2V, TI2V], ids=["i2v", "ti2v"])
def test_the_first_frame_that_the_trainer_gets_is_diffusers_encoding_of_it(clips, tmp_path, model):
    source, out = tmp_path / "clips", tmp_path / "cache"
    source.mkdir()
    for name in ("five.mp4", "five.txt", "one.mp4", "one.txt"):
        shutil.copy(clips / name, source)
    path = tiny.save_model(tmp_path, model)
    frames = ["--frames", "5"] + ["--frames", "1"] * (model is TI2V)
    flags = ["--model", path, "--out", str(out), "--fps", "keep", "--size", "24x32", *frames]
    command.main(["cache", str(source), *flags])

    x_BTHWC = np.zeros((1, 5 if model is I2V else 1, 24, 32, 3), np.float32)  # 0 is grey
    x_BTHWC[0, 0] = next(video.read_frames(clips / "five.mp4", 1)) / 127.5 - 1
    coder = diffusers.AutoencoderKLWan.from_pretrained(f"{path}/vae")
    with torch.no_grad():
        z = coder.encode(torch.from_numpy(np.moveaxis(x_BTHWC, -1, 1))).latent_dist.mode().numpy()
    want = (np.moveaxis(z, 1, -1) - model.vae.latents_mean) / model.vae.latents_std

    own = dict(data__path=str(out), data__batch=1, data__holdout=0.0, eval__prompts="")
    config = tiny.make_config(path, tmp_path, **own, data__first_frame=model is TI2V)
    stream = setups.clip_stream(config, latents.read(out), weights.model_config(path))
    latents.check_encoders(stream.source, path)
    items = {item.x0_PTHWC.shape[1]: item for item in map(stream.at, range(len(stream.clips)))}
    found = {name: np.asarray(array) for name, array in items[2].cond.items()}
    if model is I2V:
        (file,) = (out / "clips").iterdir()  # one frame is no clip for such a model
        np.testing.assert_allclose(safetensors.numpy.load_file(file)["first"], want[0], atol=1e-5)
        mask, first = np.split(found.pop("latents"), [4], axis=-1)
        assert (mask[:, 0] == 1).all() and not mask[:, 1:].any()
        np.testing.assert_allclose(first, want, atol=1e-5)
    else:
        np.testing.assert_allclose(found.pop("first"), want, atol=1e-5)
        assert items[1].cond is None  # an image is all first frame
    assert not found


def test_retiming_drops_clips_that_are_too_slow_and_shortens_the_others(clips):
    settings = dataclasses.replace(SETTINGS, fps=16.0)
    made = cut.cut(clips / "five.mp4", settings, keep=True)  # 0.2 s are 3 frames at 16
    assert made.shape == (1, 24, 32) and made.frames.shape == (1, 24, 32, 3) and made.fps == 16
    with pytest.raises(ValueError, match="16 frames a second would be repeated to give 24"):
        cut.cut(clips / "two.mp4", dataclasses.replace(SETTINGS, fps=24.0), keep=True)
    with pytest.raises(ValueError, match="2 frames, shorter than --frames 5"):
        cut.cut(clips / "two.mp4", dataclasses.replace(SETTINGS, frames=(5,)), keep=True)
    with pytest.raises(ValueError, match="nothing to learn for an image-to-video model"):
        cut.cut(clips / "two.mp4", dataclasses.replace(SETTINGS, image_to_video=True), keep=True)


@pytest.mark.parametrize("source, want", [
    ((480, 832), (480, 832)), ((1080, 1920), (480, 832)), ((1920, 1080), (832, 480)),
    ((700, 700), (624, 624)), ((624, 640), (624, 624)), ((480, 500), None),
])  # fmt: skip
def test_the_size_nearest_in_shape_is_taken_and_nothing_is_enlarged(source, want):
    sizes = ((480, 832), (832, 480), (624, 624))
    if want:
        assert cut._size(source, sizes) == want
    else:
        with pytest.raises(ValueError, match="would have to be enlarged to 624x624"):
            cut._size(source, sizes)


def test_an_interrupted_cache_loses_one_clip_and_ends_equal(
    built, clips, model, tmp_path, monkeypatch
):
    whole, _ = built
    original, calls = cache._store, []

    def store(*args):
        calls.append(args[3].file)
        if len(calls) == 4:
            (tmp_path / "c" / "clips" / ".part.tmp").write_bytes(b"half a clip")
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(cache, "_store", store)
    with pytest.raises(KeyboardInterrupt):
        cache.build(clips, tmp_path / "c", SETTINGS, *model)
    assert len(_files(tmp_path / "c")) == 4  # three clips and the part
    cache.build(clips, tmp_path / "c", SETTINGS, *model)
    assert len(calls) == 4 + 4  # the clip that was lost, and the three that were not begun
    assert _files(tmp_path / "c") == _files(whole)


def test_a_changed_caption_replaces_its_clip_and_others_stay(built, clips, model, tmp_path):
    source, out = tmp_path / "clips", tmp_path / "cache"
    source.mkdir()
    for name in ("one", "two"):
        for end in ("mp4", "txt"):
            shutil.copy(clips / f"{name}.{end}", source)
    before = [o.key for o in cache.build(source, out, SETTINGS, *model)]
    (source / "two.txt").write_text("red circle\n")
    after = [o.key for o in cache.build(source, out, SETTINGS, *model)]
    assert after[0] == before[0] and after[1] != before[1]
    assert set(_files(out)) == {f"{key}.safetensors" for key in after}


def test_another_cache_or_folder_is_not_overwritten(built, clips, model, tmp_path):
    out, _ = built
    other = dataclasses.replace(SETTINGS, fps=16.0)
    with pytest.raises(ValueError, match=r"other settings \(fps None -> 16.0\); choose another"):
        cache.build(clips, out, other, *model)
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no cache"):
        cache.build(clips, tmp_path, SETTINGS, *model)
    old = {"format": 1, "model": "tiny", "identity": {}}
    (tmp_path / "old").mkdir()
    (tmp_path / "old/cache.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="is a cache of format 1, this version reads 3; run"):
        cache.build(clips, tmp_path / "old", SETTINGS, *model)
    assert json.loads((tmp_path / "old/cache.json").read_text()) == old


@pytest.mark.parametrize("changes, text", [
    (dict(frames=(1, 6)), "--frames 6: expected 4·n \\+ 1"),
    (dict(sizes=((16, 20),)), "--size 16x20: expected multiples of 8x8"),
])  # fmt: skip
def test_impossible_settings_are_refused_first(clips, model, tmp_path, changes, text):
    with pytest.raises(ValueError, match=text):
        cache.build(clips, tmp_path / "c", dataclasses.replace(SETTINGS, **changes), *model)
    assert not (tmp_path / "c").exists()


def test_another_bit_of_an_encoder_is_another_cache(built, clips, model, tmp_path):
    out, _ = built
    params, config, path = model
    identity = json.loads((out / "cache.json").read_text())["identity"]
    assert identity["vae"] == digest.component(path, "vae") != identity["text_encoder"]
    other = shutil.copytree(path, tmp_path / "other")
    (file,) = (other / "vae").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="holds a cache of other settings \\(vae [0-9a-f]{16} -> "):
        cache.build(clips, out, SETTINGS, params, config, other)


def test_the_command_loads_no_experts_and_is_refused_before_weights(
    clips, model, tmp_path, monkeypatch
):
    path, loaded, original = model[2], [], load.place
    monkeypatch.setattr(load, "place", lambda *a, **k: loaded.append(a[2]) or original(*a, **k))
    source = tmp_path / "clips"
    source.mkdir()
    for name in ("one.mp4", "one.txt"):
        shutil.copy(clips / name, source)
    flags = ["cache", str(source), "--model", path, "--out", str(tmp_path / "out"), "--fps", "keep"]
    with pytest.raises(SystemExit):
        command.main([*flags, "--size", "16x20"])
    assert loaded == []
    command.main([*flags, "--size", "16x16", "--frames", "1"])
    assert loaded == ["vae", "text_encoder"]


def test_inspect_tells_what_a_folder_and_a_cache_hold(built, clips, capsys):
    command.main(["inspect", str(clips)])
    text = capsys.readouterr().out
    assert "more/whole.mkv  24x32 ffv1 24 fps  81 frames  as 81x24x32  'red'" in text
    assert "no_caption.mp4  not used: no caption" in text
    assert "judged by frames: any (--frames)" in text
    command.main(["inspect", str(built[0])])
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["2,3,4,4", "4", "2-3"] in rows and ["1,3,4,4", "3", "2-3"] in rows, text
    assert "7 clips, 3 different captions" in text
    assert "empty caption: 1 (empty.mp4)" in text and "vae " in text


@pytest.mark.parametrize("more, text", [
    (["cache", ".", "--model", "m", "--out", "o", "--fps", "fast"], "--fps fast"),
    (["cache", ".", "--model", "m", "--out", "o", "--fps", "16", "--size", "16"], "--size 16"),
    (["cache", "none", "--model", "m", "--out", "o", "--fps", "16"], "no folder at none"),
    (["inspect", "none"], "no folder at none"),
])  # fmt: skip
def test_wrong_arguments_end_with_one_line(more, text, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(more)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("wanjax.data: ") and text in line


# ------------------------------------------------------------------------------ processes


PROCESS = """
import os, signal, sys
from wanjax.data import __main__ as command, cache
original, limit = cache._store, int(sys.argv[1])
def store(*args):
    global limit
    if limit == 0:
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    limit -= 1
    outcome = original(*args)
    print("stored", outcome.file, flush=True)
    return outcome
cache._store = store
command.main(sys.argv[2:])
"""


def _processes(count, flags, limits):
    """Run the command as processes that are killed before they store more than their limits;
    (exit codes, outputs)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = (flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
    env |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    place = ["--coordinator", f"127.0.0.1:{port}", "--num_processes", str(count)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(limits[i]), *flags, *place, "--process_id", str(i)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], outputs


@pytest.mark.slow
def test_two_processes_share_the_files_and_end_as_one_does(built, clips, model, tmp_path):
    """Also when they are killed on the way, and with equal files in different hands."""
    (whole, outcomes), out = built, tmp_path / "cache"
    source = shutil.copytree(clips, tmp_path / "clips")
    for end in ("mp4", "txt"):
        shutil.copy(source / f"two.{end}", source / f"two_again.{end}")
    again = cache.Outcome("two_again.mp4", reason="the same file and caption as another")
    outcomes = [*outcomes, again]
    flags = ["cache", str(source), "--model", model[2], "--out", str(out), "--fps", "keep"]
    flags += ["--frames", "1", "--frames", "5", "--size", "16x16", "--size", "24x32"]
    codes, outputs = _processes(2, flags, [2, 1])
    assert -signal.SIGKILL in codes and 0 not in codes, outputs
    before = set(_files(out))
    assert before and not (out / "report.json").exists()

    codes, outputs = _processes(2, flags, [99, 99])
    assert codes == [0, 0], "\n".join(outputs)
    stored = [[x.split()[1] for x in o.splitlines() if x.startswith("stored")] for o in outputs]
    names = [outcome.file for outcome in outcomes]
    for index, files in enumerate(stored):  # every second file is of one process
        assert files and all(names.index(name) % 2 == index for name in files)
    report = json.loads((out / "report.json").read_text())
    assert [cache.Outcome(**row) for row in report] == outcomes
    assert set(_files(out)) == set(_files(whole)) and len(before) < len(_files(out))
    for name in _files(whole):
        got, want = (safetensors.numpy.load_file(at / "clips" / name) for at in (out, whole))
        for key, array in want.items():
            np.testing.assert_allclose(got[key], array, atol=1e-5)
    assert {path.name for path in out.iterdir()} == {"cache.json", "clips", "report.json"}
    assert "24x32" in outputs[0] and "not used, and why" not in outputs[1]
    assert "of 2 on" in outputs[1]


@pytest.mark.slow
def test_a_fault_of_one_process_ends_all_of_them(clips, model, tmp_path):
    (tmp_path / "clips").mkdir()
    flags = ["cache", str(tmp_path / "clips"), "--model", model[2], "--out", str(tmp_path / "c")]
    codes, outputs = _processes(2, [*flags, "--fps", "keep"], [0, 0])
    assert 0 not in codes and any("holds no video or image" in text for text in outputs)
