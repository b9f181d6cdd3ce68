"""Draw the first frames that evaluations of image-to-video models start from.

    python scripts/make_previews.py [FOLDER]

FOLDER, by default that of the package, gets 00.jpg, 01.jpg, … of 832x480 pixels, one for each
function of SCENES in order, whose docstrings are the prompts: images.txt has them. Everything is
drawn here, at twice the size; noise is seeded. Lengths are pixels of the written image.
"""

import math
import pathlib
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WIDTH, HEIGHT, SCALE = 832, 480, 2
FOLDER = pathlib.Path(__file__).parents[1] / "wanjax" / "assets" / "previews"
_Y, _X = np.mgrid[: HEIGHT * SCALE, : WIDTH * SCALE] / SCALE


def main(folder=FOLDER) -> None:
    """Write the images and images.txt."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for i, scene in enumerate(SCENES):
        render(scene).save(folder / f"{i:02d}.jpg", quality=80, progressive=True)
    lines = ["# The prompts of 00.jpg, 01.jpg, …; written by scripts/make_previews.py."]
    lines += [" ".join((scene.__doc__ or "").split()) for scene in SCENES]
    (folder / "images.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def render(scene) -> Image.Image:
    """A scene in the size of the written image."""
    return scene().resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def rolling_ball():
    """A red ball starts to roll to the right along a wooden table, faster and faster, until it
    drops over the edge. The camera does not move."""
    image = vertical((196, 206, 204), (222, 226, 220))
    glow(image, 150, 60, 420, (255, 250, 232))
    table = grain(vertical((0, 0, 0), (178, 124, 78), (136, 88, 50)), seed=2)
    paint(image, "polygon", [(0, 316), (660, 316), (730, HEIGHT), (0, HEIGHT)], table)
    paint(image, "polygon", [(660, 316), (676, 330), (748, HEIGHT), (730, HEIGHT)], (92, 58, 34))
    paint(image, "ellipse", box(158, 366, 330, 404), (60, 34, 20), blur=8, alpha=0.7)
    ball(image, 230, 322, 64, (206, 38, 36))
    return image


def sailing_boat():
    """A boat with a white sail glides from left to right across a calm sea in the evening. Its
    reflection breaks up in the small waves, and gulls circle in the distance."""
    image = vertical((72, 96, 160), (236, 150, 110), (255, 214, 150), (255, 214, 150))
    glow(image, 610, 262, 150, (255, 240, 190))
    ball(image, 610, 258, 34, (255, 236, 180), shade=0.05)
    water(image, 288, (214, 140, 112), (34, 52, 96), seed=1)
    for i in range(34):  # the path of the sun
        y = 292 + 5 * i
        half = (6 + i * 1.6) * (0.6 + 0.4 * math.sin(i * 2.3))
        paint(image, "rectangle", box(610 - half, y, 610 + half, y + 2), (255, 226, 160), alpha=0.7)
    paint(image, "polygon", [(190, 320), (310, 320), (290, 346), (206, 346)], (120, 52, 40))
    paint(image, "line", [(246, 320), (246, 168)], (70, 44, 32), width=4)
    paint(image, "polygon", [(252, 174), (252, 308), (326, 308)], (250, 246, 236))
    paint(image, "polygon", [(240, 188), (240, 308), (186, 308)], (226, 220, 212))
    paint(
        image, "polygon", [(196, 350), (300, 350), (270, 440)], (236, 214, 200), blur=4, alpha=0.4
    )
    for x, y in ((430, 120), (474, 142), (520, 108)):
        paint(image, "arc", box(x, y, x + 18, y + 10), (60, 60, 80), width=2, angles=(180, 350))
        paint(
            image, "arc", box(x + 17, y, x + 35, y + 10), (60, 60, 80), width=2, angles=(190, 360)
        )
    return image


def candle():
    """The flame of a candle flickers in a draught on a dark table. Its glow wavers on the wall
    behind it, and a thread of smoke rises."""
    image = vertical((26, 20, 24), (38, 27, 26), (30, 22, 20))
    glow(image, 416, 196, 330, (226, 132, 56), alpha=0.75)
    paint(image, "rectangle", box(0, 392, WIDTH, HEIGHT), vertical((40, 24, 16), (88, 52, 30)))
    glow(image, 416, 404, 200, (255, 176, 92), alpha=0.35)
    wax = horizontal((206, 186, 150), (250, 238, 208), (196, 170, 130), around=416, half=46)
    paint(image, "ellipse", box(338, 398, 494, 432), (96, 88, 84))
    paint(image, "rectangle", box(372, 236, 460, 412), wax)
    paint(image, "ellipse", box(372, 400, 460, 424), wax)
    paint(image, "ellipse", box(372, 226, 460, 248), (255, 240, 206))
    paint(image, "line", [(416, 238), (418, 214)], (40, 30, 26), width=4)
    glow(image, 417, 182, 80, (255, 210, 110), alpha=0.9)
    paint(image, "polygon", flame(417, 224, 22, 92), (255, 190, 70), blur=3)
    paint(image, "polygon", flame(417, 222, 14, 64), (255, 244, 196), blur=3)
    return image


def open_road():
    """The camera drives forward along a straight road towards snowy mountains. The dashes of the
    centre line pass below and the posts at the roadside rush by."""
    image = vertical((92, 152, 214), (190, 218, 236), (230, 236, 236), (230, 236, 236))
    clouds(image, seed=4, top=20, bottom=170)
    ridge(image, 250, 110, (132, 148, 172), seed=5, snow=True)
    ridge(image, 262, 40, (92, 116, 96), seed=6)
    ground = grain(vertical((0, 0, 0), (150, 158, 88), (106, 122, 58)), seed=7)
    paint(image, "rectangle", box(0, 262, WIDTH, HEIGHT), ground)
    asphalt = vertical((0, 0, 0), (116, 118, 122), (72, 74, 78))
    paint(image, "polygon", [(410, 262), (422, 262), (716, HEIGHT), (116, HEIGHT)], asphalt)
    for near in (1.0, 0.56, 0.33, 0.2, 0.12, 0.07):
        far, y = near * 0.76, lambda depth: 262 + 218 * depth
        dash = [(416 - 8 * near, y(near)), (416 + 8 * near, y(near)),
                (416 + 8 * far, y(far)), (416 - 8 * far, y(far))]  # fmt: skip
        paint(image, "polygon", dash, (240, 232, 200))
        for side in (-1, 1):
            x, foot = 416 + side * 350 * near, y(near * 0.9)
            post = box(x - 6 * near, foot - 70 * near, x + 6 * near, foot)
            paint(image, "rectangle", post, (244, 244, 240))
    return image


def windmill():
    """The four sails of a windmill turn steadily in the wind above rows of tulips that sway, while
    white clouds move across the sky."""
    image = vertical((104, 170, 226), (196, 224, 240), (220, 234, 240))
    clouds(image, seed=8, top=30, bottom=220)
    paint(image, "rectangle", box(0, 330, WIDTH, HEIGHT), vertical((0, 0, 0), (84, 140, 60)))
    brick = horizontal((150, 86, 62), (196, 122, 88), (112, 62, 46), around=560, half=70)
    paint(image, "polygon", [(522, 168), (598, 168), (634, 352), (486, 352)], brick)
    paint(image, "polygon", [(512, 172), (560, 122), (608, 172)], (84, 58, 48))
    paint(image, "rectangle", box(544, 308, 576, 352), (66, 44, 36))
    for turn in range(4):
        angle = 0.5 + turn * math.pi / 2
        along = np.array([math.cos(angle), math.sin(angle)])
        across = np.array([-along[1], along[0]])
        hub = np.array([560, 168])
        cloth = [hub + 30 * along, hub + 146 * along,
                 hub + 146 * along + 30 * across, hub + 30 * along + 30 * across]  # fmt: skip
        paint(image, "polygon", [tuple(p) for p in cloth], (246, 240, 224))
        paint(image, "line", [tuple(hub), tuple(hub + 148 * along)], (82, 58, 44), width=5)
    ball(image, 560, 168, 10, (90, 64, 50))
    rng = np.random.default_rng(9)
    for row in range(7):
        y, size = 356 + 3.2 * row**2, 4 + 2.2 * row
        colour = ((214, 44, 60), (250, 196, 50), (236, 120, 160))[row % 3]
        for x in np.arange(-10, WIDTH + 10, 2.2 * size):
            x, top = x + rng.uniform(-2, 2), y + rng.uniform(-2, 2)
            paint(image, "line", [(x, top), (x, top + 2.4 * size)], (52, 108, 48), width=2)
            paint(image, "ellipse", box(x - size / 2, top - size, x + size / 2, top), colour)
    return image


def aquarium():
    """An orange fish swims through an aquarium from left to right with quick beats of its tail.
    Water plants wave, and bubbles rise in a row."""
    image = vertical((70, 170, 200), (30, 112, 160), (14, 62, 108))
    for x in (120, 330, 560):
        beam = [(x, 0), (x + 90, 0), (x + 10, HEIGHT), (x - 190, HEIGHT)]
        paint(image, "polygon", beam, (190, 236, 240), blur=18, alpha=0.16)
    sand = grain(vertical((0, 0, 0), (0, 0, 0), (214, 190, 136)), seed=14)
    paint(image, "ellipse", box(-160, 416, 1000, 640), sand)
    for x, tall in ((90, 210), (130, 150), (650, 260), (700, 190), (748, 240)):
        stem = [(x + 14 * math.sin(s / 26 + x), 440 - s) for s in range(0, tall, 4)]
        paint(image, "line", stem, (36, 132, 72), width=9)
    for i in range(8):
        x, y, r = 600 + 6 * math.sin(2.2 * i), 400 - 46 * i, 4 + i
        paint(image, "ellipse", box(x - r, y - r, x + r, y + r), (220, 246, 250), width=2)
    fins = (222, 92, 30)
    paint(image, "polygon", [(276, 240), (190, 186), (210, 240), (190, 294)], fins)
    paint(image, "polygon", [(316, 196), (370, 146), (418, 196)], fins)
    scales = radial(370, 206, 170, (255, 184, 72), (226, 96, 26))
    paint(image, "ellipse", box(262, 180, 452, 300), scales)
    paint(image, "polygon", [(340, 258), (300, 316), (388, 276)], fins)
    for x in (330, 384):
        paint(
            image, "arc", box(x - 26, 190, x + 26, 290), (255, 240, 220), width=12, angles=(-70, 70)
        )
    ball(image, 424, 226, 11, (250, 250, 250), shade=0.1)
    ball(image, 427, 226, 6, (20, 20, 24))
    return image


def swinging_sign():
    """A wooden sign with the word "OPEN" swings to and fro on two chains in the wind in front of a
    brick wall. Its shadow moves along with it."""
    image = vertical((150, 82, 64), (128, 66, 52))
    rng = np.random.default_rng(12)
    for row in range(16):
        for column in range(-1, 13):
            x, y = 70 * column + 35 * (row % 2), 30 * row
            colour = tuple((np.array((158, 84, 64)) * rng.uniform(0.85, 1.12)).astype(int))
            paint(image, "rectangle", box(x + 2, y + 2, x + 68, y + 28), colour)
    paint(image, "rectangle", box(246, 176, 606, 356), (40, 18, 14), blur=14, alpha=0.6)
    paint(image, "rectangle", box(120, 48, 712, 66), (44, 42, 44))
    for x in (276, 556):
        for y in range(68, 162, 12):
            paint(image, "ellipse", box(x - 5, y, x + 5, y + 15), (190, 184, 172), width=3)
    wood = grain(vertical((196, 150, 98), (170, 122, 76)), seed=13)
    paint(image, "rectangle", box(236, 160, 596, 340), wood)
    paint(image, "rectangle", box(246, 170, 586, 330), (84, 52, 32), width=4)
    letters = Image.new("L", image.size)
    font = ImageFont.load_default(110 * SCALE)
    ImageDraw.Draw(letters).text((416 * SCALE, 250 * SCALE), "OPEN", 255, font, anchor="mm")
    image.paste((62, 34, 22), mask=letters)
    return image


def newtons_cradle():
    """The lifted steel ball of a Newton's cradle swings down and strikes the row, and the ball at
    the other end flies up. Both swing in turn while the balls between them hang still."""
    image = vertical((58, 66, 84), (92, 102, 122), (120, 128, 140))
    paint(image, "rectangle", box(0, 390, WIDTH, HEIGHT), vertical((86, 62, 44), (120, 88, 62)))
    paint(image, "ellipse", box(160, 408, 672, 440), (40, 28, 20), blur=10, alpha=0.6)
    for x in (186, 646):
        paint(image, "rectangle", box(x - 5, 70, x + 5, 420), (205, 208, 214))
    paint(image, "rectangle", box(181, 64, 651, 74), (222, 224, 230))
    for i in range(5):
        x = 328 + 44 * i
        bob = (x, 330) if i else (x - 260 * math.sin(0.4), 70 + 260 * math.cos(0.4))
        paint(image, "line", [(x, 72), bob], (225, 225, 230), width=1)
        ball(image, *bob, 21, (190, 194, 202))
    return image


def pond():
    """Rain begins to fall on a quiet pond. Rings spread from every drop, cross each other and rock
    the leaves of the water lilies."""
    image = vertical((54, 92, 88), (38, 78, 82), (22, 52, 62))
    rings(image, ((160, 120, 60), (520, 90, 44), (690, 230, 84), (330, 250, 30)))
    for x, y, r in ((250, 190, 70), (590, 330, 104), (120, 380, 88), (470, 200, 42)):
        paint(image, "ellipse", box(x - r, y - 0.42 * r, x + r, y + 0.5 * r), (10, 34, 36), 5, 0.5)
        leaf = [(x, y)] + [(x + r * math.cos(a), y + 0.45 * r * math.sin(a))
                           for a in np.linspace(0.35, 2 * math.pi - 0.05, 60)]  # fmt: skip
        paint(image, "polygon", leaf, radial(x - r / 3, y, r * 1.4, (128, 176, 84), (52, 112, 58)))
    for lean in (-50, -25, 0, 25, 50):
        tip = (590 + lean, 262 + abs(lean) * 0.5)
        petal = [(578 + lean * 0.3, 314), tip, (602 + lean * 0.3, 314)]
        paint(image, "polygon", petal, radial(590, 314, 70, (250, 220, 230), (232, 120, 160)))
    ball(image, 590, 312, 9, (250, 206, 80))
    return image


def winter_cottage():
    """Snow falls thickly on a cottage in the blue light of a winter evening. Smoke rises from the
    chimney, and the warm light in the windows flickers."""
    image = vertical((28, 38, 78), (72, 88, 136), (140, 150, 186))
    ridge(image, 300, 60, (56, 70, 112), seed=10)
    for x, y, s in ((60, 330, 1.2), (150, 316, 0.9), (720, 326, 1.3), (640, 312, 0.8)):
        fir(image, x, y, s, (26, 48, 60), (214, 224, 240))
    paint(image, "ellipse", box(-200, 296, 1032, 700), vertical((0, 0, 0), (176, 188, 222)))
    for i in range(6):
        x, y, r = 478 + 9 * i + 4 * math.sin(2 * i), 150 - 22 * i, 9 + 4 * i
        puff = box(x - r, y - r, x + r, y + r)
        paint(image, "ellipse", puff, (176, 184, 208), 5, 0.5 - 0.06 * i)
    paint(image, "rectangle", box(462, 160, 494, 240), (92, 60, 58))
    paint(image, "rectangle", box(300, 248, 540, 370), vertical((60, 40, 40), (116, 76, 62)))
    paint(image, "polygon", [(276, 256), (350, 166), (490, 166), (564, 256)], (228, 234, 246))
    for x in (326, 466):
        glow(image, x + 24, 306, 70, (255, 190, 96), alpha=0.6)
        paint(image, "rectangle", box(x, 282, x + 48, 330), (255, 206, 120))
        paint(image, "line", [(x + 24, 282), (x + 24, 330)], (84, 54, 46), width=4)
        paint(image, "line", [(x, 306), (x + 48, 306)], (84, 54, 46), width=4)
    paint(image, "rectangle", box(398, 294, 440, 370), (70, 44, 42))
    rng = np.random.default_rng(11)
    for x, y, r in rng.uniform((0, 0, 0.8), (WIDTH, HEIGHT, 2.6), (170, 3)):
        dot(image, x, y, r, (226, 230, 246))
    return image


def balloon():
    """A striped hot-air balloon rises slowly above green hills and drifts to the right, while its
    shadow glides across the meadow."""
    image = vertical((78, 142, 210), (176, 210, 236), (246, 232, 206))
    clouds(image, seed=15, top=40, bottom=230)
    for y, tall, colour in ((352, 46, (120, 160, 116)), (392, 50, (92, 142, 74)),
                            (436, 50, (66, 120, 52))):  # fmt: skip
        ridge(image, y, tall, colour, seed=y, smooth=True)
    paint(image, "ellipse", box(210, 424, 330, 444), (30, 64, 26), blur=8, alpha=0.5)
    stripes = ((204, 50, 46), (250, 226, 180), (228, 140, 40))
    paint(image, "polygon", [(250, 250), (342, 250), (312, 312), (280, 312)], (228, 140, 40))
    for i, half in enumerate((100, 78, 52, 24)):
        paint(image, "ellipse", box(296 - half, 70, 296 + half, 276), stripes[i % 3])
    shadow = radial(250, 130, 200, (0, 0, 0), (40, 20, 10))
    paint(image, "ellipse", box(196, 70, 396, 276), shadow, alpha=0.18)
    for x in (282, 310):
        paint(image, "line", [(x, 308), (x, 334)], (70, 50, 40), width=2)
    paint(image, "rectangle", box(278, 332, 314, 358), grain(vertical((140, 96, 54)), seed=16))
    return image


def toy_car():
    """A blue toy car drives across a children's carpet from left to right, its wheels turning,
    and pushes over a tower of coloured blocks."""
    image = vertical((240, 222, 196), (232, 210, 182))
    paint(image, "rectangle", box(0, 300, WIDTH, HEIGHT), grain(vertical((122, 160, 150)), seed=17))
    paint(image, "ellipse", box(90, 388, 360, 420), (50, 70, 66), blur=8, alpha=0.7)
    body = vertical((70, 140, 226), (70, 140, 226), (30, 84, 170))
    paint(image, "polygon", [(150, 318), (176, 264), (276, 264), (308, 318)], body)
    paint(image, "polygon", [(170, 314), (188, 276), (222, 276), (222, 314)], (206, 232, 246))
    paint(image, "polygon", [(232, 314), (232, 276), (268, 276), (288, 314)], (206, 232, 246))
    paint(image, "rounded_rectangle", box(100, 314, 350, 376), body)
    paint(image, "ellipse", box(332, 326, 350, 346), (255, 236, 160))
    for x in (158, 294):
        ball(image, x, 378, 32, (44, 44, 48))
        ball(image, x, 378, 14, (206, 208, 212))
    paint(image, "ellipse", box(560, 392, 730, 416), (50, 70, 66), blur=8, alpha=0.7)
    blocks = ((572, 344, (214, 60, 52)), (640, 344, (246, 196, 60)), (606, 282, (84, 164, 84)),
              (612, 220, (160, 92, 176)))  # fmt: skip
    for x, y, colour in blocks:
        dark = tuple(int(c * 0.7) for c in colour)
        paint(image, "rectangle", box(x, y, x + 62, y + 60), colour)
        side = [(x + 62, y), (x + 76, y - 12), (x + 76, y + 48), (x + 62, y + 60)]
        paint(image, "polygon", side, dark)
        top = [(x, y), (x + 14, y - 12), (x + 76, y - 12), (x + 62, y)]
        paint(image, "polygon", top, tuple(min(255, int(c * 1.15)) for c in colour))
    return image


def kite():
    """A kite with a long tail dances in the strong wind above a beach, dips, and climbs again while
    waves run up the sand."""
    image = vertical((62, 140, 214), (150, 204, 240), (226, 240, 246))
    clouds(image, seed=18, top=120, bottom=270)
    water(image, 300, (96, 170, 196), (40, 118, 156), seed=19)
    shore = [(0, 408)] + [(x, 396 + 10 * math.sin(x / 70)) for x in range(0, WIDTH + 8, 8)]
    foam = [(x, y - 7) for x, y in shore[1:]] + [(x, y + 3) for x, y in reversed(shore[1:])]
    sand = grain(vertical((0, 0, 0), (0, 0, 0), (0, 0, 0), (230, 206, 156)), seed=20)
    paint(image, "polygon", [*shore, (WIDTH, HEIGHT), (0, HEIGHT)], sand)
    paint(image, "polygon", foam, (248, 250, 250), blur=2)
    string = [(500 - 4.1 * s, 170 + 3.4 * s - 0.02 * (s - 45) ** 2 + 40) for s in range(0, 91)]
    paint(image, "line", string, (250, 250, 250), width=1)
    tail = [(536 + 1.6 * s, 214 + 0.5 * s + 16 * math.sin(s / 12)) for s in range(0, 120, 2)]
    paint(image, "line", tail, (244, 200, 60), width=4)
    corners = [(470, 92), (560, 112), (540, 216), (440, 170)]
    for i, colour in enumerate(((226, 56, 56), (250, 206, 60), (56, 150, 90), (240, 130, 40))):
        paint(image, "polygon", [corners[i], corners[(i + 1) % 4], (502, 148)], colour)
    return image


def falling_leaves():
    """A gust of wind shakes an autumn tree on a hill. Its orange leaves come off, whirl through the
    air and settle on the grass."""
    image = vertical((150, 176, 200), (226, 214, 190), (250, 226, 180))
    ridge(image, 330, 60, (170, 160, 130), seed=21, smooth=True)
    hill = grain(vertical((0, 0, 0), (0, 0, 0), (150, 152, 70), (100, 110, 48)), seed=22)
    paint(image, "ellipse", box(-200, 350, 1000, 760), hill)
    paint(image, "polygon", [(392, 372), (404, 230), (428, 230), (446, 372)], (84, 58, 42))
    for x in (350, 480):
        paint(image, "line", [(416, 270), (x, 190)], (84, 58, 42), width=9)
    rng = np.random.default_rng(23)
    colours = np.array([(226, 120, 34), (240, 164, 50), (196, 78, 30), (214, 140, 40)])
    for _ in range(620):
        angle, reach = rng.uniform(0, 2 * math.pi), math.sqrt(rng.uniform())
        x, y = 416 + 150 * reach * math.cos(angle), 160 + 104 * reach * math.sin(angle)
        dot(image, x, y, rng.uniform(6, 13), colours[rng.integers(4)] * rng.uniform(0.8, 1.1))
    for x, y in [*rng.uniform((500, 150), (800, 360), (22, 2)),
                 *rng.uniform((250, 372), (640, 440), (60, 2))]:  # fmt: skip
        dot(image, x, y, rng.uniform(3, 5), colours[rng.integers(4)])
    return image


def skyline():
    """A time lapse of a city at the end of the day: the sky turns from orange to deep blue, and the
    windows of the towers light up one after another."""
    image = vertical((48, 56, 112), (206, 104, 96), (255, 190, 110), (255, 210, 140))
    glow(image, 300, 330, 260, (255, 226, 160), alpha=0.7)
    rng = np.random.default_rng(24)
    for base, colour, tall in ((380, (120, 84, 104), 150), (420, (64, 54, 86), 240)):
        x = -10.0
        while x < WIDTH:
            wide, top = rng.uniform(46, 90), base - rng.uniform(0.3, 1) * tall
            paint(image, "rectangle", box(x, top, x + wide, 440), colour)
            for wx in np.arange(x + 8, x + wide - 10, 14):
                for wy in np.arange(top + 10, 430, 18):
                    lit = rng.uniform() < 0.16
                    shown = (255, 220, 140) if lit else tuple(int(c * 0.8) for c in colour)
                    paint(image, "rectangle", box(wx, wy, wx + 6, wy + 9), shown)
            x += wide + rng.uniform(0, 8)
    water(image, 436, (196, 120, 104), (58, 50, 90), seed=25)
    return image


def moonlit_bay():
    """A shooting star crosses the night sky above a bay and fades away. The moon's reflection
    trembles on the water and the beam of the lighthouse sweeps around."""
    image = vertical((8, 12, 36), (22, 34, 78), (58, 76, 124), (58, 76, 124))
    rng = np.random.default_rng(26)
    for x, y, r in rng.uniform((0, 0, 0.4), (WIDTH, 270, 1.3), (150, 3)):
        dot(image, x, y, r, (236, 240, 255))
    glow(image, 220, 110, 170, (170, 186, 226), alpha=0.6)
    ball(image, 220, 110, 40, (240, 240, 226), shade=0.12)
    water(image, 310, (60, 80, 126), (10, 18, 46), seed=27)
    for i in range(26):
        y, half = 316 + 6 * i, (8 + i) * (0.6 + 0.4 * math.sin(i * 1.9))
        paint(image, "rectangle", box(220 - half, y, 220 + half, y + 2), (220, 226, 236), alpha=0.6)
    paint(image, "polygon", [(560, 340), (620, 292), (760, 286), (WIDTH, 300), (WIDTH, 350)],
          (16, 20, 36))  # fmt: skip
    paint(image, "polygon", [(690, 156), (870, 110), (870, 202)], (255, 240, 190), 6, 0.3)
    paint(image, "polygon", [(674, 170), (706, 170), (718, 296), (662, 296)], (222, 220, 226))
    for y in (196, 246):
        paint(image, "rectangle", box(668, y, 713, y + 22), (176, 52, 50))
    paint(image, "rectangle", box(676, 142, 704, 170), (255, 244, 190))
    paint(image, "polygon", [(668, 144), (690, 122), (712, 144)], (120, 36, 38))
    glow(image, 690, 156, 60, (255, 240, 190), alpha=0.7)
    return image


SCENES = (
    rolling_ball, sailing_boat, candle, open_road, windmill, aquarium, swinging_sign,
    newtons_cradle, pond, winter_cottage, balloon, toy_car, kite, falling_leaves, skyline,
    moonlit_bay,
)  # fmt: skip


# ---- what scenes are made of ----


def paint(image, shape: str, points, colour, blur=0.0, alpha=1.0, width=0, angles=()) -> None:
    """Paint a shape of PIL's ImageDraw in a colour, or in what another image has there.

    points: in pixels of the written image; blur: of its edge; width: of the line, 0 fills.
    """
    textured = isinstance(colour, Image.Image)
    plain = not (textured or blur) and alpha == 1
    target, full = (image, colour) if plain else (Image.new("L", image.size), round(255 * alpha))
    style = {"outline" if width and shape not in ("line", "arc") else "fill": full}
    style |= {"width": width * SCALE} if width else {}
    style |= {"line": {"joint": "curve"}, "rounded_rectangle": {"radius": 20 * SCALE}}.get(
        shape, {}
    )
    style |= {"start": angles[0], "end": angles[1]} if angles else {}
    getattr(ImageDraw.Draw(target), shape)([(x * SCALE, y * SCALE) for x, y in points], **style)
    if plain:
        return
    mask = target.filter(ImageFilter.GaussianBlur(blur * SCALE)) if blur else target
    image.paste(colour, (0, 0) if textured else None, mask)


def box(left, top, right, bottom):
    """The corners of a rectangle, or of the one around an ellipse."""
    return [(left, top), (right, bottom)]


def dot(image, x, y, r, colour) -> None:
    """A small disc."""
    paint(
        image, "ellipse", box(x - r, y - r, x + r, y + r), tuple(min(255, int(c)) for c in colour)
    )


def vertical(*colours) -> Image.Image:
    """A gradient from top to bottom through the colours at equal distances."""
    return _gradient(_Y / HEIGHT, colours)


def horizontal(*colours, around: float, half: float) -> Image.Image:
    """A gradient from left to right within `half` of `around`: a round column."""
    return _gradient((_X - around + half) / (2 * half), colours)


def radial(x, y, r, inner, outer) -> Image.Image:
    """A gradient from the colour at (x, y) to that at the distance r and beyond."""
    return _gradient(np.hypot(_X - x, _Y - y) / r, (inner, outer))


def ball(image, x, y, r, colour, shade=0.75) -> None:
    """A sphere, lit from the upper left; shade: how dark it gets."""
    light = tuple(int(c + (255 - c) * min(shade, 0.7)) for c in colour)
    dark = tuple(int(c * (1 - shade)) for c in colour)
    lit = _gradient(
        np.hypot(_X - x + 0.35 * r, _Y - y + 0.4 * r) / (1.5 * r), (light, colour, dark)
    )
    paint(image, "ellipse", box(x - r, y - r, x + r, y + r), lit)


def glow(image, x, y, r, colour, alpha=0.8) -> None:
    """A light that fades with the distance from (x, y) and is gone at r."""
    strength = np.clip(1 - np.hypot(_X - x, _Y - y) / r, 0, 1) ** 2 * alpha
    image.paste(colour, mask=Image.fromarray((255 * strength).astype(np.uint8)))


def clouds(image, seed: int, top: float, bottom: float) -> None:
    """White clouds between two heights."""
    thick = _noise(seed, (5, 6)) * 0.6 + _noise(seed + 1, (14, 18)) * 0.4
    middle, half = (top + bottom) / 2, (bottom - top) / 2
    near = np.clip(1 - ((_Y - middle) / half) ** 2, 0, 1)
    mask = np.clip((thick - 0.48) * 5, 0, 1) * near * 230
    image.paste((255, 255, 255), mask=Image.fromarray(mask.astype(np.uint8)))


def water(image, top: float, far, near, seed: int) -> None:
    """Water from the height `top` down: darker towards the front, with waves that grow."""
    depth = np.clip((_Y - top) / (HEIGHT - top), 0, 1)
    below = np.maximum(_Y - top, 0)
    waves = np.sin(3 * below**0.62 + 5 * _noise(seed, (40, 12)) + _X / 90) * (6 + 10 * depth)
    colours = np.asarray(far) + depth[..., None] * (np.asarray(near) - far) + waves[..., None]
    surface = Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8))
    paint(image, "rectangle", box(0, top, WIDTH, HEIGHT), surface)


def rings(image, places) -> None:
    """Rings of drops on water: (x, y, radius) of the outermost one."""
    for x, y, r in places:
        for part in (1.0, 0.68, 0.4):
            a, b = r * part, 0.45 * r * part
            paint(image, "ellipse", box(x - a, y - b, x + a, y + b), (168, 208, 200), width=2,
                  alpha=0.55)  # fmt: skip


def ridge(image, base, tall, colour, seed: int, snow=False, smooth=False) -> None:
    """Hills or mountains that stand on `base`, the highest `tall` pixels high."""
    rng, x = np.random.default_rng(seed), np.arange(0, WIDTH + 4, 4)
    waves = range(1, 4 if smooth else 24)
    height = sum(np.sin(x / WIDTH * 2 * np.pi * n + rng.uniform(0, 7)) / n**1.1 for n in waves)
    height = (height - height.min()) / (height.max() - height.min())
    if not smooth:
        height = np.abs(2 * height - 1) ** 0.8
    outline = [(float(a), float(base - tall * b)) for a, b in zip(x, height, strict=True)]
    paint(image, "polygon", [(0, HEIGHT), *outline, (WIDTH, HEIGHT)], colour)
    if snow:
        lower = [(a, min(base - 0.55 * tall + 6 * math.sin(a / 9), y + 0.5 * tall))
                 for a, y in outline]  # fmt: skip
        cap = [*outline, *((a, max(y, z)) for (a, y), (_, z) in
                           zip(reversed(lower), reversed(outline), strict=True))]  # fmt: skip
        paint(image, "polygon", cap, (242, 246, 250))


def fir(image, x, foot, size, colour, snow) -> None:
    """A fir tree with snow on its branches."""
    for i in range(4):
        y, half = foot - size * 34 * i, size * (46 - 9 * i)
        tip = (x, y - size * 52)
        paint(image, "polygon", [(x - half, y), (x + half, y), tip], colour)
        paint(
            image, "polygon", [(x - half, y), (x - half * 0.2, y - 6 * size), tip], snow, alpha=0.6
        )


def flame(x, foot, half, tall):
    """The outline of a flame."""
    s = np.linspace(0, 1, 40)
    wide = half * np.sin(np.pi * s**0.6) * (1 - 0.35 * s)
    lean, y = 5 * s**2, foot - tall * s
    left = [(float(a), float(b)) for a, b in zip(x - wide + lean, y, strict=True)]
    right = [(float(a), float(b)) for a, b in zip(x + wide + lean, y, strict=True)]
    return [*left, *reversed(right)]


def grain(image: Image.Image, seed: int) -> Image.Image:
    """The image with fine streaks, as of wood, cloth or grass."""
    streaks = _noise(seed, (120, 14)) * 0.7 + _noise(seed + 1, (40, 30)) * 0.3
    pixels = np.asarray(image) * (0.86 + 0.28 * streaks[..., None])
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _gradient(place, colours) -> Image.Image:
    """The colours at places in [0, 1], interpolated."""
    stops = np.linspace(0, 1, len(colours))
    channels = [np.interp(place, stops, [colour[c] for colour in colours]) for c in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _noise(seed: int, cells: tuple[int, int]) -> np.ndarray:
    """Smooth noise in [0, 1] over the image with cells[0] x cells[1] bumps."""
    values = np.random.default_rng(seed).uniform(0, 255, cells).astype(np.uint8)
    size = (WIDTH * SCALE, HEIGHT * SCALE)
    return np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)) / 255


if __name__ == "__main__":
    main(*sys.argv[1:])
