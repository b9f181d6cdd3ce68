"""Caches: what becomes of a folder of clips, and of a cache when something changes."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import imageio_ffmpeg
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from tests import tiny
from tests.field.table import Case, cases
from wanjax import setup as setups
from wanjax.data import __main__ as command
from wanjax.data import cache, cut, latents, media


def clip(path, frames=5, *encoder, size="32x24", rate=8, caption: str | None = "red"):
    """A small video, lossless unless an encoder is given, with its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = ("-f", "lavfi", "-i", f"testsrc2=s={size}:r={rate}", "-frames:v", str(frames))
    start = (imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error")
    subprocess.run([*start, *source, *(encoder or ("-c:v", "ffv1")), str(path)], check=True)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def still(path, mode="RGB", size=(32, 24), caption="red", **options):
    Image.new(mode, size).save(path, **options)
    path.with_suffix(".txt").write_text(caption)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(parameters, ModelConfig, path) as cache.build takes them."""
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    return *setups.load_model(path, components=cache.ENCODERS), path


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    for frames in (1, 4, 16, 80, 200):
        clip(folder / f"{frames}.mkv", frames)
    return still(folder / "image.png").parent


LONG = dataclasses.replace(tiny.MODEL.sampling, frames=81, height=24, width=32)
LONG = dataclasses.replace(tiny.MODEL, sampling=LONG)


@cases(
    Case("an 80-frame clip for an 81-frame model", "the 77 that fit", "", ("80.mkv", (), 77)),
    Case("a longer clip for an 81-frame model", "its first 81", "", ("200.mkv", (), 81)),
    Case("a 16-frame clip for an 81-frame model", "the 13 that fit", "", ("16.mkv", (), 13)),
    Case("an image beside clips", "a still", "", ("image.png", (), 1)),
    Case("a 4-frame clip", "named, no still", "4 frames, shorter than --frames 5", ("4.mkv", ())),
    Case("a 1-frame video", "named, no still", "1 frame, shorter than --frames 5", ("1.mkv", ())),
    Case("16 frames for --frames 17", "named, no still", "16 frames, shorter than --frames 17",
         ("16.mkv", (17,))),
    Case("an image for --frames 17", "named", "1 frame, shorter than --frames 17",
         ("image.png", (17,))),
    Case("16 frames for --frames 17 --frames 1", "a still, as asked", "", ("16.mkv", (17, 1), 1)),
)  # fmt: skip
def test_lengths(case, lengths, capsys):
    name, frames, *want = case.given
    args = command.argparse.Namespace(fps="keep", frames=frames, size=None)
    settings = command._of_model(command._asked(args), LONG)
    if want:
        assert cut.cut(lengths / name, settings, keep=True).frames.shape == (*want, 24, 32, 3)
    else:
        with pytest.raises(ValueError) as error:
            cut.cut(lengths / name, settings, keep=True)
        case.check(str(error.value))


def folder_named(path):
    clip(path / "in.mkv")


def lone(path):
    path.write_text("red")


def fifo(path):
    os.mkfifo(path)


def link(to):
    def make(path):
        (path.parent.parent / "elsewhere").mkdir()
        path.symlink_to(path.parent.parent / to)

    return make


@cases(
    Case("a document among clips", "in the table", "a.pdf  not used: not a video or image (.pdf)",
         ("a.pdf", lone)),
    Case("a file without suffix", "in the table", "a  not used: not a video or image (no suffix)",
         ("a", lone)),
    Case("a caption without a clip", "in the table",
         "a.txt  not used: a caption without a video or image of its name", ("a.txt", lone)),
    Case("a caption named .TXT", "in the table", "a.TXT  not used: captions end in .txt, not .TXT",
         ("a.TXT", lone)),
    Case("a folder named x.mp4", "in the table, its files too",
         "x.mp4  not used: a folder with the name of a file", ("x.mp4", folder_named)),
    Case("a broken link", "in the table", "a.mp4  not used: a link that leads nowhere",
         ("a.mp4", link("nowhere"))),
    Case("a link to a folder", "in the table",
         "a  not used: a link to a folder, whose files are not looked at",
         ("a", link("elsewhere"))),
    Case("a pipe", "in the table", "a.mp4  not used: not a file", ("a.mp4", fifo)),
    Case("a clip without a caption", "in the table",
         "a.mkv  not used: no caption (a .txt file of the same name)",
         ("a.mkv", functools.partial(clip, caption=None))),
    Case("a name with a line break", "on one line",
         "a?b.mkv  24x32 ffv1 8 fps  5 frames  as 5x24x32  'red'", ("a\nb.mkv", clip)),
    Case("hidden files", "ignored", "", (".a.mp4", lone)),
)  # fmt: skip
def test_every_file_is_in_the_table(case, tmp_path, capsys):
    folder = tmp_path / "clips"
    clip(folder / "good.mkv", 9)
    name, make = case.given
    make(folder / name)
    command.main(["inspect", str(folder)])
    said = capsys.readouterr().out
    assert "good.mkv  24x32 ffv1 8 fps  9 frames  as 9x24x32  'red'" in said
    case.check(said)
    listed = [line for line in said.split("\n\n")[0].splitlines() if line]
    assert len(listed) == 1 + bool(case.message) + (case.brought == "a folder named x.mp4")


def avi(path, said: int):
    """Five frames, of which the header says that there are more."""
    clip(path, 60, "-c:v", "ffv1")
    data = bytearray(path.read_bytes())
    at = data.index(b"strh") + 8 + 32
    assert int.from_bytes(data[at : at + 4], "little") == 60
    data[at : at + 4] = said.to_bytes(4, "little")
    path.write_bytes(data)


@cases(
    Case("a container that says 62 frames, 60 decode", "both shown, decoded used",
         "60 frames (62 by its container)  as 60x24x32", 62),
    Case("a container that says 58 frames, 60 decode", "both shown, decoded used",
         "60 frames (58 by its container)  as 60x24x32", 58),
    Case("a container that is right", "one number", "60 frames  as 60x24x32", 60),
)  # fmt: skip
def test_counts_of_frames(case, tmp_path, capsys):
    avi(tmp_path / "a.avi", case.given)
    command.main(["inspect", str(tmp_path)])
    case.check(capsys.readouterr().out)


def test_the_table_counts_lengths_and_names_the_smallest_bucket(lengths, capsys):
    command.main(["inspect", str(lengths), "--frames", "5", "--frames", "13", "--frames", "1"])
    said = capsys.readouterr().out
    assert "by length: 3 of 1 frame, 3 of 13 frames" in said
    command.main(["inspect", str(lengths), "--frames", "5", "--frames", "77"])
    said = capsys.readouterr().out
    assert "judged by frames: 5, 77; size: any (--size)" in said
    assert "by length: 1 of 5 frames, 2 of 77 frames" in said
    assert "the smallest is 5x24x32 with 1: a larger config.data.batch repeats its clips" in said


# ------------------------------------------------------------------------------ changes


SETTINGS = cut.Settings((1, 5), ((24, 32),))


@pytest.fixture
def made(tmp_path, model):
    """(folder of clips a and b, its cache, {file: outcome}, a function that caches again)."""
    folder, out = tmp_path / "clips", tmp_path / "cache"
    clip(folder / "a.mkv", 5)
    clip(folder / "b.mkv", 6, caption="blue")

    def build(settings=SETTINGS, params=model[0]):
        found = cache.build(folder, out, settings, params, *model[1:])
        return {outcome.file: outcome for outcome in found}

    return folder, out, build(), build


def arrays(out, outcome):
    return safetensors.numpy.load_file(out / "clips" / f"{outcome.key}.safetensors")


@cases(
    Case("a caption changed after caching", "its text alone is encoded",
         "a.mkv: its latents are there, only text is encoded", ("a.txt", "circle", "a.mkv")),
    Case("a caption that is now another's", "its text alone is encoded",
         "a.mkv: its latents are there, only text is encoded", ("a.txt", "blue", "a.mkv")),
    Case("the same video with another caption", "its text alone is encoded",
         "c.mkv: its latents are there, only text is encoded", ("c.txt", "circle", "c.mkv")),
    Case("a caption that gained a line break at its end", "nothing is encoded", "",
         ("a.txt", "red\n", None)),
)  # fmt: skip
def test_changed_captions(case, made, model, capsys, monkeypatch):
    folder, out, before, build = made
    name, caption, changed = case.given
    if changed == "c.mkv":
        shutil.copy(folder / "a.mkv", folder / "c.mkv")
    (folder / name).write_text(caption)
    calls, original = [], cache._encoder

    def counted(*args):
        pixels, rows = original(*args)
        return lambda x: calls.append("pixels") or pixels(x), lambda x: calls.append(x) or rows(x)

    monkeypatch.setattr(cache, "_encoder", counted)
    capsys.readouterr()
    after = build()
    case.check(capsys.readouterr().out)
    assert calls == ([caption] if changed else [])
    assert after["b.mkv"] == before["b.mkv"]
    got, want = arrays(out, after[changed or "a.mkv"]), arrays(out, after["b.mkv"])
    if caption == "blue":
        np.testing.assert_array_equal(got["text"], want["text"])
    fresh = cache.build(folder, out.with_name("fresh"), SETTINGS, *model)
    assert {o.file: o for o in fresh} == after
    files = {p.name: p.read_bytes() for p in (out / "clips").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (out.with_name("fresh") / "clips").iterdir()}


def moved(folder):
    shutil.move(folder, folder.with_name("moved"))


STALE = "cache is stale: 1 of 2 captions have changed since (…a.mkv); run the same python -m …"


@cases(
    Case("a caption changed between caching and training", "refused", STALE,
         lambda folder: (folder / "a.txt").write_text("circle")),
    Case("a caption emptied before training", "refused", STALE,
         lambda folder: (folder / "a.txt").write_text("")),
    Case("a caption that is no UTF-8 any more", "refused", STALE,
         lambda folder: (folder / "a.txt").write_bytes(b"caf\xe9")),
    Case("the clips' folder moved away", "trained on as cached", "", moved),
    Case("captions saved again with a byte order mark", "trained on", "",
         lambda folder: (folder / "a.txt").write_text("red\n", encoding="utf-8-sig")),
)  # fmt: skip
def test_training_on_a_cache_whose_captions_changed(case, made):
    folder, out = made[:2]
    case.given(folder)
    begin = lambda: latents.LatentStream(latents.read(out), 1, 0, 0.0, tiny.MODEL)
    if not case.message:
        assert {begin().at(step).texts[0] for step in range(2)} == {"red", "blue"}
        return
    with pytest.raises(ValueError) as error:
        begin()
    assert "\n" not in str(error.value)
    case.check(str(error.value))


@cases(
    Case("another --dtype for the same --out", "refused",
         "(dtype float32 -> bfloat16); choose another --out", ["--dtype", "bfloat16"]),
    Case("another --fps for the same --out", "refused",
         "(fps None -> 8.0); choose another --out", ["--fps", "8"]),
    Case("another --frames for the same --out", "refused",
         "(frames [1, 5] -> [5]); choose another --out", ["--frames", "5"]),
    Case("the same command again", "continued", "", []),
)  # fmt: skip
def test_other_options_for_the_same_cache(case, made, model, capsys):
    folder, out = made[:2]
    files = {p.name: p.read_bytes() for p in (out / "clips").iterdir()}
    given = ["--model", model[2], "--out", str(out), "--size", "24x32", "--fps", "keep"]
    if case.message:
        with pytest.raises(SystemExit):
            command.main(["cache", str(folder), *given, *case.given])
        (line,) = capsys.readouterr().err.splitlines()
        case.check(line)
    else:
        command.main(["cache", str(folder), *given])
    assert {p.name: p.read_bytes() for p in (out / "clips").iterdir()} == files


@cases(
    Case("--out that is a file", "refused", "a.txt is a file; set --out to a folder", "a.txt"),
    Case("--out below a file", "refused", "Not a directory: …a.txt/cache", "a.txt/cache"),
    Case("--out that holds other things", "refused",
         "is not empty and holds no cache; choose another --out", "."),
)  # fmt: skip
def test_places_that_cannot_hold_a_cache(case, tmp_path, model, capsys):
    clip(tmp_path / "a.mkv")
    given = ["--model", model[2], "--out", str(tmp_path / case.given), "--fps", "keep"]
    with pytest.raises(SystemExit):
        command.main(["cache", str(tmp_path), *given])
    (line,) = capsys.readouterr().err.splitlines()
    case.check(line)


@cases(
    Case("three clips for a batch of four", "said at the start",
         "3 of latents (2, 3, 4, 4), fewer than config.data.batch 4: its batches repeat clips",
         (3, 4)),
    Case("one clip for a batch of two", "said at the start",
         "1 of latents (2, 3, 4, 4), fewer than config.data.batch 2: its batches repeat clips",
         (1, 2)),
    Case("four clips for a batch of four", "each once", "", (4, 4)),
    Case("five clips for a batch of four", "each about once", "", (5, 4)),
)  # fmt: skip
def test_batches_of_few_clips(case, tmp_path):
    """A single clip is legitimate (a model must be able to learn it by heart), so it is said."""
    count, batch = case.given
    (tmp_path / "clips").mkdir()
    (tmp_path / "cache.json").write_text(json.dumps({"format": cache.FORMAT, "identity": {}}))
    for n in range(count):
        shapes = {"latents": (2, 3, 4, 4), "text": (3, tiny.WAN.text_dim)}
        tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        facts = json.dumps({"caption": f"{n}", "sha256": f"{n:064x}"})
        safetensors.numpy.save_file(tensors, tmp_path / f"clips/{n}.safetensors", {"clip": facts})
    stream = latents.LatentStream(latents.read(tmp_path), batch, 0, 0.0, tiny.MODEL)
    said = stream.describe()
    case.check(said)
    assert ("repeat" in said) == bool(case.message) and len(said.splitlines()) == 2
    assert len(stream.at(0).texts) == batch
    assert len(set(stream.at(0).texts)) == min(count, batch)


# ------------------------------------------------------------------------------ processes


WAITS = """
import multiprocessing, time
from wanjax.data import cut
if __name__ == "__main__":
    with cut.processes() as pool:
        pool.submit(time.sleep, 0).result()
        pool.submit(time.sleep, 0.5)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(60)
"""


def lives(pid: int) -> bool:
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@cases(
    Case("Ctrl-C while clips are decoded", "no process is left", "", signal.SIGINT),
    Case("SIGTERM while clips are decoded", "no process is left", "", signal.SIGTERM),
    Case("the command killed while clips are decoded", "no process is left", "", signal.SIGKILL),
)
def test_decoding_processes_end_with_the_command(case):
    running = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for pid in running.stdout.readline().split()]
    assert pids and all(map(lives, pids))
    running.send_signal(case.given)
    assert running.wait(60) != 0
    until = time.monotonic() + 60
    while any(map(lives, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.02)


def test_decoding_processes_know_nothing_of_jax():
    code = "import sys, wanjax.data.cut; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_decoding_process_that_is_killed_is_named(tmp_path, monkeypatch, capsys):
    clip(tmp_path / "a.mkv")
    clip(tmp_path / "b.mkv")
    monkeypatch.setattr(cut, "cut", die)
    with pytest.raises(SystemExit):
        command.main(["inspect", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wanjax.data: a process that decodes was lost")
    assert "at one of: a.mkv, b.mkv; free memory" in line


# ------------------------------------------------------------------------------ sixty files


ENCODERS = {  # of five frames
    "h264.mp4": ("-c:v", "libx264"), "h264_444.mp4": ("-c:v", "libx264", "-pix_fmt", "yuv444p"),
    "h264_10.mp4": ("-c:v", "libx264", "-pix_fmt", "yuv420p10le"),
    "hevc.mp4": ("-c:v", "libx265", "-x265-params", "log-level=none"),
    "hevc_10.mkv": ("-c:v", "libx265", "-pix_fmt", "yuv420p10le", "-x265-params", "log-level=none"),
    "prores.mov": ("-c:v", "prores_ks"), "vp9.webm": ("-c:v", "libvpx-vp9"),
    "vp8.webm": ("-c:v", "libvpx"), "mjpeg.avi": ("-c:v", "mjpeg", "-pix_fmt", "yuvj420p"),
    "mpeg4.avi": ("-c:v", "mpeg4"), "mpeg2.mpg": ("-c:v", "mpeg2video", "-r", "25"),
    "ts.ts": ("-c:v", "libx264"), "flv.flv": ("-c:v", "flv1"),
    "grey.mkv": ("-c:v", "ffv1", "-pix_fmt", "gray"),
    "hdr.mkv": ("-vf", "setparams=color_trc=smpte2084", "-c:v", "ffv1"),
    "rgb.mov": ("-c:v", "qtrle"), "gif.gif": ("-c:v", "gif"), "raw.avi": ("-c:v", "rawvideo"),
    "aspect.mp4": ("-vf", "setsar=2/1", "-c:v", "libx264"), "ogv.ogv": ("-c:v", "libtheora"),
}  # fmt: skip
RATES = {"slow.mkv": 1, "fast.mkv": 120, "ntsc.mkv": "30000/1001"}
SIZES = {"tiny.mkv": "2x2", "narrow.mkv": "16x64", "small.mkv": "30x22", "wide.mkv": "200x24"}
LENGTHS = {"one.mkv": 1, "four.mkv": 4, "seven.mkv": 7}
MODES = {
    "rgba.png": "RGBA", "grey.png": "L", "la.png": "LA", "grey16.png": "I;16", "palette.png": "P",
    "bit.png": "1", "cmyk.jpg": "CMYK", "float.tif": "F", "grey.bmp": "L", "webp.webp": "RGB",
    "upper.PNG": "RGB",
}  # fmt: skip
BYTES = {
    "empty.mp4": b"", "text.mp4": b"not a video at all\n" * 50, "zeros.mkv": bytes(5000),
    "page.png": b"<html>404</html>", "pointer.mp4": b"version https://git-lfs.github.com/spec/v1\n",
    "half.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF", "noise.webm": bytes(range(256)) * 20,
}  # fmt: skip


def hard(folder):
    """More than sixty files of every kind; all have a caption unless their kind is to lack it."""
    for name, encoder in ENCODERS.items():
        clip(folder / name, 9, *encoder, size="32x24", caption=f"red {name}")
    for name, rate in RATES.items():
        clip(folder / name, 9, rate=rate)
    for name, size in SIZES.items():
        clip(folder / name, 9, size=size)
    for name, frames in LENGTHS.items():
        clip(folder / name, frames)
    for number, (name, mode) in enumerate(MODES.items()):
        still(folder / name, mode, (32 + number, 30))
    for name, data in BYTES.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("red")
    good = (folder / "h264.mp4").read_bytes()
    for share in (0.3, 0.6, 0.95):
        (folder / f"cut {share}.mp4").write_bytes(good[: int(len(good) * share)])
        (folder / f"cut {share}.txt").write_text("red")
    captions = {
        "no_caption": None, "latin": b"caf\xe9", "blank": b" \n", "bom": "\ufeffred".encode(),
        "odd näme 猫 🐈": b"cat", "same": b"red h264.mp4", "nul": b"re\0d", "html": b"&nbsp;",
    }  # fmt: skip
    for name, caption in captions.items():
        (folder / f"{name}.mp4").write_bytes(good)
        if caption is not None:
            (folder / f"{name}.txt").write_bytes(caption)
    shutil.copy(folder / "h264.mp4", folder / "wrong.png")
    shutil.copy(folder / "grey.png", folder / "wrong.mp4")
    (folder / "wrong.txt").write_text("red")
    still(
        folder / "animated.webp", save_all=True, append_images=[Image.new("RGB", (32, 24), "red")]
    )
    sound = ("-f", "lavfi", "-i", "sine=d=0.2", "-c:a", "aac", str(folder / "sound.mp4"))
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *sound], check=True)
    (folder / "sound.txt").write_text("red")
    (folder / "broken.mp4").symlink_to(folder / "nowhere.mp4")
    clip(folder / "folder.mp4" / "inner.mkv")
    (folder / "lone.txt").write_text("red")
    (folder / "notes.pdf").write_bytes(b"%PDF")
    (folder / ".hidden.mp4").write_bytes(good)
    return folder


@pytest.mark.parametrize("options", [
    ["--fps", "keep", "--size", "16x16", "--size", "24x32", "--frames", "1", "--frames", "5"],
    ["--fps", "16", "--size", "24x32"],
])  # fmt: skip
def test_inspect_and_cache_agree_on_sixty_hard_files(options, model, tmp_path, capsys):
    folder, out = hard(tmp_path / "clips"), tmp_path / "cache"
    command.main(["inspect", str(folder), "--model", model[2], *options])
    shown, _, table = capsys.readouterr().out.partition("\n\njudged by ")
    said = dict(line.split("  ", 1) for line in shown.splitlines())
    command.main(["cache", str(folder), "--model", model[2], "--out", str(out), *options])
    assert table.partition("\n")[2].strip() in capsys.readouterr().out
    report = [cache.Outcome(**row) for row in json.loads((out / "report.json").read_text())]
    assert len(report) == len(said) >= 60 and sum(bool(o.bucket) for o in report) >= 10
    for outcome in report:
        line = said[media.shown(outcome.file)]
        want = f"as {outcome.bucket}  " if outcome.bucket else f"not used: {outcome.reason}"
        assert want in line, outcome
    reasons = {outcome.file: outcome.reason for outcome in report}
    assert "frame" in reasons["wrong.mp4"] or "--frames" in options  # an image's bytes, as a video
    assert len(list((out / "clips").iterdir())) == sum(bool(o.bucket) for o in report)
    entries = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix != ".txt"}
    assert entries - {".hidden.mp4"} <= {o.file for o in report}
