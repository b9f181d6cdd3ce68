"""convert/digest.py: what changes a digest, what does not, and when bytes are read again."""

import hashlib
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert import digest, disk, files, layouts, load, save
from tests import emulator
from tests.convert import tiny

COMPONENTS = ("high", "low", "vae", "text_encoder")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The file of digests, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/wanjax/digests.json"


@pytest.fixture
def reads(monkeypatch):
    """Bytes of every range that is read for a digest."""
    sizes, original = [], digest._piece

    def piece(tensor, index):
        sizes.append(tensor.read(index).nbytes)
        return original(tensor, index)

    monkeypatch.setattr(digest, "_piece", piece)
    return sizes


def _flip(file, bit):
    """Flip one bit of a file, counted from its end."""
    data = bytearray(file.read_bytes())
    data[-1 - bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_digest_is_blake2b_of_pieces_tensors_and_config(tmp_path, monkeypatch):
    """Written out by hand for a component of two tensors, cut into pieces of 8 bytes."""
    monkeypatch.setattr(digest, "_PIECE", 8)
    scalar, matrix = np.float32(3), np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    tensors = {"b": files.of_array(matrix), "a": files.of_array(scalar)}
    short = lambda *parts: hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    raw = lambda array: hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    a = short("float32", [], [raw(scalar)])
    b = short("bfloat16", [2, 3], [raw(matrix[0]), raw(matrix[1])])
    checkpoint = disk.Checkpoint("here", {"vae": tensors}, {"vae": {}})
    assert digest._values(checkpoint, "vae") == short([["a", a], ["b", b]])


@pytest.mark.parametrize("shape, dtype", [
    ((), "float32"), ((5,), "int8"), ((3, 70), "float32"), ((2, 3, 4, 5), "float16"),
    ((0, 3), "int8"), ((1, 1, 300), "float32"),
])  # fmt: skip
def test_ranges_follow_each_other_in_row_order_and_are_small(monkeypatch, shape, dtype):
    monkeypatch.setattr(digest, "_PIECE", 64)
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tensor = files.of_array(array)
    parts = [np.ascontiguousarray(tensor.read(index)).tobytes() for index in digest._ranges(tensor)]
    assert b"".join(parts) == array.tobytes() and max(map(len, parts), default=0) <= 64


def test_every_component_has_a_digest_of_its_own_in_any_layout(saved, tmp_path):
    want = {name: digest.component(saved[0], name) for name in COMPONENTS}
    assert len(set(want.values())) == 4 and all(len(x) == 16 for x in want.values())
    for layout in ("original", "comfyui", "orbax"):
        layouts.write(disk.read(saved[0]), tmp_path / layout, layout)
        assert {n: digest.component(tmp_path / layout, n) for n in COMPONENTS} == want, layout
    loose = sorted((tmp_path / "comfyui").rglob("*.safetensors"))
    assert digest.component(loose, "low") == want["low"]


def test_the_orbax_form_is_read_some_leaves_at_a_time(saved, tmp_path, monkeypatch):
    layouts.write(disk.read(saved[0]), tmp_path / "orbax", "orbax")
    monkeypatch.setattr(files, "CHUNK", 4096)
    groups, original = [], load._stored_leaves
    monkeypatch.setattr(
        load, "_stored_leaves", lambda *args: groups.append(args[2]) or original(*args)
    )
    assert digest.component(tmp_path / "orbax", "high") == digest.component(saved[0], "high")
    assert len(groups) > 3
    assert all(len(group) == 1 or sum(_bytes(saved, p) for p in group) <= 4096 for group in groups)


def _bytes(saved, path):
    node = saved[1]["high"]
    for name in path.split("/"):
        node = node[name]
    return node.nbytes


def test_one_bit_of_any_component_changes_its_digest_alone(broken):
    before = {name: digest.component(broken, name) for name in COMPONENTS}
    for bit, (name, folder) in enumerate([("vae", "vae"), ("low", "transformer_2")]):
        (file,) = (broken / folder).glob("*.safetensors")
        _flip(file, bit)
        after = {n: digest.component(broken, n) for n in COMPONENTS}
        assert [n for n in COMPONENTS if after[n] != before[n]] == [name]
        before = after


def test_name_shape_dtype_and_config_are_part_of_a_digest(saved, broken, tmp_path):
    want = digest.component(saved[0], "vae")
    config = json.loads((broken / "vae/config.json").read_text())
    changed = config | {"latents_mean": [0.1, 0.2, 0.3, 0.5]}
    (broken / "vae/config.json").write_text(json.dumps(changed))
    assert digest.component(broken, "vae") != want
    (broken / "vae/config.json").write_text(json.dumps(config | {"_diffusers_version": "9"}))
    assert digest.component(broken, "vae") == want
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), saved[1])
    save.save_diffusers(half, tiny.CONFIG, tmp_path / "half")
    assert digest.component(tmp_path / "half", "vae") != want
    one = {"a": files.of_array(np.zeros((2, 3), np.int8))}
    others = [{"b": one["a"]}, {"a": files.of_array(np.zeros((3, 2), np.int8))}]
    others.append({"a": files.of_array(np.zeros((2, 3), np.uint8))})
    values = {digest._values(disk.Checkpoint("", {"vae": t}, {}), "vae") for t in (one, *others)}
    assert len(values) == 4


def test_a_second_call_reads_nothing_until_a_file_is_touched(broken, reads):
    want = digest.component(broken, "vae")
    (file,) = (broken / "vae").glob("*.safetensors")
    once = sum(reads)
    assert once == sum(t.nbytes for t in disk.read(broken).tensors["vae"].values())
    assert digest.component(broken, "vae") == want and sum(reads) == once
    assert digest.component(str(broken), "vae") == want and sum(reads) == once
    os.utime(file)
    assert digest.component(broken, "vae") == want and sum(reads) == 2 * once
    at = file.stat()
    _flip(file, 3)  # the size stays, and the time of change is put back
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert digest.component(broken, "vae") != want


def test_objects_of_a_store_have_the_digest_of_their_files_and_are_read_once(
    saved, bucket, reads, broken
):
    want = digest.component(saved[0], "vae")
    at = emulator.upload(saved[0], bucket / "model")
    reads.clear()
    assert digest.component(str(at), "vae") == want and reads
    reads.clear()
    assert digest.component(str(at), "vae") == want and not reads
    (file,) = (broken / "vae").glob("*.safetensors")
    _flip(file, 0)
    emulator.upload(file, at / "vae" / file.name)
    assert digest.component(str(at), "vae") == digest.component(broken, "vae") != want


def test_a_damaged_or_forbidden_file_of_digests_is_no_hindrance(broken, reads, kept, monkeypatch):
    want = digest.component(broken, "vae")
    once = sum(reads)
    for text in ("{", "[1]", "\x00"):
        kept.write_text(text)
        assert digest.component(broken, "vae") == want
    assert sum(reads) == 4 * once and len(json.loads(kept.read_text())) == 1
    assert [file.name for file in kept.parent.iterdir()] == ["digests.json"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(broken / "model_index.json"))  # not a folder
    assert digest.component(broken, "vae") == want


def test_the_embedded_model_has_digests_and_what_is_absent_is_named(saved):
    assert digest.component("tinywan22", "vae") == digest.component("tinywan22", "vae")
    with pytest.raises(ValueError, match="no image_encoder, only transformer, .*; give a") as error:
        digest.component(saved[0], "image_encoder")
    assert "\n" not in str(error.value)
