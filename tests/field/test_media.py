"""Media: what videos and images of cameras, phones and editors become."""

import io
import pathlib
import subprocess
from fractions import Fraction

import av
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from tests.field.table import Case, cases
from wanjax.data import video

FLAT = "color=c={color}:s={size}:r={rate}"


def ffmpeg(*arguments) -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *map(str, arguments)]
    subprocess.run(command, check=True)


def flat(path, *encoder, color="0x3060C0", size="64x48", rate=8, frames=9, before=()):
    """A video of one colour."""
    source = FLAT.format(color=color, size=size, rate=rate)
    ffmpeg(*before, "-f", "lavfi", "-i", source, "-frames:v", frames, *encoder, path)
    return path


def yuv_of(rgb, matrix: str, full: bool, bits: int) -> list[int]:
    """Y, Cb, Cr of an sRGB colour by the definitions of BT.601, BT.709 and BT.2020."""
    kr, kb = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722), "bt2020": (0.2627, 0.0593)}[
        matrix
    ]
    r, g, b = (x / 255 for x in rgb)
    y = kr * r + (1 - kr - kb) * g + kb * b
    cb, cr = (b - y) / (2 - 2 * kb), (r - y) / (2 - 2 * kr)
    if full:
        return [round(x * (2**bits - 1)) for x in (y, cb + 0.5, cr + 0.5)]
    scale = 2 ** (bits - 8)
    return [round(x * scale) for x in (16 + 219 * y, 128 + 224 * cb, 128 + 224 * cr)]


