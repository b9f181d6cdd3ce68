"""The stream of cached clips: shapes, order, hold-out, resuming, placement, and parquet files."""

import collections
import dataclasses
import json

import jax
import numpy as np
import pyarrow
import pytest
import safetensors.numpy
from pyarrow import parquet

from convert import digest
from tests import tiny
from wanjax.data import cache, latents
from wanjax.models import presets
from wanjax.parallel import sharding

SHAPES = {(2, 2, 2, 4): 9, (1, 2, 2, 4): 4, (2, 4, 2, 4): 2}
MODEL = tiny.MODEL
I2V = dataclasses.replace(MODEL, wan=dataclasses.replace(MODEL.wan, in_channels=12))


def _write_cache(folder, identity=None, extra=()):
    """Random clips of SHAPES as cache.build leaves them."""
    rng = np.random.default_rng(0)
    (folder / "clips").mkdir(parents=True)
    facts = {"format": cache.FORMAT, "identity": identity or {}}
    (folder / "cache.json").write_text(json.dumps(facts))
    number = 0
    for shape, count in SHAPES.items():
        for _ in range(count):
            arrays = {"latents": rng.normal(size=shape), "text": rng.normal(size=(3 + number, 24))}
            arrays |= {name: rng.normal(size=shape) for name in extra}
            arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
            digest = f"{number * 0x11111111:08x}" + 56 * "0"
            facts = {"caption": f"clip {number}", "sha256": digest}
            data = safetensors.numpy.save(arrays, {"clip": json.dumps(facts)})
            (folder / "clips" / f"{number:02d}.safetensors").write_bytes(data)
            number += 1
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _write_cache(tmp_path_factory.mktemp("cache"))


def _stream(folder, batch=2, seed=0, holdout=0.0, model=MODEL, **kwargs):
    return latents.LatentStream(latents.read(folder), batch, seed, holdout, model, **kwargs)


def test_a_batch_has_one_shape_and_the_arrays_of_its_clips(folder):
    stream = _stream(folder)
    seen = set()
    for step in range(8):
        item, clips = stream.at(step), stream.choose(step)
        assert item.texts == [clip.caption for clip in clips]
        assert item.x0_PTHWC.shape == (2, *clips[0].shape) and item.cond is None
        assert item.ctx_PSE.shape == (2, 32, 24)  # the longest text of the cache has 17 rows
        for i, clip in enumerate(clips):
            arrays = safetensors.numpy.load_file(clip.file)
            np.testing.assert_array_equal(item.x0_PTHWC[i], arrays["latents"])
            np.testing.assert_array_equal(item.ctx_PSE[i, : clip.rows], arrays["text"])
            assert not item.ctx_PSE[i, clip.rows :].any()
        seen.add(clips[0].shape)
    assert seen == set(SHAPES)


def test_every_clip_is_seen_about_equally_often_and_order_depends_on_the_seed(folder):
    stream = _stream(folder)
    turns = 5 + 2 + 1  # batches of 2 that hold 9, 4 and 2 clips
    count = collections.Counter(
        clip.caption for step in range(4 * turns) for clip in stream.choose(step)
    )
    assert len(count) == 15 and min(count.values()) >= 4 and max(count.values()) <= 5
    names = lambda stream: [[c.caption for c in stream.choose(step)] for step in range(turns)]
    assert names(stream) == names(_stream(folder)) != names(_stream(folder, seed=1))
    assert names(stream) != [[c.caption for c in stream.choose(s + turns)] for s in range(turns)]


def test_the_batch_of_a_step_does_not_depend_on_the_steps_before(folder):
    stream = _stream(folder)
    whole = [stream.at(step) for step in range(6)]
    for step in (5, 2, 3):
        item = _stream(folder).at(step)
        assert item.texts == whole[step].texts
        np.testing.assert_array_equal(item.x0_PTHWC, whole[step].x0_PTHWC)


