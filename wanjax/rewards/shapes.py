"""Moving coloured shapes: captions, an anti-aliased renderer and a verifiable reward.

This is the domain of the embedded TinyWan2.2 model: one or two shapes of different colours that
move along one axis over a plain background, 17 frames of 64x64 pixels.

  caption   a red circle moving left and a blue square moving up on a gray background
  render    pixel = background + alpha * (colour - background), alpha = clip(1/2 - distance, 0, 1),
            distance = signed distance in pixels to the shape's edge
  reward    (3/4 + background/4) * clean * mean over objects of present * (colour + shape +
            direction) / 3, in [0, 1]
  strict    every object in every frame, wholly inside it, moving steadily, every part right and
            nothing else in the picture

The reward looks at pixels only. A pixel is explained as background + alpha * (colour - background)
with the best of the six colours; a blob is the set of pixels of one colour with alpha > 1/2. Every
shape has area SIDE^2 and its centroid at the origin, so a blob is compared with each unit
shape after moving it to its centroid and dividing by the square root of its area.

B clips  T frames  H W pixels  O objects (two slots)  Q colours  Z shapes  Y directions
J candidate layouts  N foreground pixels
"""

import itertools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

FRAMES, SIZE = 17, 64
COLOURS = {
    "red": (0.86, 0.14, 0.14),
    "green": (0.14, 0.66, 0.24),
    "blue": (0.14, 0.28, 0.86),
    "yellow": (0.94, 0.82, 0.14),
    "purple": (0.62, 0.18, 0.74),
    "cyan": (0.18, 0.78, 0.82),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # x right, y down
BACKGROUNDS = {"gray": (0.5, 0.5, 0.5), "black": (0.08, 0.08, 0.08), "white": (0.92, 0.92, 0.92)}
# Never rendered in pre-training; every colour and every shape is seen elsewhere.
_NOVEL = dict(red="triangle", green="circle", yellow="square", purple="circle", cyan="triangle")
HELD_OUT = frozenset(_NOVEL.items())

SIDE = 14.0  # pixels; the area of every shape is side^2
TRAVEL = 16  # pixels from the first to the last frame
LATTICE = 4  # pixels between possible starts of a centroid: as far as it moves in 4 frames
MARGIN = 2.0  # pixels kept free at the border and between two objects
CLUTTER = 24.0  # pixels per frame that may belong to no object of the caption
_AREA = (0.45 * SIDE**2, 1.7 * SIDE**2)  # pixels a blob may have
# half width and half height of the unit-area shapes, and how far below the middle their centroid is
_EXTENT = ((0.5642, 0.5642, 0), (0.5, 0.5, 0), (0.7598, 0.6580, 0.2193))


@dataclass(frozen=True)
class Thing:
    """One moving object, in words of the grammar."""

    colour: str
    shape: str
    direction: str


@dataclass(frozen=True)
class Spec:
    """What a caption says: one or two objects of different colours on a background."""

    objects: tuple[Thing, ...]
    background: str


def caption(spec):
    """Write a Spec as a caption."""
    things = [f"a {o.colour} {o.shape} moving {o.direction}" for o in spec.objects]
    return f"{' and '.join(things)} on a {spec.background} background"


def parse(text):
    """Read a caption into a Spec; ValueError when the grammar does not produce it."""
    found = _CAPTION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"caption {text!r} is not of the shapes grammar; expected "
            f"'a COLOUR SHAPE moving DIRECTION [and a ...] on a BACKGROUND background' with "
            f"colours {sorted(COLOURS)}, shapes {sorted(SHAPES)}, directions "
            f"{sorted(DIRECTIONS)}, backgrounds {sorted(BACKGROUNDS)}; change the prompt"
        )
    words = found.groups()
    objects = tuple(Thing(*words[i : i + 3]) for i in (0, 3) if words[i])
    if len({o.colour for o in objects}) < len(objects):
        raise ValueError(
            f"caption {text!r} has two {objects[0].colour} objects; expected different colours"
        )
    return Spec(objects, words[6])


