"""The shapes reward: right clips score 1, every single wrong word and every empty picture fails."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.rewards import shapes

TABLES = {
    "colour": list(shapes.COLOURS),
    "shape": list(shapes.SHAPES),
    "direction": list(shapes.DIRECTIONS),
}


def _draw(captions, seed=0):
    packed = shapes.pack([shapes.parse(text) for text in captions])
    return np.asarray(jax.jit(shapes.render)(jax.random.key(seed), packed))


def _degrade(video, sigma, noise):
    """Gaussian blur in space, then Gaussian noise: what a small VAE and few steps do."""
    tap = np.exp(-0.5 * (np.arange(-4, 5) / sigma) ** 2)
    tap = (tap / tap.sum()).astype(np.float32)
    for axis in (2, 3):
        pad = [(4, 4) if a == axis else (0, 0) for a in range(5)]
        padded = np.pad(video, pad, mode="edge")
        video = sum(w * np.take(padded, range(i, i + 64), axis=axis) for i, w in enumerate(tap))
    jitter = np.random.default_rng(1).normal(0, noise, video.shape)
    return np.clip(video + jitter, 0, 1).astype(np.float32)


@pytest.fixture(scope="module")
def clips():
    captions = [
        text
        for split in ("train", "heldout")
        for count in (1, 2)
        for text in shapes.prompts(split, count, 13, seed=3)
    ]
    return captions, _draw(captions)


def test_caption_and_parse_are_inverse_on_the_whole_grammar():
    for split in ("train", "heldout"):
        for count in (1, 2):
            everything = shapes.specs(split, count)
            assert [shapes.parse(shapes.caption(s)) for s in everything] == everything
    text = "a red circle moving left and a blue square moving up on a gray background"
    assert shapes.caption(shapes.parse(text)) == text
    assert set(text.split()) <= set(shapes.words())


def test_splits_are_disjoint_complete_and_differ_by_held_out_pairs():
    for count, total in ((1, 18 * 4 * 3), (2, 72 * 60 * 3)):
        train, heldout = (set(shapes.prompts(s, count)) for s in ("train", "heldout"))
        assert not train & heldout and len(train) + len(heldout) == total
    pairs = {(o.colour, o.shape) for s in shapes.specs("train", 2) for o in s.objects}
    assert not pairs & shapes.HELD_OUT and len(pairs) == 18 - len(shapes.HELD_OUT)
    assert {c for c, _ in pairs} == set(shapes.COLOURS)
    assert {z for _, z in pairs} == set(shapes.SHAPES)
    for spec in shapes.specs("heldout", 2):
        assert {(o.colour, o.shape) for o in spec.objects} & shapes.HELD_OUT


def test_prompt_draws_are_deterministic_and_without_repeats():
    once, again = (shapes.prompts("heldout", 2, 64, seed=5) for _ in range(2))
    assert once == again and len(set(once)) == 64
    assert once != shapes.prompts("heldout", 2, 64, seed=6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red circle",
        "a pink circle moving left on a gray background",
        "a red circle moving left on a red background",
        "a red circle moving left and a red square moving up on a gray background",
    ],
)
def test_captions_outside_the_grammar_are_refused(text):
    with pytest.raises(ValueError, match="caption"):
        shapes.parse(text)


def test_objects_stay_inside_the_frame_and_apart(clips):
    captions, _ = clips
    packed = shapes.pack([shapes.parse(text) for text in captions])
    centre_BTOX = shapes._layout(jax.random.key(0), packed)
    extent_BOX = shapes.SIDE * jnp.asarray(shapes._EXTENT)[packed["shape_BO"]]
    half_BOX = extent_BOX[..., :2]
    centre_BTOX = centre_BTOX.at[..., 1].add(-extent_BOX[:, None, :, 2])  # centroid -> box
    assert (centre_BTOX - half_BOX[:, None] >= shapes.MARGIN - 1e-4).all()
    assert (centre_BTOX + half_BOX[:, None] <= shapes.SIZE - shapes.MARGIN + 1e-4).all()
    apart_BTX = jnp.abs(centre_BTOX[:, :, 0] - centre_BTOX[:, :, 1])
    gap_BT = (apart_BTX - half_BOX.sum(1)[:, None]).max(-1)
    assert (np.asarray(gap_BT.min(1))[packed["count_B"] == 2] > shapes.MARGIN - 1e-4).all()


def test_rendered_area_and_centroid_are_those_of_the_layout():
    captions = [
        f"a red {shape} moving {way} on a black background"
        for shape in shapes.SHAPES
        for way in shapes.DIRECTIONS
    ]
    packed = shapes.pack([shapes.parse(text) for text in captions])
    key = jax.random.key(2)
    video = np.asarray(jax.jit(shapes.render)(key, packed), np.float64)
    centre_BTOX = np.asarray(shapes._layout(key, packed))
    ground, red = shapes.BACKGROUNDS["black"][0], shapes.COLOURS["red"][0]
    alpha = (video[..., 0] - ground) / (red - ground)
    np.testing.assert_allclose(alpha.sum((2, 3)), shapes.SIDE**2, rtol=0.02)
    pixel = np.arange(64) + 0.5
    x = np.einsum("BTHW,W->BT", alpha, pixel) / alpha.sum((2, 3))
    y = np.einsum("BTHW,H->BT", alpha, pixel) / alpha.sum((2, 3))
    np.testing.assert_allclose(np.stack([x, y], -1), centre_BTOX[:, :, 0], atol=0.15)


@pytest.mark.parametrize(
    "sigma,noise,score,strict", [(0.01, 0, 0.999, 1), (1, 0.05, 0.98, 0.99), (1.2, 0.1, 0.97, 0.97)]
)
def test_true_captions_score_one_and_succeed(clips, sigma, noise, score, strict):
    captions, video = clips
    scores, info = shapes.reward(_degrade(video, sigma, noise), captions)
    failed = [captions[i] for i in np.flatnonzero(~info["strict"])]
    assert info["strict"].mean() >= strict, failed
    assert scores.mean() >= score and scores.max() <= 1


def test_uint8_and_float_videos_agree(clips):
    captions, video = clips
    floats, info = shapes.reward(video[:32], captions[:32])
    bytes_, info8 = shapes.reward(np.round(video[:32] * 255).astype(np.uint8), captions[:32])
    np.testing.assert_allclose(floats, bytes_, atol=0.02)
    assert (info["strict"] == info8["strict"]).all()


@pytest.mark.parametrize("sigma,noise", [(0.01, 0.0), (1.0, 0.05)])
@pytest.mark.parametrize("slot", ["colour", "shape", "direction", "background"])
def test_one_wrong_word_scores_lower_and_fails(clips, slot, sigma, noise):
    captions, video = clips
    video = _degrade(video, sigma, noise)
    right, _ = shapes.reward(video, captions)
    wrong = []
    for i, text in enumerate(captions):
        spec = shapes.parse(text)
        if slot == "background":
            others = [b for b in shapes.BACKGROUNDS if b != spec.background]
            wrong.append(dataclasses.replace(spec, background=others[i % 2]))
            continue
        objects = list(spec.objects)
        which = i % len(objects)
        taken = {getattr(objects[which], slot)}
        if slot == "colour":
            taken |= {o.colour for o in objects}
        others = [word for word in TABLES[slot] if word not in taken]
        swap = {slot: others[i % len(others)]}
        objects[which] = dataclasses.replace(objects[which], **swap)
        wrong.append(dataclasses.replace(spec, objects=tuple(objects)))
    scores, info = shapes.reward(video, [shapes.caption(s) for s in wrong])
    assert not info["strict"].any()
    assert (scores < right - 0.08).all()


@pytest.mark.parametrize("slots", [("colour",), ("shape",), ("direction",), ("shape", "direction")])
def test_attributes_bound_to_the_wrong_object_fail(slots):
    captions, swapped = [], []
    for spec in shapes.specs("train", 2)[::211]:
        a, b = spec.objects
        new_a = dataclasses.replace(a, **{k: getattr(b, k) for k in slots})
        new_b = dataclasses.replace(b, **{k: getattr(a, k) for k in slots})
        if {new_a, new_b} != {a, b}:
            captions.append(shapes.caption(spec))
            swapped.append(shapes.caption(dataclasses.replace(spec, objects=(new_a, new_b))))
    assert len(captions) > 20
    video = _draw(captions)
    right, _ = shapes.reward(video, captions)
    scores, info = shapes.reward(video, swapped)
    assert not info["strict"].any()
    assert (scores < right - 0.15).all()


def test_order_of_objects_in_the_caption_does_not_matter(clips):
    captions, video = clips
    two = [i for i, text in enumerate(captions) if " and " in text]
    specs = [shapes.parse(captions[i]) for i in two]
    flipped = [shapes.caption(dataclasses.replace(s, objects=s.objects[::-1])) for s in specs]
    a, _ = shapes.reward(video[two], [captions[i] for i in two])
    b, _ = shapes.reward(video[two], flipped)
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_empty_noisy_and_flickering_clips_get_nothing():
    captions = shapes.prompts("train", 1, 8) + shapes.prompts("train", 2, 8)
    generator = np.random.default_rng(0)
    grounds = [shapes.BACKGROUNDS[shapes.parse(text).background] for text in captions]
    blank = np.broadcast_to(np.array(grounds)[:, None, None, None], (16, 17, 64, 64, 3))
    noise = generator.uniform(size=(16, 17, 64, 64, 3)).astype(np.float32)
    filled = np.stack(
        [
            np.broadcast_to(shapes.COLOURS[shapes.parse(text).objects[0].colour], (17, 64, 64, 3))
            for text in captions
        ]
    )
    for video in (blank, noise, filled):
        scores, info = shapes.reward(video, captions)
        assert scores.max() <= 0.02 and not info["strict"].any()
    flicker = _draw(captions).copy()
    flicker[:, 1::2] = blank[:, 1::2]
    scores, info = shapes.reward(flicker, captions)
    assert scores.max() <= 0.6 and not info["strict"].any()


def _paste(clip, colour, box, frames=slice(None)):
    clip = clip.copy()
    clip[frames, box[0] : box[1], box[2] : box[3]] = shapes.COLOURS[colour]
    return clip


def test_known_hacks_fail():
    ground = np.full((17, 64, 64, 3), 0.5, np.float32)
    text = "a red square moving right and a blue square moving right on a gray background"
    merged, outside, still, jump, extra, wide = (ground.copy() for _ in range(6))
    for t in range(17):
        merged[t] = _paste(merged[t : t + 1], "red", (20, 33, 5 + t, 18 + t))[0]
        merged[t] = _paste(merged[t : t + 1], "blue", (20, 33, 5 + t, 11 + t))[0]
        outside[t] = _paste(outside[t : t + 1], "red", (8, 20, max(0, 3 * t - 14), 3 * t + 2))[0]
        outside[t] = _paste(outside[t : t + 1], "blue", (40, 52, 5 + t, 17 + t))[0]
        jump_x = 5 if t < 9 else 40
        jump[t] = _paste(jump[t : t + 1], "red", (8, 20, jump_x, jump_x + 12))[0]
        jump[t] = _paste(jump[t : t + 1], "blue", (40, 52, 5 + t, 17 + t))[0]
        extra[t] = _paste(extra[t : t + 1], "red", (4, 16, 5 + t, 17 + t))[0]
        extra[t] = _paste(extra[t : t + 1], "blue", (24, 36, 5 + t, 17 + t))[0]
        wide[t] = _paste(wide[t : t + 1], "red", (8, 11, 2 + t, 40 + t))[0]
        wide[t] = _paste(wide[t : t + 1], "blue", (40, 52, 5 + t, 17 + t))[0]
    plain, _ = shapes.reward(extra[None], [text])
    assert _strict(extra, text)
    third = _paste(extra, "green", (44, 56, 10, 22))
    twin = _paste(extra, "red", (44, 56, 10, 22))
    still = _paste(_paste(still, "red", (8, 20, 20, 32)), "blue", (40, 52, 20, 32))
    for name, clip in {
        "two objects merged in one": merged,
        "object enters from outside": outside,
        "nothing moves": still,
        "object jumps": jump,
        "third object": third,
        "twin of an object": twin,
        "bar instead of a square": wide,
    }.items():
        scores, info = shapes.reward(clip[None], [text])
        assert not info["strict"][0], name
        assert scores[0] < plain[0] - 0.05, name


def _strict(clip, text):
    return bool(shapes.reward(clip[None], [text])[1]["strict"][0])


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="sample.height"):
        shapes.reward(np.zeros((1, 17, 32, 64, 3)), ["x"])
    with pytest.raises(ValueError, match="prompts"):
        shapes.reward(np.zeros((2, 17, 64, 64, 3)), ["x"])


def test_sixty_four_clips_take_about_a_second(clips):
    captions, video = ([*a, *a][:64] for a in clips)
    video = np.round(np.stack(video) * 255).astype(np.uint8)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        shapes.reward(video, captions)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 2.0
