"""Videos on disk: mp4 files for people, a PNG grid of frames, and the folder of samples of a step.

    run_dir/samples/step_000040/000.mp4     one file a sample
                                000.txt     its prompt
                                scores.json [{"reward": 0.71, ...}, ...] where they were scored

Frames are [T, H, W, 3] uint8. H.264 loses detail: the files are for people, nothing reads them.
"""

import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np

# One thread and no encoder tags: the same frames give the same bytes.
_ENCODER = ["-crf", "15", "-preset", "medium", "-threads", "1", "-map_metadata", "-1"]
_ENCODER += ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-movflags", "+faststart"]


def write_mp4(path, frames_THWC: np.ndarray, fps: int, scale: int = 1) -> None:
    """Write an H.264 (yuv420p) file; odd sides gain one repeated row or column.

    `scale` enlarges by repeating pixels, for viewing videos of few pixels.
    """
    frames = _checked(frames_THWC)
    frames = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.stem}.tmp.mp4")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo"]
    command += ["-pix_fmt", "rgb24", "-s", f"{frames.shape[2]}x{frames.shape[1]}", "-r", str(fps)]
    command += ["-i", "-", "-c:v", "libx264", "-pix_fmt", "yuv420p", *_ENCODER, str(tmp)]
    result = subprocess.run(command, input=frames.tobytes(), capture_output=True)
    if result.returncode:
        raise OSError(f"ffmpeg could not write {path}: {result.stderr.decode().strip()}")
    os.replace(tmp, path)


def frame_grid(path, videos: Sequence[np.ndarray], columns: int = 6) -> None:
    """Write a PNG with a row for each video: `columns` frames from its first to its last.

    All videos have the same height and width.
    """
    rows = []
    for frames in map(_checked, videos):
        picked = frames[np.linspace(0, len(frames) - 1, columns).round().astype(int)]
        rows.append(np.pad(picked, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=255))
    grid = np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    iio.imwrite(path, grid[:-2, :-2], extension=".png")


def write_samples(
    run_dir,
    step: int,
    videos: Sequence[np.ndarray] | np.ndarray,
    prompts: Sequence[str],
    fps: int,
    scores: Sequence[dict[str, float]] | None = None,
) -> pathlib.Path:
    """Write the samples of a step (a video, a prompt, scores if any); return their folder."""
    if not len(videos) == len(prompts) == len(scores if scores is not None else prompts):
        raise ValueError(
            f"got {len(videos)} videos, {len(prompts)} prompts and {len(scores or prompts)} scores"
        )
    folder = pathlib.Path(run_dir) / "samples" / f"step_{step:06d}"
    for n, (frames, prompt) in enumerate(zip(videos, prompts, strict=True)):
        write_mp4(folder / f"{n:03d}.mp4", frames, fps)
        (folder / f"{n:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
    if scores is not None:
        text = json.dumps([dict(score) for score in scores], indent=1)
        (folder / "scores.json").write_text(text + "\n", encoding="utf-8")
    return folder


def _checked(frames):
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(
            f"video frames are {frames.dtype}{list(frames.shape)}, expected uint8[T, H, W, 3]"
        )
    return frames
