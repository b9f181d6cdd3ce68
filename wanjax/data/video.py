"""Videos on disk: mp4 files for viewing, a PNG grid of frames, the folder of a step's samples, and
reading any video or image file.

    run_dir/samples/step_000040/000.mp4     one file per sample
                                000.txt     its prompt
                                scores.json [{"reward": 0.71, ...}, ...] if they were scored

Frames are [T, H, W, 3] uint8. H.264 is lossy: the files are for viewing, no code reads them back.
"""

import json
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
from PIL import Image

from wanjax import paths

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v", ".gif")
_COLUMNS = 6  # frames of a video in a grid

# One thread and no encoder tags: the same frames give the same bytes.
_ENCODER = ["-crf", "15", "-preset", "medium", "-threads", "1", "-map_metadata", "-1"]
_ENCODER += ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-movflags", "+faststart"]


def write_mp4(path, frames_THWC: np.ndarray, fps: int) -> None:
    """Write an H.264 (yuv420p) file; odd sides gain one repeated row or column."""
    frames = _checked(frames_THWC)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    path = paths.resolve(path)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo"]
    command += ["-pix_fmt", "rgb24", "-s", f"{frames.shape[2]}x{frames.shape[1]}", "-r", str(fps)]
    command += ["-i", "-", "-c:v", "libx264", "-pix_fmt", "yuv420p", *_ENCODER]
    with paths.whole_file(path) as part:
        result = subprocess.run([*command, part], input=frames.tobytes(), capture_output=True)
        if result.returncode:
            raise OSError(f"ffmpeg could not write {path}: {result.stderr.decode().strip()}")


def frame_grid(path, videos: Sequence[np.ndarray]) -> None:
    """Write a PNG with a row for each video: evenly spaced frames from its first to its last.

    All videos have the same height and width.
    """
    rows = []
    for frames in map(_checked, videos):
        picked = frames[np.linspace(0, len(frames) - 1, _COLUMNS).round().astype(int)]
        rows.append(np.pad(picked, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=255))
    grid = np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    iio.imwrite(path, grid[:-2, :-2], extension=".png")


def write_samples(
    run_dir, step: int, videos, prompts: Sequence[str], fps: int, scores: Sequence | None = None
) -> paths.Path:
    """Write the samples of a step (videos, prompts, {name: score} if any); return their folder."""
    if not len(videos) == len(prompts) == len(scores if scores is not None else prompts):
        raise ValueError(
            f"got {len(videos)} videos, {len(prompts)} prompts and {len(scores or prompts)} scores"
        )
    folder = paths.resolve(run_dir) / "samples" / f"step_{step:06d}"
    for n, (frames, prompt) in enumerate(zip(videos, prompts, strict=True)):
        write_mp4(folder / f"{n:03d}.mp4", frames, fps)
        (folder / f"{n:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
    if scores is not None:
        text = json.dumps([dict(score) for score in scores], indent=1)
        (folder / "scores.json").write_text(text + "\n", encoding="utf-8")
    return folder


def probe(path) -> dict:
    """{"codec", "fps", "seconds", "height", "width"} of a file; an image has fps 0.

    Raises ValueError with the decoder's message for a file that is neither video nor image.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() in IMAGES:
        height, width = read_image(path).shape[:2]
        return dict(codec=path.suffix[1:].lower(), fps=0.0, seconds=0.0, height=height, width=width)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-i", str(path)]
    said = subprocess.run(command, capture_output=True).stderr.decode(errors="replace")
    stream = re.search(r"Video: (\w+).*?, (\d+)x(\d+).*?, ([\d.]+k?) (?:fps|tbr)", said)
    if not stream:
        lines = said.strip().splitlines() or ["no answer from ffmpeg"]
        raise ValueError(f"not readable as a video ({lines[-1].strip()})")
    codec, width, height, fps = stream.groups()
    length = re.search(r"Duration: (\d+):(\d+):([\d.]+)", said)
    hours, minutes, seconds = map(float, length.groups()) if length else (0.0, 0.0, 0.0)
    size, rate = dict(height=int(height), width=int(width)), float(fps.replace("k", "e3"))
    return dict(codec=codec, fps=rate, seconds=3600 * hours + 60 * minutes + seconds, **size)


def read_image(path) -> np.ndarray:
    """An image file as one frame [H, W, 3], turned upright; ValueError if it is not an image."""
    path = paths.local(path)
    try:
        frame = iio.imread(path, plugin="pillow", mode="RGB", rotate=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not readable as an image ({error})") from None
    return frame[0] if frame.ndim == 4 else frame


def read_frames(path, limit: int, fps: float | None = None) -> Iterator[np.ndarray]:
    """Yield the first `limit` frames [H, W, 3] of a video or image file, at `fps` frames per second
    by its time stamps, or each decoded frame once if fps is None.

    Raises ValueError with the decoder's message if a file is damaged before `limit`.
    """
    if pathlib.Path(path).suffix.lower() in IMAGES:
        yield read_image(path)
        return
    timing = ["-fps_mode", "passthrough"] if fps is None else ["-vf", f"fps={fps:g}"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-xerror", "-nostdin", "-i", path]
    command += ["-an", *timing, "-frames:v", limit, "-f", "image2pipe", "-c:v", "ppm", "-"]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=said)
        assert process.stdout is not None
        try:
            while process.stdout.readline() == b"P6\n":  # each frame states its size
                width, height = map(int, process.stdout.readline().split())
                process.stdout.readline()  # 255
                data = process.stdout.read(width * height * 3)
                yield np.frombuffer(data, np.uint8).reshape(height, width, 3)
        finally:
            process.stdout.close()
            code = process.wait()
        if code:
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
            raise ValueError(f"does not decode ({words[0] if words else f'ffmpeg code {code}'})")


def fit(frame_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crop the centre to the requested aspect ratio and resize it (Lanczos, antialiased)."""
    H, W = frame_HWC.shape[:2]
    scale = min(H / height, W / width)
    h, w = scale * height, scale * width
    box = ((W - w) / 2, (H - h) / 2, (W + w) / 2, (H + h) / 2)
    image = Image.fromarray(frame_HWC).resize((width, height), Image.Resampling.LANCZOS, box)
    return np.asarray(image)


def _checked(frames):
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(
            f"video frames are {frames.dtype}{list(frames.shape)}, expected uint8[T, H, W, 3]"
        )
    return frames
