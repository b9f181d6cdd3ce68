"""data/video.py: files that standard decoders read back as the frames, the same bytes each time."""

import json
import subprocess

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from tests import tiny
from wanjax.data import video


def moving_square(frames=9, height=32, width=48):
    clip = np.full((frames, height, width, 3), 200, np.uint8)
    for t in range(frames):
        clip[t, 8:20, 2 + 3 * t : 14 + 3 * t] = (200, 30, 30)
    return clip


def decode(path):
    """Frames by the ffmpeg program, with chroma scaled as exactly as we do."""
    meta = next(imageio_ffmpeg.read_frames(str(path)))
    flags = "bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-sws_flags", flags]
    command += ["-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    width, height = meta["size"]
    return np.frombuffer(data, np.uint8).reshape(-1, height, width, 3)


def test_mp4_decodes_to_the_frames_at_the_given_rate(tmp_path):
    clip = moving_square()
    video.write_mp4(tmp_path / "a.mp4", clip, fps=16)
    decoded = decode(tmp_path / "a.mp4")
    assert decoded.shape == clip.shape
    assert np.abs(decoded.astype(int) - clip).mean() < 3  # lossy, and chroma at half resolution
    meta = next(imageio_ffmpeg.read_frames(str(tmp_path / "a.mp4")))
    assert meta["fps"] == 16 and meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p")
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_odd_sides_are_padded(tmp_path):
    clip = moving_square(3, 31, 47)
    video.write_mp4(tmp_path / "odd.mp4", clip, fps=8)
    assert decode(tmp_path / "odd.mp4").shape == (3, 32, 48, 3)


def test_same_frames_give_the_same_bytes(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        video.write_mp4(tmp_path / name, moving_square(), fps=16)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)],
)
def test_wrong_frames_are_refused_with_their_shape(tmp_path, frames):
    with pytest.raises(ValueError, match=r"expected uint8\[T, H, W, 3\]"):
        video.write_mp4(tmp_path / "a.mp4", frames, fps=8)


def test_grid_shows_first_and_last_frame_of_each_video(tmp_path):
    clips = [moving_square(), moving_square()[::-1]]
    video.frame_grid(tmp_path / "grid.png", clips)
    grid = iio.imread(tmp_path / "grid.png")
    assert grid.shape == (2 * 34 - 2, 6 * 50 - 2, 3)
    np.testing.assert_array_equal(grid[:32, :48], clips[0][0])
    np.testing.assert_array_equal(grid[:32, 250:], clips[0][-1])
    np.testing.assert_array_equal(grid[34:, :48], clips[1][0])


def test_samples_folder_holds_videos_prompts_and_scores(tmp_path):
    clips = [moving_square(3)] * 2
    folder = video.write_samples(
        tmp_path, 40, clips, ["a", "größer"], fps=8, scores=[{"reward": 0.5}, {"reward": 1.0}]
    )
    assert folder == tmp_path / "samples/step_000040"
    names = ["000.mp4", "000.txt", "001.mp4", "001.txt", "scores.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (folder / "001.txt").read_text(encoding="utf-8") == "größer\n"
    assert json.loads((folder / "scores.json").read_text())[1] == {"reward": 1.0}
    with pytest.raises(ValueError, match="2 videos, 1 prompts"):
        video.write_samples(tmp_path, 0, clips, ["a"], fps=8)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return tiny.write_clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize("name", tiny.CLIPS)
def test_every_frame_is_read_or_retimed_by_its_time_stamp(clips, name):
    frames, fps, _ = tiny.CLIPS[name]
    kept = np.stack(list(video.read_frames(clips / name, 100)))
    assert kept.shape == (frames, 24, 32, 3)
    np.testing.assert_array_equal(kept, decode(clips / name))
    retimed = list(video.read_frames(clips / name, 100, fps=16))
    assert abs(len(retimed) - frames * 16 / fps) < 1
    assert len(list(video.read_frames(clips / name, 3))) == min(frames, 3)
    meta = video.probe(clips / name)
    assert (meta["height"], meta["width"], meta["fps"]) == (24, 32, fps)
    assert abs(meta["seconds"] - frames / fps) < 0.05


def test_damaged_files_are_reported_with_the_message_of_the_decoder(clips, tmp_path):
    whole = (clips / "more/whole.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2] + bytes(range(256)) * 40)
    (tmp_path / "none.mp4").write_bytes(b"not a video")
    (tmp_path / "none.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="cut short: .* of 3.38 seconds|does not decode"):
        list(video.read_frames(tmp_path / "cut.mkv", 100))
    with pytest.raises(ValueError, match="not readable as a video"):
        video.probe(tmp_path / "none.mp4")
    with pytest.raises(ValueError, match="not readable as an image"):
        video.read_image(tmp_path / "none.png")


def test_images_are_one_frame_and_stand_upright(tmp_path):
    frame = moving_square(1)[0]
    picture = Image.fromarray(frame)
    exif = picture.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    picture.save(tmp_path / "a.png", exif=exif)
    (read,) = video.read_frames(tmp_path / "a.png", 5)
    np.testing.assert_array_equal(read, np.rot90(frame, -1))
    assert video.probe(tmp_path / "a.png")["fps"] == 0


def test_fit_cuts_the_centre_and_keeps_proportions():
    frame = np.zeros((40, 100, 3), np.uint8)
    frame[10:30, 40:60] = 255  # a square in the centre
    small = video.fit(frame, 20, 20)
    assert small.shape == (20, 20, 3)
    bright = small[..., 0] > 127
    assert bright.any(0).sum() == bright.any(1).sum() == 10
    np.testing.assert_array_equal(bright, bright.T)
    np.testing.assert_array_equal(video.fit(frame, 40, 100), frame)
