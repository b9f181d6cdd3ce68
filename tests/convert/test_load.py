"""convert/load.py: checkpoints onto devices, whole, in chunks, split, quantised."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import disk, files, layouts, load, save
from tests import emulator
from tests.convert import published, tiny
from wanjax import trees
from wanjax.models import quant, wan
from wanjax.parallel import sharding


def test_saved_folder_loads_back_bit_for_bit(saved):
    folder, params = saved
    got, config = load.load(folder)
    assert config == tiny.CONFIG
    assert tiny.equal(got, params)


@pytest.mark.parametrize("shards", [None, 40_000])
def test_a_folder_in_an_object_store_loads_bit_for_bit(
    saved, bucket, tmp_path, monkeypatch, shards
):
    folder, params = saved
    if shards:
        monkeypatch.setattr(files, "SHARD", shards)
        folder = tmp_path / "sharded"
        save.save_diffusers(params, tiny.CONFIG, folder)
        assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    path = str(emulator.upload(folder, bucket / "models/tiny"))
    got, config = load.load(path, mesh=sharding.make_mesh({"fsdp": 4, "tensor": 2}))
    assert config == tiny.CONFIG
    assert tiny.equal(jax.device_get(got), jax.device_get(params))


def test_the_orbax_form_loads_from_gs_and_is_refused_on_s3(saved, bucket, tmp_path):
    folder, params = saved
    layouts.write(disk.read(folder), tmp_path / "orbax", "orbax")
    path = emulator.upload(tmp_path / "orbax", bucket / "tiny")
    if str(path).startswith("s3://"):
        with pytest.raises(ValueError, match=f"^{path}: Orbax reads its arrays from local disks "):
            load.load(path)
        return
    got, _ = load.load(path, mesh=sharding.make_mesh({"fsdp": 4, "tensor": 2}))
    assert tiny.equal(jax.device_get(got), jax.device_get(params))


def test_what_is_missing_in_an_object_store_is_one_line(saved, bucket):
    with pytest.raises(ValueError, match=f"^{bucket}/tiny: no such file or folder; ") as none:
        load.load(f"{bucket}/tiny")
    path = emulator.upload(saved[0], bucket / "tiny")
    (path / "transformer/config.json").unlink()
    with pytest.raises(ValueError, match=f"{path}/transformer/config.json: cannot be") as gone:
        load.load(path)
    assert "\n" not in f"{none.value}{gone.value}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_folders_of_diffusers_load_exactly(tmp_path, dtype):
    high, low = tiny.torch_transformer(seed=0).to(dtype), tiny.torch_transformer(seed=1).to(dtype)
    for component, model in (("transformer", high), ("transformer_2", low)):
        model.save_pretrained(tmp_path / component, max_shard_size="40KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 2
    tiny.torch_vae().save_pretrained(tmp_path / "vae")
    tiny.torch_text().save_pretrained(tmp_path / "text_encoder")
    (tmp_path / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.9}))
    params, config = load.load(tmp_path)
    assert (config.experts, config.boundary) == (("high", "low"), 0.9)
    for expert, model in (("high", high), ("low", low)):
        mine = save.of_tree(params[expert])
        for name, value in model.state_dict().items():
            assert mine[name].dtype == str(value.dtype).removeprefix("torch.")
            np.testing.assert_array_equal(value.float(), mine[name].all().astype(np.float32))


def test_dtype_applies_to_matmul_weights_only(saved):
    params, _ = load.load(saved[0], dtype=jnp.bfloat16)
    flat = trees.flatten(params["high"])
    assert flat["blocks/attn1/to_q/kernel"].dtype == jnp.bfloat16
    for path in ("blocks/scale_shift_table", "blocks/norm2/scale", "blocks/attn1/norm_q/scale"):
        assert flat[path].dtype == jnp.float32
    want = jnp.asarray(saved[1]["high"]["proj_out"]["kernel"], jnp.bfloat16)
    np.testing.assert_array_equal(flat["proj_out/kernel"], want)


@pytest.mark.parametrize(
    "shape,chunk,small",
    [
        ({"data": 8}, 1 << 30, 1 << 30),
        ({"fsdp": 4, "tensor": 2}, 9000, 0),
        ({"context": 8}, 1 << 30, 2000),
    ],
)
def test_placement_on_a_mesh_equals_the_plain_load(saved, monkeypatch, shape, chunk, small):
    monkeypatch.setattr(files, "CHUNK", chunk)
    monkeypatch.setattr(load, "_SMALL", small)
    mesh = sharding.make_mesh(shape)
    tree, config = load.load_component(saved[0], "transformer", mesh=mesh)
    assert tiny.equal(jax.device_get(tree), jax.device_get(saved[1]["high"]))
    kernel = trees.flatten(tree)["blocks/attn1/to_q/kernel"]
    parts = shape.get("fsdp", 1) * shape.get("tensor", 1) * shape.get("context", 1)
    assert kernel.addressable_shards[0].data.size * parts == kernel.size


def test_a_tensor_split_over_local_devices_is_read_once(saved, monkeypatch):
    """Its shards together are read as one contiguous range, not once for each device."""
    count, fill = [0], files.fill

    def counted(jobs):
        jobs = list(jobs)
        count[0] += sum(out.nbytes for _, _, out in jobs)
        fill(jobs)

    monkeypatch.setattr(files, "fill", counted)
    read = []
    for shape in ({"data": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 2, "stage": 2, "data": 2}):
        count[0] = 0
        load.load_component(saved[0], "transformer", mesh=sharding.make_mesh(shape))
        read.append(count[0])
    assert read[0] > 0 and read == [read[0]] * 3


def test_chunked_load_without_mesh_equals_the_plain_load(saved, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 6000)
    assert tiny.equal(load.load(saved[0])[0], saved[1])


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_a_quantised_load_equals_quantising_what_was_loaded(saved, dtype):
    loaded, _ = load.load(saved[0], dtype=dtype)
    want = trees.flatten(wan.store(load.load(saved[0], dtype=jnp.bfloat16)[0]["high"], dtype))
    flat = trees.flatten(loaded["high"])
    assert set(flat) == set(want)
    assert flat["blocks/attn1/to_q/kernel"].dtype == quant.DTYPES[dtype]
    for path, leaf in want.items():
        assert flat[path].dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(flat[path]), np.asarray(leaf), err_msg=path)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded["vae"])} == {jnp.dtype(jnp.bfloat16)}


def test_layers_of_different_dtypes_meet_in_float32(broken):
    name = "blocks.1.attn1.to_q.weight"
    want = {}

    def change(d):
        for n in d:
            if "attn1.to_q.weight" in n and n != name:
                d[n] = d[n].astype(jnp.bfloat16)
        want.update(d)

    tiny.edit(broken, change)
    kernel = load.load(broken)[0]["high"]["blocks"]["attn1"]["to_q"]["kernel"]
    assert kernel.dtype == jnp.float32
    for layer in range(3):
        tensor = want[f"blocks.{layer}.attn1.to_q.weight"]
        np.testing.assert_array_equal(kernel[layer], tensor.T.astype(np.float32))


_TWO_PROCESSES = """
import sys, json
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port, folder, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from convert import disk, files, load, save
from wanjax.parallel import sharding
taken = []
def count(tensor):
    def read(index):
        part = tensor.read(index)
        taken.append(part.nbytes)
        return part
    return files.replace(tensor, read=read)