def specs(split, count):
    """All Specs with `count` (1 or 2) objects of a split, in a fixed order.

    "train" holds no HELD_OUT colour-shape pair; "heldout" holds at least one.
    """
    if split not in ("train", "heldout") or count not in (1, 2):
        raise ValueError(
            f"specs({split!r}, {count}); expected split 'train' or 'heldout' and count 1 or 2"
        )
    things = [Thing(*words) for words in itertools.product(COLOURS, SHAPES, DIRECTIONS)]
    result = []
    for objects in itertools.product(things, repeat=count):
        if len({o.colour for o in objects}) < count:
            continue
        novel = any((o.colour, o.shape) in HELD_OUT for o in objects)
        if novel == (split == "heldout"):
            result += [Spec(objects, background) for background in BACKGROUNDS]
    return result


def prompts(split, count, number=None, seed=0):
    """Captions of a split: all in order, or a seeded draw of `number` different ones."""
    everything = [caption(spec) for spec in specs(split, count)]
    if number is None:
        return everything
    if number > len(everything):
        raise ValueError(
            f"{number} prompts requested from split {split!r} with {count} objects; it has "
            f"{len(everything)}; ask for fewer"
        )
    chosen = np.random.default_rng(seed).permutation(len(everything))[:number]
    return [everything[i] for i in chosen]


def words():
    """The words of the grammar, sorted: the vocabulary of the embedded tokenizer."""
    return sorted(
        {"a", "and", "on", "moving", "background", *COLOURS, *SHAPES, *DIRECTIONS, *BACKGROUNDS}
    )


def pack(spec_list):
    """Specs as int32 indices {colour_BO, shape_BO, direction_BO, background_B, count_B}.

    The second slot of a one-object Spec repeats the first; count_B says how many are drawn.
    """
    colours, directions, grounds = list(COLOURS), list(DIRECTIONS), list(BACKGROUNDS)
    slots = [
        (colours.index(o.colour), SHAPES.index(o.shape), directions.index(o.direction))
        for spec in spec_list
        for o in (spec.objects[0], spec.objects[-1])
    ]
    slots = np.array(slots, np.int32).reshape(len(spec_list), 2, 3)
    return {
        "colour_BO": slots[..., 0],
        "shape_BO": slots[..., 1],
        "direction_BO": slots[..., 2],
        "background_B": np.array([grounds.index(s.background) for s in spec_list], np.int32),
        "count_B": np.array([len(s.objects) for s in spec_list], np.int32),
    }


def render(key, packed):
    """Draw clips of packed Specs -> video_BTHWC float32 in [0, 1]; jit it with `packed` traced.

    Positions are random; objects stay inside the frame and (except in about one clip in ten
    thousand) apart from each other. All have the same size and speed, and start on a lattice whose
    step is the motion of one latent frame: few distinct patterns, for a model of few parameters.
    """
    centre_BTOX = _layout(key, packed)
    pixel = jnp.arange(SIZE) + 0.5
    ground_BC = jnp.asarray(list(BACKGROUNDS.values()), jnp.float32)[packed["background_B"]]
    shape = (len(centre_BTOX), FRAMES, SIZE, SIZE, 3)
    video_BTHWC = jnp.broadcast_to(ground_BC[:, None, None, None], shape)
    for slot in (0, 1):
        x = (pixel[None, None, None, :] - centre_BTOX[:, :, slot, 0, None, None]) / SIDE
        y = (pixel[None, None, :, None] - centre_BTOX[:, :, slot, 1, None, None]) / SIDE
        kind_B111 = packed["shape_BO"][:, slot, None, None, None]
        distance = jnp.choose(kind_B111, _distances(x, y, jnp), mode="clip") * SIDE
        drawn_B111 = (packed["count_B"] > slot)[:, None, None, None]
        alpha = jnp.where(drawn_B111, jnp.clip(0.5 - distance, 0, 1), 0)[..., None]
        colour_BC = jnp.asarray(list(COLOURS.values()), jnp.float32)[packed["colour_BO"][:, slot]]
        video_BTHWC = video_BTHWC + alpha * (colour_BC[:, None, None, None] - video_BTHWC)
    return video_BTHWC