def test_clips_are_held_out_by_content(folder, tmp_path):
    stream = _stream(folder, holdout=0.5)
    assert {clip.caption for clip in stream.held} == {f"clip {n}" for n in range(8)}
    assert {clip.caption for clip in stream.clips} == {f"clip {n}" for n in range(8, 15)}
    trained = {text for step in range(20) for text in stream.at(step).texts}
    assert trained == {clip.caption for clip in stream.clips}
    items = list(stream.heldout())
    assert sum(count for _, count in items) == 8
    assert all(len(item.texts) == 2 for item, _ in items)  # the last one repeats its clip
    first = [text for item, count in items for text in item.texts[:count]]
    assert sorted(first) == sorted(clip.caption for clip in stream.held)


def test_resuming_needs_the_same_clips_batch_and_seed(folder):
    stream = _stream(folder, holdout=0.2)
    state = json.loads(json.dumps(stream.state(7)))
    assert stream.resume(state) == 7
    for other in (_stream(folder, 3, holdout=0.2), _stream(folder, seed=1, holdout=0.2),
                  _stream(folder)):  # fmt: skip
        with pytest.raises(ValueError, match="clips of this run have changed"):
            other.resume(state)
        assert other.resume(state, allow=True) == 7


def test_rows_lie_where_the_mesh_wants_them(folder):
    plain = _stream(folder, 8).at(0)
    with sharding.use_mesh(sharding.make_mesh(dict(data=4, fsdp=2))):
        spread = _stream(folder, 8).at(0)
        assert spread.x0_PTHWC.sharding.spec == jax.P(("data", "fsdp"))
        uneven = _stream(folder, 3).at(0).x0_PTHWC
        assert uneven.sharding.is_fully_replicated and uneven.shape[0] == 3
    np.testing.assert_array_equal(spread.x0_PTHWC, plain.x0_PTHWC)
    assert latents._rows(spread.x0_PTHWC.sharding, 8) == set(range(8))


def test_image_models_get_their_first_frame(folder, tmp_path):
    with pytest.raises(ValueError, match="has no first-frame latents, which model tiny needs"):
        _stream(folder, model=I2V)
    item = _stream(_write_cache(tmp_path, extra=["first"]), model=I2V).at(0)
    mask, first = np.split(np.asarray(item.cond["latents"]), [4], axis=-1)
    assert (mask[:, 0] == 1).all() and (mask[:, 1:] == 0).all()
    clip = _stream(tmp_path, model=I2V).choose(0)[0]
    np.testing.assert_array_equal(first[0], safetensors.numpy.load_file(clip.file)["first"])
    with pytest.raises(ValueError, match="config.data.first_frame is on but model tiny"):
        _stream(folder, first_frame=True)


def test_samples_are_made_of_held_out_captions(folder, tmp_path):
    preview = _stream(folder, holdout=0.9).preview(12, (2, 2, 2, 4))  # of several shapes
    assert preview.texts == [f"clip {n}" for n in range(12)] and preview.cond is None
    stream = _stream(_write_cache(tmp_path, extra=["first"]), model=I2V)
    preview = stream.preview(3, (2, 4, 2, 4))
    assert preview.texts == ["clip 13", "clip 14"]  # the only ones of that shape
    assert preview.cond["latents"].shape == (2, 2, 4, 2, 8)
    assert stream.preview(3, (5, 4, 2, 4)) is None


@pytest.mark.parametrize("changes, text", [
    (dict(holdout=1.0), "config.data.holdout 1.0"),
    (dict(batch=0), "config.data.batch is 0"),
    (dict(holdout=0.99), "are held out"),
    (dict(model=dataclasses.replace(MODEL, vae=dataclasses.replace(
        tiny.VAE, z_dim=6, latents_mean=(0.0,) * 6, latents_std=(1.0,) * 6))), "gives 6 channels"),
    (dict(model=dataclasses.replace(MODEL, wan=dataclasses.replace(tiny.WAN, text_dim=8))),
     "text rows of width 24, model tiny reads 8"),
])  # fmt: skip
def test_data_that_does_not_fit_is_refused(folder, changes, text):
    with pytest.raises(ValueError, match=text) as error:
        _stream(folder, **changes)
    assert "\n" not in str(error.value)