checkpoint = disk.read(folder)
tensors = {n: count(t) for n, t in checkpoint.tensors["transformer"].items()}
shapes = load.plan(checkpoint, "transformer")
mesh = sharding.make_mesh({"fsdp": 2})
tree = load.place(tensors, shapes, "transformer", mesh=mesh)
config = disk.model_config(checkpoint)
params = {"high": tree, "low": tree}
save.save_diffusers(params, config, out)
print("taken", sum(taken), sum(t.nbytes for t in tensors.values()))
"""


def test_two_processes_read_their_own_shards_and_save_together(saved, tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {
        "XLA_FLAGS": "",
        "PYTHONPATH": str(pathlib.Path(load.__file__).parents[1]),
    }
    command = [sys.executable, "-c", _TWO_PROCESSES]
    runs = [
        subprocess.Popen(
            [*command, str(rank), port, str(saved[0]), str(tmp_path / "out")],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    for text in out:
        taken, total = map(int, text.split("taken ")[1].split())
        assert taken < 0.75 * total  # half of the matrices and all of the small vectors
    tree, _ = load.load_component(tmp_path / "out", "transformer_2")
    assert tiny.equal(tree, saved[1]["high"])


def test_missing_tensors_are_named(broken):
    tiny.edit(broken, lambda d: (d.pop("blocks.1.attn1.to_q.weight"), d.pop("proj_out.bias")))
    with pytest.raises(ValueError, match=r"transformer has .* 2 missing: .*blocks\.1\.attn1\.to_q"):
        load.load(broken)


def test_unexpected_and_misshapen_tensors_are_named_with_shapes(broken):
    def change(d):
        d["blocks.7.norm2.bias"] = np.zeros(32, np.float32)
        d["proj_out.weight"] = np.zeros((16, 31), np.float32)

    tiny.edit(broken, change)
    pattern = r"1 unexpected: blocks\.7.*1 of wrong shape: proj_out.weight is \(16, 31\), expected"
    with pytest.raises(ValueError, match=pattern) as error:
        load.load(broken)
    assert "\n" not in str(error.value)


def test_variants_the_model_cannot_run_are_named(tmp_path):
    naming, keys = published.key_list("keys_wan2.2_s2v_14b")
    files.write_safetensors(
        tmp_path / "s2v.safetensors", published.random_tensors(published.small(keys, {"dim": 5120}))
    )
    with pytest.raises(ValueError, match="S2V checkpoint, which the model code does not run"):
        load.load(tmp_path / "s2v.safetensors")