def reward(video_BTHWC, prompts, meta=None):
    """Score clips against captions -> (scores_B in [0, 1], info of arrays [B]).

    video_BTHWC: uint8, or floats in [0, 1], 64x64 RGB. info holds the parts present, colour,
    shape, direction (means over the caption's objects), background, clean, and the bool strict.
    `meta` belongs to the signature of every reward; the captions say all that is needed here.
    """
    video = np.asarray(video_BTHWC)
    if video.ndim != 5 or video.shape[2:] != (SIZE, SIZE, 3) or len(video) != len(prompts):
        raise ValueError(
            f"shapes reward got video {video.shape} and {len(prompts)} prompts; expected "
            f"[{len(prompts)}, frames, {SIZE}, {SIZE}, 3]; set sample.height and sample.width"
        )
    if video.shape[1] < 2:
        raise ValueError(f"shapes reward got {video.shape[1]} frame; expected 2 or more")
    want = pack([parse(text) for text in prompts])
    blobs = _blobs(video.astype(np.float32) / 255 if video.dtype == np.uint8 else video)

    colour_BOQ = (want["colour_BO"][..., None] == np.arange(len(COLOURS))).astype(np.float32)
    shape_BOQ = np.take_along_axis(blobs["shape_BZQ"], want["shape_BO"][..., None], 1)
    way_BOQ = np.take_along_axis(blobs["direction_BYQ"], want["direction_BO"][..., None], 1)
    parts_BOPQ = np.stack([colour_BOQ, shape_BOQ, way_BOQ], axis=2)
    quality_BOQ = blobs["present_BQ"][:, None] * parts_BOPQ.mean(2)
    taken_BO = _assign(quality_BOQ + 1e-3 * colour_BOQ, want["count_B"])
    parts_BOP = np.take_along_axis(parts_BOPQ, taken_BO[:, :, None, None], 3)[..., 0]
    present_BO = np.take_along_axis(blobs["present_BQ"], taken_BO, 1)
    drawn_BO = np.arange(2) < want["count_B"][:, None]

    def over_objects(values_BO):
        return (values_BO * drawn_BO).sum(1) / want["count_B"]

    rest_BQ = blobs["area_BQ"].copy()
    np.put_along_axis(rest_BQ, taken_BO, 0, 1)
    clutter_B = blobs["unknown_B"] + rest_BQ.sum(1)
    info = {
        "present": over_objects(present_BO),
        "colour": over_objects(present_BO * parts_BOP[..., 0]),
        "shape": over_objects(present_BO * parts_BOP[..., 1]),
        "direction": over_objects(present_BO * parts_BOP[..., 2]),
        "background": (blobs["background_B"] == want["background_B"]).astype(np.float32),
        "clean": 1 - 0.5 * np.clip((clutter_B - CLUTTER) / 100, 0, 1),
    }
    scores_B = (0.75 + 0.25 * info["background"]) * info["clean"]
    scores_B *= over_objects(present_BO * parts_BOP.mean(2))
    right_BO = (parts_BOP > 0.5).all(2) & (present_BO >= 0.94)  # one bad frame of 17
    tidy_B = (info["background"] > 0) & (clutter_B < CLUTTER)
    info["strict"] = (right_BO | ~drawn_BO).all(1) & tidy_B
    return scores_B.astype(np.float32), info


reward.check = parse  # of a prompt, see rewards.combine


def _distances(x, y, xp):
    """Signed distances to the edges of the unit-area shapes (y down), inside negative."""
    return [
        xp.sqrt(x * x + y * y) - 0.5642,
        xp.maximum(xp.abs(x), xp.abs(y)) - 0.5,
        xp.maximum(y - 0.4387, 0.8660 * xp.abs(x) - 0.5 * y - 0.4387),  # equilateral, apex up
    ]