def test_a_cache_made_by_an_encoder_with_another_bit_is_refused(tmp_path):
    path = tiny.save_model(tmp_path)
    digests = {part: digest.component(path, part) for part in ("vae", "text_encoder")}
    source = latents.read(_write_cache(tmp_path / "a", digests))
    latents.check_encoders(source, path)
    latents.check_encoders(latents.read(_write_cache(tmp_path / "b")), "no model is asked for")
    for part, name in (("vae", "vae"), ("text_encoder", "text encoder")):
        (file,) = (tmp_path / "model" / part).glob("*.safetensors")
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        text = f"a was made by a different {name} from that of config.model.path; cache the clips"
        with pytest.raises(ValueError, match=text) as error:
            latents.check_encoders(source, path)
        assert "\n" not in str(error.value)
        file.write_bytes(data)
    latents.check_encoders(source, path)


def test_damaged_clips_and_caches_of_another_format_are_named(tmp_path):
    _write_cache(tmp_path / "a")
    (tmp_path / "a" / "clips" / "03.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="03.safetensors is damaged"):
        latents.read(tmp_path / "a")
    with pytest.raises(ValueError, match="holds no cached clips; set config.data.path"):
        latents.read(tmp_path / "none")
    old = {"format": 1, "model": "tiny", "identity": {"vae": "0123"}}
    (tmp_path / "a" / "cache.json").write_text(json.dumps(old))
    text = "a is a cache of format 1, this version reads 3; run python -m wanjax.data cache again"
    with pytest.raises(ValueError, match=text) as error:
        latents.read(tmp_path / "a")
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------ parquet


def _row(number, rng, dtype="float32", latents=True):
    """A row as FastVideo writes it: channels first, raw means."""
    z = rng.normal(size=(4, 2, 2, 3)).astype(dtype)
    text = rng.normal(size=(3 + number, 24)).astype(np.float32)
    row = {"id": str(number), "caption": f"clip {number}", "file_name": f"{number}.mp4"}
    row |= {"text_embedding_bytes": text.tobytes(), "text_embedding_shape": list(text.shape),
            "text_embedding_dtype": "float32"}  # fmt: skip
    if latents:
        row |= {"vae_latent_bytes": z.tobytes(), "vae_latent_shape": list(z.shape),
                "vae_latent_dtype": dtype, "num_frames": 2}  # fmt: skip
    return row, z, text


def test_fastvideo_latents_are_normalised_and_turned_channels_last(tmp_path, rng):
    code = dataclasses.replace(tiny.VAE, latents_mean=(1, 2, 3, 4), latents_std=(2, 4, 5, 10))
    model = dataclasses.replace(MODEL, vae=code)
    rows = [_row(n, rng, "float16" if n == 4 else "float32") for n in range(5)]
    (tmp_path / "part").mkdir()
    for name, part in (("a", rows[:3]), ("part/b", rows[3:])):
        table = pyarrow.Table.from_pylist([row for row, _, _ in part])
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    stream = _stream(tmp_path, 5, model=model)
    assert [clip.rows for clip in stream.clips] == [3, 4, 5, 6, 7]
    item = stream.at(0)
    for text, x0, ctx in zip(item.texts, item.x0_PTHWC, item.ctx_PSE, strict=True):
        number = int(text.split()[1])
        _, z, rows_SE = rows[number]
        z = z.astype(np.float64)
        want = np.stack([(z[c] - (1, 2, 3, 4)[c]) / (2, 4, 5, 10)[c] for c in range(4)], axis=-1)
        np.testing.assert_allclose(x0, want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(ctx[: 3 + number], rows_SE)


def _parquet(folder, rng, shapes, group):
    """Files of text and latents [*shape] a row, `group` rows a row group, 5 groups a file."""
    rows = []
    for number, shape in enumerate(shapes):
        row = _row(number % 4, rng)[0] | {"id": str(number), "caption": f"clip {number}"}
        z = rng.normal(size=shape).astype(np.float32)
        rows.append(row | {"vae_latent_bytes": z.tobytes(), "vae_latent_shape": list(z.shape)})
    for first in range(0, len(rows), 5 * group):
        table = pyarrow.Table.from_pylist(rows[first : first + 5 * group])
        parquet.write_table(table, folder / f"{first:03d}.parquet", row_group_size=group)


@pytest.fixture
def decoded(monkeypatch):
    """How often each column of a row group was decoded."""
    count, original = collections.Counter(), latents._read_columns

    def read(file, group, names):
        count[file, group, names[0]] += 1
        return original(file, group, names)

    monkeypatch.setattr(latents, "_read_columns", read)
    latents._row_group.cache_clear()
    yield count
    latents._row_group.cache_clear()


WIDE, LONG = (4, 2, 2, 3), (4, 3, 2, 2)


def test_a_row_group_is_decoded_once_an_epoch_and_two_are_held(tmp_path, rng, decoded):
    _parquet(tmp_path, rng, [WIDE] * 61, 6)  # ten groups of 6 rows and one of 1
    stream = _stream(tmp_path, 4)
    seen = [text for step in range(16) for text in stream.at(step).texts]
    assert len(set(seen)) == 61 and len(seen) == 64
    stream._pool.submit(lambda: None).result()  # the step after is of the next epoch
    for column in ("vae_latent_bytes", "text_embedding_bytes"):
        reads = [n for (_, _, name), n in decoded.items() if name == column]
        assert len(reads) == 11 and sum(reads) <= 11 + 2
    assert latents._row_group.cache_info().currsize == 2


def test_two_shapes_in_all_row_groups_still_decode_each_about_once(tmp_path, rng, decoded):
    _parquet(tmp_path, rng, [WIDE, LONG, WIDE] * 40, 12)
    stream = _stream(tmp_path, 4)
    for step in range(30):
        stream.at(step)
    stream._pool.submit(lambda: None).result()
    reads = [n for (_, _, name), n in decoded.items() if name == "vae_latent_bytes"]
    assert len(reads) == 10 and sum(reads) <= 15  # at random, 120 clips would take about 100


def test_the_order_by_row_groups_is_a_function_of_seed_and_step_and_shows_every_clip(tmp_path, rng):
    _parquet(tmp_path, rng, [WIDE] * 14 + [LONG] * 5 + [WIDE] * 7 + [(4, 1, 2, 2)], 4)
    stream = _stream(tmp_path, 3)
    epochs = [[stream.choose(step) for step in range(i, i + 10)] for i in (0, 10, 20)]
    for batches in epochs:  # 21 are 7 batches, 5 are 2, 1 is 1
        assert all(len({clip.shape for clip in batch}) == 1 for batch in batches)
        count = collections.Counter(clip.caption for batch in batches for clip in batch)
        assert len(count) == 27 and count.pop("clip 26") == 3 and max(count.values()) <= 2
    assert epochs[0] != epochs[1] != epochs[2]
    others = [_stream(tmp_path, 3, seed=seed).choose(13) for seed in range(4)]
    assert others[0] == epochs[1][3] and any(other != others[0] for other in others[1:])


def test_text_only_parquet_gives_contexts_without_latents(tmp_path, rng):
    rows = [_row(n, rng, latents=False)[0] for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    item = _stream(tmp_path, 3).at(0)
    assert item.x0_PTHWC is None and item.cond is None and item.ctx_PSE.shape == (3, 32, 24)
    assert sorted(item.texts) == ["clip 0", "clip 1", "clip 2"]


def _image_columns(rng):
    """Columns that FastVideo's image-to-video rows have more, and their arrays."""
    columns, arrays = {}, {}
    for name, shape in (("first_frame_latent", (4, 2, 2, 3)), ("clip_feature", (5, 8))):
        arrays[name] = array = rng.normal(size=shape).astype(np.float32)
        columns |= {f"{name}_bytes": array.tobytes(), f"{name}_shape": list(array.shape),
                    f"{name}_dtype": "float32"}  # fmt: skip
    return columns, arrays


def test_fastvideos_first_frames_and_clip_features_become_cond(tmp_path, rng):
    """First-frame latents are normalised already; a model without CLIP reads no features, one of
    text alone neither."""
    code = dataclasses.replace(tiny.VAE, latents_mean=(1, 2, 3, 4), latents_std=(2, 4, 5, 10))
    rows, arrays = [], []
    for number in range(4):
        columns, found = _image_columns(rng)
        rows.append(_row(number, rng)[0] | columns)
        arrays.append(found)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    i2v = dataclasses.replace(I2V, vae=code)
    for image in (presets.CLIPVisionConfig(hidden_size=8), None):
        item = _stream(tmp_path, 4, model=dataclasses.replace(i2v, image=image)).at(0)
        assert set(item.cond) == {"latents"} | ({"image"} if image else set())
        for row, text in enumerate(item.texts):
            want = arrays[int(text.split()[1])]
            mask, first = np.split(np.asarray(item.cond["latents"][row]), [4], axis=-1)
            assert (mask[0] == 1).all() and not mask[1:].any()
            channels = [want["first_frame_latent"][c] for c in range(4)]
            np.testing.assert_array_equal(first, np.stack(channels, axis=-1))
            if image:
                np.testing.assert_array_equal(item.cond["image"][row], want["clip_feature"])
    assert _stream(tmp_path, 4, model=dataclasses.replace(MODEL, vae=code)).at(0).cond is None


@pytest.mark.parametrize("changes, text", [
    (dict.fromkeys(f"first_frame_latent_{part}" for part in ("bytes", "shape", "dtype")),
     "row 1 of group 0 has no first-frame latents, which model tiny needs"),
    ({"first_frame_latent_dtype": "float16"}, r"192 bytes are not float16\[4, 2, 2, 3\]"),
    ({"clip_feature_shape": [4, 8]}, r"row 1 of group 0: 160 bytes are not float32\[4, 8\]"),
    (dict.fromkeys(f"clip_feature_{part}" for part in ("bytes", "shape", "dtype")),
     r"row 1 of group 0 has no CLIP tokens, which model tiny needs as \[S, 8\]"),
    ({"clip_feature_shape": [8, 5]}, r"has CLIP tokens \(8, 5\), which"),
    ({"clip_feature_shape": [1, 5, 8]}, r"has CLIP tokens \(1, 5, 8\), which"),
    ({"first_frame_latent_shape": [4, 1, 2, 3]},
     r"has first-frame latents \(1, 2, 3, 4\), which model tiny needs as \(2, 2, 3, 4\)"),
])  # fmt: skip
def test_odd_image_columns_are_named_with_their_row(tmp_path, rng, changes, text):
    rows = [_row(number, rng)[0] | _image_columns(rng)[0] for number in range(2)]
    rows[1] |= changes
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    model = dataclasses.replace(I2V, image=presets.CLIPVisionConfig(hidden_size=8))
    with pytest.raises(ValueError, match=text):
        _stream(tmp_path, 2, model=model).at(0)


@pytest.mark.parametrize("changes, text", [
    ({"vae_latent_dtype": "bfloat16"}, "192 bytes are not bfloat16"),
    ({"vae_latent_dtype": ""}, "192 bytes are not nothing"),
])  # fmt: skip
def test_a_wrong_dtype_is_found_not_decoded(tmp_path, rng, changes, text):
    row = _row(0, rng)[0] | changes
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=text):
        _stream(tmp_path, 1).at(0)


def test_foreign_parquet_is_named_with_its_columns(tmp_path):
    parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has columns \['x'\], but not caption; expected FastVid"):
        latents.read(tmp_path)
    row = _row(0, np.random.default_rng(0))[0] | {"clip_feature_bytes": b""}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="but not clip_feature_dtype"):
        latents.read(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="a.parquet is damaged"):
        latents.read(tmp_path)