def raw(path, rgb, pixels: str, matrix: str, full: bool, bits: int, *encoder, size=(64, 48)):
    """A file whose YUV planes hold a colour by hand; nothing converts them."""
    width, height = size
    down = {"420": 4, "422": 2, "444": 1}[pixels.removeprefix("yuvj").removeprefix("yuv")[:3]]
    kind = np.uint8 if bits == 8 else np.dtype("<u2")
    counts = (width * height, width * height // down, width * height // down)
    levels = yuv_of(rgb, matrix, full, bits)
    planes = [np.full(n, v, kind) for n, v in zip(counts, levels, strict=True)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "rawvideo"]
    command += ["-pix_fmt", pixels, "-s", f"{width}x{height}", "-r", "8", "-i", "-", *encoder, path]
    data = b"".join(map(np.ndarray.tobytes, planes)) * 3
    subprocess.run(list(map(str, command)), input=data, check=True)
    return path


COLOR = (48, 96, 192)
LOSSLESS = ("-c:v", "libx265", "-x265-params", "lossless=1:log-level=none")
PRORES = ("-c:v", "prores_ks", "-profile:v", "4444", "-pix_fmt", "yuv444p10le")
VP9 = ("-c:v", "libvpx-vp9", "-lossless", "1")


@cases(
    Case(
        "10-bit HEVC", "decoded, 8 bits", "", ("a.mp4", "yuv420p10le", "bt601", False, 10, LOSSLESS)
    ),
    Case(
        "ProRes 4444, 10 bits",
        "decoded, 8 bits",
        "",
        ("a.mov", "yuv444p10le", "bt601", False, 10, PRORES),
    ),
    Case("10-bit VP9", "decoded, 8 bits", "", ("a.webm", "yuv420p10le", "bt601", False, 10, VP9)),
    Case(
        "12-bit HEVC 4:2:2",
        "decoded, 8 bits",
        "",
        ("a.mkv", "yuv422p12le", "bt601", False, 12, LOSSLESS),
    ),
    Case(
        "full-range YUV, tagged",
        "its range is used",
        "",
        ("a.mkv", "yuv420p", "bt601", True, 8, ("-vf", "setparams=range=full", "-c:v", "ffv1")),
    ),
    Case(
        "full-range yuvj420p of a camera",
        "its range is used",
        "",
        (
            "a.avi",
            "yuvj420p",
            "bt601",
            True,
            8,
            ("-vf", "setparams=range=full", "-c:v", "mjpeg", "-q:v", "1"),
        ),
    ),
    Case(
        "BT.709 tagged at 48 lines",
        "its matrix is used",
        "",
        (
            "a.mkv",
            "yuv420p",
            "bt709",
            False,
            8,
            ("-vf", "setparams=colorspace=bt709", "-c:v", "ffv1"),
        ),
    ),
    Case(
        "BT.2020 SDR, 10 bits",
        "its matrix is used",
        "",
        (
            "a.mkv",
            "yuv420p10le",
            "bt2020",
            False,
            10,
            ("-vf", "setparams=colorspace=bt2020nc", "-c:v", "ffv1"),
        ),
    ),
    Case(
        "untagged video of 720 lines",
        "taken as BT.709",
        "",
        ("a.mkv", "yuv420p", "bt709", False, 8, ("-c:v", "ffv1"), (1280, 720)),
    ),
    Case(
        "untagged video of 480 lines",
        "taken as BT.601",
        "",
        ("a.mkv", "yuv420p", "bt601", False, 8, ("-c:v", "ffv1"), (640, 480)),
    ),
)
def test_colours_by_depth_range_and_matrix(case, tmp_path):
    """Within 2 of 255 of the colour that the planes were computed from."""
    name, *planes, encoder = case.given[:6]
    size = case.given[6] if len(case.given) > 6 else (64, 48)
    path = raw(tmp_path / name, COLOR, *planes, *encoder, size=size)
    frames = list(video.read_frames(path, 9))
    assert len(frames) == 3 and frames[0].shape == (size[1], size[0], 3)
    assert frames[0].dtype == np.uint8
    assert np.abs(np.stack(frames).astype(int) - COLOR).max() <= 2
    meta = video.probe(path)
    assert (meta["frames"], meta["height"], meta["width"]) == (3, size[1], size[0])


def tagged(transfer: str):
    tags = f"color_trc={transfer}:color_primaries=bt2020:colorspace=bt2020nc"
    return ("-vf", f"format=yuv420p10le,setparams={tags}", *LOSSLESS)


@cases(
    Case(
        "HDR10 video (PQ)", "refused", "HDR (PQ); tone-map it to BT.709 first…", tagged("smpte2084")
    ),
    Case(
        "HLG video of a phone",
        "refused",
        "HDR (HLG); tone-map it to BT.709 first…",
        tagged("arib-std-b67"),
    ),
)
def test_hdr_is_refused_by_name(case, tmp_path):
    path = flat(tmp_path / "a.mkv", *case.given)
    for look in (video.probe, lambda path: list(video.read_frames(path, 2))):
        with pytest.raises(ValueError) as error:
            look(path)
        case.check(str(error.value))


@cases(
    Case("sample aspect 2:1", "square pixels, twice as wide", "", ("2/1", 0, (48, 128))),
    Case("sample aspect 8:9 (DV)", "square pixels, taller", "", ("8/9", 0, (54, 64))),
    Case("a phone's video, rotated by 90°", "upright", "", ("1/1", 90, (64, 48))),
    Case("upside down (180°)", "upright", "", ("1/1", 180, (48, 64))),
    Case(
        "rotated by 270° with sample aspect 2:1",
        "upright, square pixels",
        "",
        ("2/1", 270, (128, 48)),
    ),
)
def test_shape_is_as_a_player_shows_it(case, tmp_path):
    """The frame's red left half ends where ffmpeg's own autorotation puts it."""
    aspect, turn, size = case.given
    half = "color=red:s=32x48:r=8[a];color=blue:s=32x48:r=8[b];[a][b]hstack"
    plain, path = tmp_path / "plain.mp4", tmp_path / "a.mp4"
    codec = ("-c:v", "libx264", "-qp", "0", "-pix_fmt", "yuv444p")
    ffmpeg("-filter_complex", half + f",setsar={aspect}", "-frames:v", 3, *codec, plain)
    ffmpeg("-display_rotation", turn, "-i", plain, "-c", "copy", path)
    (frame, *_) = video.read_frames(path, 1)
    assert frame.shape == (*size, 3)
    meta = video.probe(path)
    assert (meta["height"], meta["width"]) == size
    ffmpeg(
        "-i", path, "-frames:v", 1, "-vf", f"scale={size[1]}:{size[0]},setsar=1", tmp_path / "a.png"
    )
    want = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    assert (np.abs(frame - want) > 40).mean() < 0.06  # but for the edge between the halves


def grey16(path):
    levels = np.linspace(0, 65535, 32 * 24).astype(np.uint16).reshape(24, 32)
    Image.fromarray(levels).save(path)
    return np.repeat((levels / 257).round()[..., None], 3, 2)


def palette(path):
    image = Image.new("P", (32, 24), 1)
    image.putpalette([255, 0, 0, 10, 200, 30])
    image.save(path)
    return np.broadcast_to((10, 200, 30), (24, 32, 3))


def clear_palette(path):
    image = Image.new("P", (32, 24), 0)
    image.putpalette([255, 0, 0, 10, 200, 30])
    image.save(path, transparency=0)
    return np.full((24, 32, 3), 255)


def alpha(path):
    Image.new("RGBA", (32, 24), (200, 0, 100, 51)).save(path)
    return np.broadcast_to((244, 204, 224), (24, 32, 3))  # a fifth of it over white


def grey_alpha(path):
    Image.new("LA", (32, 24), (0, 0)).save(path)
    return np.full((24, 32, 3), 255)


def cmyk(path):
    Image.new("CMYK", (32, 24), (255, 0, 0, 0)).save(path, quality=100)
    return np.broadcast_to((0, 255, 255), (24, 32, 3))


@cases(
    Case("16-bit grey PNG", "scaled to 8 bits", "", ("a.png", grey16)),
    Case("16-bit grey TIFF", "scaled to 8 bits", "", ("a.tif", grey16)),
    Case("palette image", "its colours", "", ("a.png", palette)),
    Case("palette image with a transparent colour", "white there", "", ("a.png", clear_palette)),
    Case("image with alpha", "over white", "", ("a.png", alpha)),
    Case("webp with alpha", "over white", "", ("a.webp", alpha)),
    Case("grey image with alpha", "over white", "", ("a.png", grey_alpha)),
    Case("CMYK JPEG of print", "RGB", "", ("a.jpg", cmyk)),
)
def test_images_of_every_mode(case, tmp_path):
    name, make = case.given
    want = make(tmp_path / name)
    found = video.read_image(tmp_path / name)
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found, want, atol=2 if name.endswith((".jpg", ".webp")) else 1)
    (frame,) = video.read_frames(tmp_path / name, 5)
    np.testing.assert_array_equal(frame, found)
    assert video.probe(tmp_path / name)["fps"] == 0