def _layout(key, packed):
    """Random tracks of the centroids, centre_BTOX in pixels, that start on the lattice.

    Of 128 draws per clip the first whose bounding boxes stay apart in every frame is taken.
    """
    draws, B = 128, len(packed["count_B"])
    extent_BOE = SIDE * jnp.asarray(_EXTENT)[packed["shape_BO"]]
    below_BOX = jnp.stack([0 * extent_BOE[..., 2], extent_BOE[..., 2]], -1)
    half_BOX = extent_BOE[..., :2]
    step_BOX = TRAVEL * jnp.asarray(list(DIRECTIONS.values()))[packed["direction_BO"]]
    low_BOX = MARGIN + half_BOX + below_BOX + jnp.maximum(-step_BOX, 0)
    high_BOX = SIZE - MARGIN - half_BOX + below_BOX - jnp.maximum(step_BOX, 0)
    first_BOX, last_BOX = jnp.ceil(low_BOX / LATTICE), jnp.floor(high_BOX / LATTICE)
    # more often near the borders than in the middle, to leave room for the other object
    place_BJOX = 0.5 - 0.4999 * jnp.cos(jnp.pi * jax.random.uniform(key, (B, draws, 2, 2)))
    node_BJOX = jnp.floor(first_BOX[:, None] + place_BJOX * (last_BOX - first_BOX + 1)[:, None])
    time_11T11 = jnp.linspace(0, 1, FRAMES)[None, None, :, None, None]
    centre_BJTOX = LATTICE * node_BJOX[:, :, None] + time_11T11 * step_BOX[:, None, None]
    middle_BJTOX = centre_BJTOX - below_BOX[:, None, None]
    apart_BJTX = jnp.abs(middle_BJTOX[..., 0, :] - middle_BJTOX[..., 1, :])
    gap_BJT = (apart_BJTX - half_BOX.sum(1)[:, None, None]).max(-1)
    pick_B1 = jnp.argmax(gap_BJT.min(2) > MARGIN, axis=1)[:, None]
    return jnp.take_along_axis(centre_BJTOX, pick_B1[..., None, None, None], 1)[:, 0]


def _assign(key_BOQ, count_B):
    """Give each object the blob with the best sum; two objects take two different blobs."""
    B, _, Q = key_BOQ.shape
    pair_BQQ = key_BOQ[:, 0, :, None] + key_BOQ[:, 1, None, :] - 10 * np.eye(Q)
    pair_BO = np.stack(np.divmod(pair_BQQ.reshape(B, -1).argmax(1), Q), 1)
    alone_BO = np.repeat(key_BOQ[:, 0].argmax(1)[:, None], 2, 1)
    return np.where(count_B[:, None] == 2, pair_BO, alone_BO)


def _blobs(video_BTHWC):
    """Measure what each palette colour does in each clip.

    Returns area_BQ and unknown_B (mean pixels per frame), present_BQ (fraction of frames with a
    blob of allowed area that touches no border), shape_BZQ and direction_BYQ (qualities in [0, 1]),
    background_B (index, -1 for none).
    """
    B, T = video_BTHWC.shape[:2]
    Q = len(COLOURS)
    video_BTHWC = _smooth(video_BTHWC)
    ground_BC = np.median(video_BTHWC[:, ::2, ::4, ::4].reshape(B, -1, 3), axis=1)
    grounds_KC = np.array(list(BACKGROUNDS.values()), np.float32)
    away_BK = np.linalg.norm(ground_BC[:, None] - grounds_KC, axis=2)
    background_B = np.where(away_BK.min(1) < 0.2, away_BK.argmin(1), -1)

    video_BTHWC = video_BTHWC - ground_BC[:, None, None, None].astype(np.float32)
    square_BTHW = np.einsum("BTHWC,BTHWC->BTHW", video_BTHWC, video_BTHWC)
    clip_N, time_N, y_N, x_N = np.nonzero(square_BTHW > 0.2**2)
    pixel_NC, square_N = video_BTHWC[clip_N, time_N, y_N, x_N], square_BTHW[square_BTHW > 0.2**2]
    toward_BQC = np.array(list(COLOURS.values()), np.float32) - ground_BC[:, None]
    length_BQ = (toward_BQC**2).sum(2) + 1e-6
    dot_NQ = np.einsum("NC,NQC->NQ", pixel_NC, toward_BQC[clip_N])
    alpha_NQ = np.clip(dot_NQ / length_BQ[clip_N], 0, 1.2)
    error_NQ = square_N[:, None] - 2 * alpha_NQ * dot_NQ + alpha_NQ**2 * length_BQ[clip_N]
    q_N = error_NQ.argmin(1)
    known_N = error_NQ.min(1) < 0.25**2
    unknown_B = np.bincount(clip_N[~known_N], minlength=B) / T
    solid_N = known_N & (np.take_along_axis(alpha_NQ, q_N[:, None], 1)[:, 0] > 0.5)
    clip_N, time_N, y_N, x_N, q_N = (a[solid_N] for a in (clip_N, time_N, y_N, x_N, q_N))

    frame_N = (clip_N * T + time_N) * Q + q_N

    def total(weight_N=None):
        return np.bincount(frame_N, weight_N, minlength=B * T * Q).reshape(B, T, Q)

    area_BTQ = total()
    some_BTQ = np.maximum(area_BTQ, 1)
    centre_BTQX = np.stack([total(x_N), total(y_N)], -1) / some_BTQ[..., None]
    edge_N = (x_N == 0) | (y_N == 0) | (x_N == SIZE - 1) | (y_N == SIZE - 1)
    good_BTQ = (area_BTQ > _AREA[0]) & (area_BTQ < _AREA[1]) & (total(edge_N) == 0)

    side_N = np.sqrt(some_BTQ).ravel()[frame_N]
    offset_NX = np.stack([x_N, y_N], 1) - centre_BTQX.reshape(-1, 2)[frame_N]
    x_N, y_N = (offset_NX / side_N[:, None]).T
    inside_ZN = [d <= 0 for d in _distances(x_N, y_N, np)]
    inside_BZQ = np.stack([total(inside_N).sum(1) for inside_N in inside_ZN], 1)
    overlap_BZQ = inside_BZQ / np.maximum(2 * area_BTQ.sum(1)[:, None] - inside_BZQ, 1)
    travel_BQX, wobble_BQ = _track(centre_BTQX, good_BTQ)
    return {
        "area_BQ": area_BTQ.mean(1),
        "unknown_B": unknown_B,
        "present_BQ": good_BTQ.mean(1),
        "shape_BZQ": _shape_quality(overlap_BZQ),
        "direction_BYQ": _direction_quality(travel_BQX, wobble_BQ),
        "background_B": background_B,
    }


