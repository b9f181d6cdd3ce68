"""Videos on disk: mp4 files for viewing, a PNG grid of frames, the folder of a step's samples, and
reading any video or image file.

    run_dir/samples/step_000040/000.mp4     one file per sample
                                000.txt     its prompt
                                scores.json [{"reward": 0.71, ...}, ...] if they were scored

Frames are [T, H, W, 3] uint8 sRGB. H.264 is lossy: the files are for viewing, no code reads them
back.

What is read is what a player shows: upright, with square pixels, 8 bits by the stream's matrix and
range (untagged: BT.709 from 720 lines up, else BT.601, limited range), transparent parts over
white. HDR has no agreed way to 8 bits and is refused by name.
"""

import json
import math
import pathlib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
from av.error import FFmpegError
from av.filter import Graph
from av.stream import Disposition
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image, ImageOps, ImageSequence

from wanjax import paths

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif")
VIDEOS = (".mp4", ".mkv", ".mov", ".webm", ".avi", ".m4v", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg")
VIDEOS += (".wmv", ".flv", ".ogv", ".3gp")
_COLUMNS = 6  # frames of a video in a grid
_WHOLE = 0.95  # share of the seconds told that a whole file has at least
_HD = 720  # lines from which BT.709 is meant where nothing is said
_HDR = {ColorTrc.SMPTE2084: "PQ", ColorTrc.ARIB_STD_B67: "HLG"}
_MATRICES = {
    Colorspace.ITU709: "bt709", Colorspace.ITU601: "bt601", Colorspace.SMPTE240M: "smpte240m",
    Colorspace.BT2020: "bt2020", Colorspace.FCC: "fcc", ColorPrimaries.SMPTE170M: "bt601",
}  # fmt: skip
_EXACT = "flags=bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"

# One thread and no encoder tags: the same frames give the same bytes.
_ENCODER = {"crf": "15", "preset": "medium", "threads": "1", "flags": "+bitexact"}
_CONTAINER = {"movflags": "+faststart", "fflags": "+bitexact"}


def write_mp4(path, frames_THWC: np.ndarray, fps: float) -> None:
    """Write an H.264 (yuv420p) file, converted and tagged as BT.709 from 720 lines up, else as
    BT.601 (limited range); odd sides gain one repeated row or column."""
    frames = _checked(frames_THWC)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    tag = ColorPrimaries.BT709 if height >= _HD else ColorPrimaries.SMPTE170M
    change = f"out_range=limited:out_color_matrix={_MATRICES[tag]}:out_chroma_loc=left:{_EXACT}"
    path = paths.resolve(path)
    with paths.whole_file(path) as part:
        try:
            with av.open(str(part), "w", format="mp4", options=_CONTAINER) as container:
                rate = Fraction(fps).limit_denominator(1001)
                stream = container.add_stream("libx264", rate, options=_ENCODER)
                stream.height, stream.width = frames.shape[1:3]
                stream.pix_fmt = "yuv420p"
                codec = stream.codec_context
                codec.color_primaries = codec.color_trc = codec.colorspace = tag
                codec.color_range = ColorRange.MPEG
                graph = None
                for number, array in enumerate(frames):
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
                    frame.pts, frame.time_base = number, 1 / rate
                    graph = graph or _scaler(frame, change, "yuv420p")
                    graph.push(frame)
                    container.mux(stream.encode(typing.cast(av.VideoFrame, graph.pull())))
                container.mux(stream.encode())
        except FFmpegError as error:
            raise OSError(f"{path} could not be written: {paths.one_line(error)}") from None


def _scaler(frame, change: str, pixels: str):
    """A graph that converts frames like this one by ffmpeg's scale filter, which unlike
    frame.reformat knows where chroma samples lie."""
    graph = Graph()
    given = dict(width=frame.width, height=frame.height, format=frame.format)
    chain = graph.add_buffer(time_base=frame.time_base or Fraction(1, 1000), **given)
    steps = ("scale", change), ("format", f"pix_fmts={pixels}"), ("buffersink", "")
    for name, arguments in steps:
        following = graph.add(name, arguments)
        chain.link_to(following)
        chain = following
    graph.configure()
    return graph


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
    Image.fromarray(grid[:-2, :-2]).save(path, "PNG")


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
    """{"codec", "height", "width" as shown, "fps", "frames" that decode, "said" frames by its
    container or 0, "seconds" shown}; a still has fps 0.

    Decodes the whole file. Raises ValueError with the reason for one that is not a video or image.
    """
    path = pathlib.Path(path)
    count, end, size = 0, 0.0, (0, 0)
    with _open(path) as media:
        for shown in media.frames():
            count, end, size = count + 1, shown.end, size if count else media.size(shown)
        said, fps, codec = media.said, media.fps if count > 1 or media.video else 0.0, media.codec
    if not count:
        raise ValueError("not readable as a video (none of its frames decodes)")
    seconds = end if fps else 0.0
    facts = dict(codec=codec, height=size[0], width=size[1], fps=fps, frames=count)
    return facts | dict(said=said, seconds=seconds)


def read_image(path) -> np.ndarray:
    """An image file as one frame [H, W, 3], turned upright, 16-bit levels scaled, transparent parts
    over white; the first frame of an animation. ValueError if it is not an image."""
    with _Pictures(path) as media:
        return media.pixels(next(media.frames()))


def read_frames(path, limit: int, fps: float | None = None) -> Iterator[np.ndarray]:
    """Yield the first `limit` frames [H, W, 3] of a video or image file, or what is shown at
    0, 1/fps, 2/fps, … seconds after its first frame (a frame's time is rounded to the nearest).

    Raises ValueError with the decoder's message if a file is damaged before `limit`.
    """
    with _open(path) as media:
        shown = media.frames() if fps is None else _retimed(media.frames(), fps)
        last, array = None, np.empty(0)
        for _, frame in zip(range(limit), shown, strict=False):
            if frame is not last:
                last, array = frame, media.pixels(frame)
            yield array


@dataclass(frozen=True, eq=False)
class _Shown:
    """A decoded picture and when it is shown, in seconds after the first one."""

    picture: typing.Any  # av.VideoFrame or Image.Image
    start: float
    end: float


def _retimed(frames: Iterator[_Shown], fps: float) -> Iterator[_Shown]:
    """What is shown at 0, 1/fps, …; frames are repeated or left out."""
    held, number = None, 0
    for shown in frames:
        while held is not None and number < _slot(shown.start, fps):
            yield held
            number += 1
        held = shown
    while held is not None and number < max(_slot(held.end, fps), _slot(held.start, fps) + 1):
        yield held
        number += 1


def _slot(seconds: float, fps: float) -> int:
    return math.floor(seconds * fps + 0.5)


def _open(path):
    """The reader of a file by its name."""
    picture = pathlib.Path(path).suffix.lower() in IMAGES
    return _Pictures(path) if picture else _Video(path)


class _Video:
    """A video file, open for one pass through its frames."""

    video = True

    def __init__(self, path):
        try:
            self._container = av.open(str(paths.local(path)), metadata_errors="replace")
        except (FFmpegError, ValueError) as error:
            raise ValueError(f"not readable as a video ({_reason(error)})") from None
        try:
            self._stream = self._pick()
        except ValueError:
            self._container.close()
            raise
        stream = self._stream
        stream.thread_type = "AUTO"
        self.codec = stream.codec_context.name.removeprefix("lib")
        self.fps = float(stream.average_rate or stream.guessed_rate or 0)
        self.said = stream.frames
        ratio = stream.sample_aspect_ratio
        self._key, self._graph = None, Graph()
        self._stretch = Fraction(ratio) if ratio and 1 / 64 < ratio < 64 else Fraction(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._container.close()

    def _pick(self):
        """The first stream of moving pictures; ValueError that says what there is instead."""
        streams = self._container.streams
        cover = Disposition.attached_pic
        found = [s for s in streams.video if not s.disposition & cover and s.codec_context]
        if found:
            return found[0]
        if streams.video:
            raise ValueError("no video in it (sound and a cover picture)")
        raise ValueError(f"no video in it ({'sound only' if streams.audio else 'no streams'})")

    def frames(self) -> Iterator[_Shown]:
        """Every frame that decodes, in order; ValueError at damage."""
        first, count, end, usual = None, 0, 0.0, 1 / self.fps if self.fps else 0.04
        decoded = self._container.decode(self._stream)
        while True:
            try:
                frame = next(decoded, None)
            except (FFmpegError, ValueError) as error:
                raise ValueError(
                    f"does not decode after its first {count} frames ({_reason(error)})"
                ) from None
            if frame is None:
                return self._check_end((first or 0) + end, count)
            if frame.is_corrupt:
                raise ValueError(f"does not decode after its first {count} frames (damaged data)")
            _check_range(frame)
            start = float(frame.time) if frame.time is not None else count * usual
            first = start if first is None else first
            length = float(frame.duration * (frame.time_base or 0)) or usual
            count, end = count + 1, start - first + length
            yield _Shown(frame, start - first, end)

    def _check_end(self, end: float, count: int) -> None:
        """Raise ValueError if pictures end long before the container says: demuxers of a cut file
        stop as at the end of a whole one."""
        told = self._told()
        if told and end < _WHOLE * told - 2 / (self.fps or 25):
            raise ValueError(
                f"cut short: {end:.2f} of {told:.2f} seconds are there ({count} frames); copy or "
                "download it again"
            )

    def _told(self) -> float:
        """Seconds of pictures by the container; 0 where it says nothing of this stream alone."""
        stream, container = self._stream, self._container
        if stream.duration and stream.time_base:
            return float(stream.duration * stream.time_base)
        text = re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", ""))
        if text:  # Matroska
            hours, minutes, seconds = map(float, text.groups())
            return 3600 * hours + 60 * minutes + seconds
        if len(container.streams) == 1 and container.duration:
            return container.duration / av.time_base
        return 0.0

    def size(self, shown: _Shown) -> tuple[int, int]:
        """(height, width) of a frame as it is seen."""
        height, width = self._square(shown.picture)
        return (width, height) if shown.picture.rotation % 180 else (height, width)

    def _square(self, frame) -> tuple[int, int]:
        """(height, width) with square pixels: one side grows, none shrinks."""
        tall, wide = max(1, 1 / self._stretch), max(1, self._stretch)
        return round(frame.height * tall), round(frame.width * wide)

    def pixels(self, shown: _Shown) -> np.ndarray:
        """[H, W, 3] of a frame."""
        frame = shown.picture
        height, width = self._square(frame)
        change = f"w={width}:h={height}:out_range=full:{_EXACT}"
        if not frame.format.is_rgb:
            span = "full" if _is_full(frame) else "limited"
            change += f":in_range={span}:in_color_matrix={_matrix(frame)}"
        key = (frame.format.name, frame.height, frame.width, change)
        if key != self._key:  # the first frame; few files change later
            self._key, self._graph = key, _scaler(frame, change, "rgb24")
        self._graph.push(frame)
        upright = np.rot90(self._graph.pull().to_ndarray(), round(frame.rotation / 90))
        return np.ascontiguousarray(upright)


class _Pictures:
    """An image file, still or animated."""

    video, said = False, 0

    def __init__(self, path):
        self._path = paths.local(path)
        try:
            self._image = Image.open(self._path)
            self._count = getattr(self._image, "n_frames", 1)
        except Exception as error:  # image decoders raise anything for damaged bytes
            raise self._unreadable(error) from None
        self.codec = (self._image.format or "image").lower()
        self.fps = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._image.close()

    def _unreadable(self, error) -> ValueError:
        return ValueError(f"{self._path} is not readable as an image ({paths.one_line(error)})")

    def frames(self) -> Iterator[_Shown]:
        """Every picture with its own duration (a tenth of a second where none is given)."""
        start = 0.0
        for number, image in enumerate(ImageSequence.Iterator(self._image)):
            try:
                picture = _flatten(image)
            except Exception as error:  # as above
                raise self._unreadable(error) from None
            length = float(image.info.get("duration") or 100) / 1000
            self.fps = (number + 1) / (start + length) if self._count > 1 else 0.0
            yield _Shown(picture, start, start + length)
            start += length

    def size(self, shown: _Shown) -> tuple[int, int]:
        """(height, width) of a picture."""
        return shown.picture.height, shown.picture.width

    def pixels(self, shown: _Shown) -> np.ndarray:
        """[H, W, 3] of a picture."""
        return np.asarray(shown.picture)


def _flatten(image: Image.Image) -> Image.Image:
    """Upright RGB of any mode; what is transparent shows white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, in a mode of 16 or of 32
        levels = np.asarray(image).astype(np.int64)
        if levels.min() < 0 or levels.max() > 65535:
            raise ValueError("its levels are not of 16 bits")
        return Image.fromarray((levels / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("it holds floating point levels, of which no range is known")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _check_range(frame) -> None:
    """Refuse what cannot be shown in 8 bits without taste."""
    if frame.color_trc in _HDR:
        raise ValueError(
            f"HDR ({_HDR[frame.color_trc]}); tone-map it to BT.709 first, with ffmpeg's zscale and "
            "tonemap filters for example"
        )


def _matrix(frame) -> str:
    """The YUV matrix of a frame: as tagged, or what its size means."""
    return _MATRICES.get(frame.colorspace, "bt709" if frame.height >= _HD else "bt601")


def _is_full(frame) -> bool:
    return frame.color_range == ColorRange.JPEG or frame.format.name.startswith("yuvj")


def _reason(error) -> str:
    return paths.one_line(getattr(error, "strerror", None) or error)


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