@cases(
    Case("animated GIF", "its frames, by their durations", "", "a.gif"),
    Case("animated WebP", "its frames, by their durations", "", "a.webp"),
    Case("animated PNG", "its frames, by their durations", "", "a.png"),
)
def test_animations_are_clips(case, tmp_path):
    """Red for 100 ms, green for 300 ms, blue for 100 ms: at 10 a second r g g g b."""
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    first, *rest = (Image.new("RGB", (32, 24), color) for color in colors)
    kind = {"lossless": True} if case.given.endswith("webp") else {}
    path = tmp_path / case.given
    first.save(path, save_all=True, append_images=rest, duration=[100, 300, 100], **kind)
    assert [tuple(frame[0, 0]) for frame in video.read_frames(path, 9)] == colors
    found = [tuple(frame[0, 0]) for frame in video.read_frames(path, 9, fps=10)]
    assert found == [colors[n] for n in (0, 1, 1, 1, 2)]
    meta = video.probe(path)
    assert (meta["frames"], meta["seconds"]) == (3, 0.5) and meta["fps"] == pytest.approx(6)


def stamped(path, times, offset=0.0):
    """Frames of grey levels 20, 40, … shown at the given seconds."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("ffv1", 1000)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "gray"
        for number, time in enumerate(times):
            level = np.full((24, 32), 20 * (number + 1), np.uint8)
            frame = av.VideoFrame.from_ndarray(level, format="gray")
            frame.pts, frame.time_base = round(1000 * (time + offset)), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


@cases(
    Case(
        "variable frame rate",
        "retimed by time stamps",
        "",
        ((0, 0.1, 0.4, 0.5), 0, 10, [0, 1, 1, 1, 2, 3]),
    ),
    Case(
        "a start offset of 5 s",
        "counted from its first frame",
        "",
        ((0, 0.1, 0.2), 5, 10, [0, 1, 2]),
    ),
    Case(
        "more frames than wanted", "the nearest ones", "", ((0, 0.05, 0.1, 0.15), 0, 10, [0, 2, 3])
    ),
)
def test_retiming_follows_time_stamps(case, tmp_path):
    times, offset, fps, want = case.given
    path = stamped(tmp_path / "a.mkv", times, offset)
    assert [round(f[0, 0, 0] / 20) - 1 for f in video.read_frames(path, 99)] == [*range(len(times))]
    found = [round(frame[0, 0, 0] / 20) - 1 for frame in video.read_frames(path, 99, fps)]
    assert found[: len(want)] == want and set(found[len(want) :]) <= {want[-1]}


def sound(path):
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", "-c:a", "aac", path)


def cover(path):
    Image.new("RGB", (64, 64), "red").save(path.with_suffix(".cover.png"))
    sound(path.with_suffix(".m4a"))
    given = ("-i", path.with_suffix(".m4a"), "-i", path.with_suffix(".cover.png"))
    ffmpeg(*given, "-map", 0, "-map", 1, "-c", "copy", "-disposition:v", "attached_pic", path)


def part(path, share: float):
    whole = path.with_name("whole" + path.suffix)
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x48:r=8", "-frames:v", 65, "-c:v", "mpeg4", whole)
    path.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])


@cases(
    Case("sound only in an .mp4", "refused", "no video in it (sound only)", ("a.mp4", sound)),
    Case(
        "sound with a cover picture",
        "refused",
        "no video in it (sound and a cover picture)",
        ("a.m4a.mp4", cover),
    ),
    Case(
        "an .mp4 cut before its index",
        "refused",
        "not readable as a video (…",
        ("a.mp4", lambda p: part(p, 0.5)),
    ),
    Case(
        "an .mkv cut in the middle",
        "refused",
        "cut short: … of 8.12 seconds are there (… frames)…",
        ("a.mkv", lambda p: part(p, 0.5)),
    ),
    Case(
        "an .avi cut in the middle",
        "refused",
        "does not decode after its first … frames (…",
        ("a.avi", lambda p: part(p, 0.5)),
    ),
    Case(
        "an empty file",
        "refused",
        "not readable as a video (…",
        ("a.mp4", lambda p: p.write_bytes(b"")),
    ),
    Case(
        "a text file named .mp4",
        "refused",
        "not readable as a video (…",
        ("a.mp4", lambda p: p.write_text("<html>not found</html>")),
    ),
    Case(
        "a text file named .png",
        "refused",
        "… is not readable as an image (…",
        ("a.png", lambda p: p.write_text("not found")),
    ),
    Case(
        "a cut JPEG",
        "refused",
        "… is not readable as an image (…truncated…",
        ("a.jpg", lambda p: p.write_bytes(jpeg()[:-400])),
    ),
)
def test_what_is_no_video_says_so(case, tmp_path):
    name, make = case.given
    make(tmp_path / name)
    for look in (video.probe, lambda path: list(video.read_frames(path, 99))):
        with pytest.raises(ValueError) as error:
            look(tmp_path / name)
        case.check(str(error.value))
        assert "\n" not in str(error.value)


def jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    Image.fromarray(noise).save(data := io.BytesIO(), "JPEG")
    return data.getvalue()


@cases(
    Case("samples of 480 lines", "written and tagged as BT.601", "", (480, 640, 6)),
    Case("samples of 720 lines", "written and tagged as BT.709", "", (720, 1280, 1)),
    Case("samples of 719 lines", "written and tagged as BT.601", "", (719, 640, 6)),
)
def test_written_videos_read_back(case, tmp_path):
    """Flat patches within 2 of 255, by us and by the ffmpeg program; equal bytes each time."""
    height, width, tag = case.given
    colors = np.array([(200, 30, 30), (20, 180, 40), (30, 40, 210), (128, 128, 128), (250, 240, 5)])
    frame = np.repeat(np.repeat(colors[None], height, 0), width // 5, 1).astype(np.uint8)
    path = tmp_path / "a.mp4"
    video.write_mp4(path, np.stack([frame] * 3), 16)
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.color_primaries, codec.color_trc, codec.colorspace) == (tag, tag, tag)
        assert codec.color_range == 1 and container.streams.video[0].average_rate == 16
    ffmpeg("-i", path, "-frames:v", 1, tmp_path / "a.png")
    theirs = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    for read in (next(video.read_frames(path, 1)), theirs):
        for number, color in enumerate(colors):
            middle = width // 10 * (2 * number + 1)
            patch = read[20:-20, middle - 20 : middle + 20].astype(int)
            assert np.abs(patch - color).max() <= 2, (number, patch[0, 0])
    video.write_mp4(tmp_path / "b.mp4", np.stack([frame] * 3), 16)
    assert (tmp_path / "b.mp4").read_bytes() == path.read_bytes()


def test_the_container_may_count_more_frames_than_decode(tmp_path):
    path = pathlib.Path(tmp_path / "a.mkv")
    flat(path, "-c:v", "ffv1", frames=5)
    meta = video.probe(path)
    assert meta["frames"] == 5 and meta["said"] in (0, 5)