def _smooth(video_BTHWC):
    """3x3 box mean over pixels in float32: noise falls threefold, edges stay in place."""
    padded = np.pad(video_BTHWC, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    padded = padded.astype(np.float32)
    rows = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
    return (rows[:, :, :, :-2] + rows[:, :, :, 1:-1] + rows[:, :, :, 2:]) / 9


def _track(centre_BTQX, good_BTQ):
    """Least-squares line through the good frames -> (travel_BQX over the clip, rms pixels_BQ)."""
    T = centre_BTQX.shape[1]
    count_BQ = np.maximum(good_BTQ.sum(1), 1)
    time_BTQ = np.linspace(0, 1, T)[None, :, None] * good_BTQ
    time_BTQ = (time_BTQ - (time_BTQ.sum(1) / count_BQ)[:, None]) * good_BTQ
    mean_BQX = (centre_BTQX * good_BTQ[..., None]).sum(1) / count_BQ[..., None]
    move_BTQX = (centre_BTQX - mean_BQX[:, None]) * good_BTQ[..., None]
    spread_BQ = np.maximum((time_BTQ**2).sum(1), 1e-6)
    travel_BQX = np.einsum("BTQ,BTQX->BQX", time_BTQ, move_BTQX) / spread_BQ[..., None]
    error_BTQX = move_BTQX - time_BTQ[..., None] * travel_BQX[:, None]
    return travel_BQX, np.sqrt((error_BTQX**2).sum((1, 3)) / count_BQ)


def _shape_quality(overlap_BZQ):
    """Lead over the best other shape (full marks at 0.1) times a floor on the overlap itself."""
    others = [np.delete(overlap_BZQ, z, 1).max(1) for z in range(len(SHAPES))]
    lead_BZQ = np.clip((overlap_BZQ - np.stack(others, 1)) / 0.1 + 0.5, 0, 1)
    return lead_BZQ * np.clip((overlap_BZQ - 0.5) / 0.25, 0, 1)


def _direction_quality(travel_BQX, wobble_BQ):
    """Pixels along each direction minus twice those across (10 is full marks), on a steady track.

    wobble_BQ: rms pixels off the straight track; marks fall from 2 and are gone at 4.
    """
    way_YX = np.array(list(DIRECTIONS.values()), np.float64)
    along_BYQ = np.einsum("BQX,YX->BYQ", travel_BQX, way_YX)
    across_BYQ = np.abs(np.einsum("BQX,YX->BYQ", travel_BQX, way_YX[:, ::-1]))
    steady_BQ = np.clip(2 - wobble_BQ / 2, 0, 1)
    return np.clip((along_BYQ - 2 * across_BYQ) / 10, 0, 1) * steady_BQ[:, None]


_THING = rf"a ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) moving ({'|'.join(DIRECTIONS)})"
_CAPTION = re.compile(rf"{_THING}(?: and {_THING})? on a ({'|'.join(BACKGROUNDS)}) background")
