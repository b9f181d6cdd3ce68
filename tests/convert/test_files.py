"""convert/files.py: torch and GGUF files, and files that must be refused; see also test_fuzz.py."""

import json
import pathlib
import pickle

import gguf
import numpy as np
import pytest
import torch

from convert import disk, files, layouts, load
from tests import emulator


def test_a_truncated_file_is_named(broken):
    path = broken / "transformer/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="diffusion_pytorch_model.safetensors.*truncated"):
        load.load(broken)


@pytest.mark.parametrize(
    "name", ["../transformer/diffusion_pytorch_model.safetensors", "/etc/passwd", "", "..", 3]
)
def test_an_index_that_leaves_the_folder_is_refused(broken, name):
    index = {"metadata": {}, "weight_map": {"proj_out.bias": name}}
    file = broken / "transformer/diffusion_pytorch_model.safetensors.index.json"
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json"):
        load.load(broken)


def test_gguf_reads_every_listed_type(saved, tmp_path, rng):
    """patch_embedding has four axes there; Q8_0 and Q4_K against gguf's own dequantisation."""
    wide = rng.standard_normal((32, 256)).astype(np.float32)
    q = gguf.GGMLQuantizationType
    tensors = layouts.original_names("transformer", disk.read(saved[0]).tensors["transformer"])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "wan")
    want = {}
    for name, tensor in tensors.items():
        array = tensor.all()
        want[name] = array
        if name == "patch_embedding.weight":
            array = array.reshape(array.shape[0], -1, *array.shape[3:])
        if name == "blocks.0.self_attn.q.weight":
            packed = gguf.quants.quantize(array, q.Q8_0)
            want[name] = gguf.quants.dequantize(packed, q.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=q.Q8_0)
        elif name == "blocks.0.self_attn.k.weight":
            packed = gguf.quants.quantize(array, q.BF16)
            want[name] = gguf.quants.dequantize(packed, q.BF16)
            writer.add_tensor(name, packed, raw_dtype=q.BF16)
        elif name == "blocks.0.self_attn.v.weight":
            want[name] = array.astype(np.float16)
            writer.add_tensor(name, want[name])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = files.open_any(tmp_path / "m.gguf")[0]
    for name, array in want.items():
        np.testing.assert_array_equal(got[name].all(), array, err_msg=name)
    part = got["blocks.0.self_attn.q.weight"].read((slice(2, 5), slice(1, 7)))
    np.testing.assert_array_equal(part, want["blocks.0.self_attn.q.weight"][2:5, 1:7])
    assert disk.read(tmp_path / "m.gguf").configs["transformer"]["num_layers"] == 3

    block = rng.integers(0, 255, (32, 144), np.uint8)  # one Q4_K super-block of 256 values a row
    block[:, :4] = np.asarray([0.01, 0.02], np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q4.gguf", "wan")
    writer.add_tensor("w", block, raw_dtype=q.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = files.open_any(tmp_path / "q4.gguf")[0]["w"]
    assert tensor.shape == wide.shape
    np.testing.assert_array_equal(tensor.all(), gguf.quants.dequantize(block, q.Q4_K))


class Evil:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("/tmp/wanjax_evil_marker"),))


def test_pickled_code_in_a_pth_never_runs(tmp_path):
    marker = pathlib.Path("/tmp/wanjax_evil_marker")
    marker.unlink(missing_ok=True)
    torch.save({"w": torch.zeros(2), "x": Evil()}, tmp_path / "a.pth")
    (tmp_path / "b.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    for name in ("a.pth", "b.pth"):
        with pytest.raises(ValueError, match=name):
            disk.read(tmp_path / name)
    assert not marker.exists()


def test_any_range_of_a_remote_tensor_equals_the_local_one(bucket, tmp_path, rng):
    arrays = {
        "table": rng.standard_normal((6, 5, 4), np.float32),
        "half": rng.standard_normal((7, 3)).astype(files.DTYPES["BF16"]),
        "scalar": np.asarray(3.5, np.float64),
        "empty": np.zeros((0, 3), np.int8),
    }
    tensors = {name: files.of_array(array) for name, array in arrays.items()}
    files.write_safetensors(tmp_path / "x.safetensors", tensors, {"made": "here"})
    path = emulator.upload(tmp_path / "x.safetensors", bucket / "x.safetensors")
    got, metadata = files.open_any(str(path))
    assert metadata["made"] == "here" and got["table"].where == f"{bucket}/x.safetensors"
    for name, array in arrays.items():
        whole = got[name].all()
        assert whole.dtype == array.dtype and whole.shape == array.shape
        np.testing.assert_array_equal(whole, array)
    for at in (slice(2, 5), slice(0, 5), slice(0, 4)), (slice(1, 6), slice(1, 3), slice(2, 4)):
        np.testing.assert_array_equal(got["table"].read(at), arrays["table"][at])
    out = np.empty((6, 2, 4), np.float32)
    files.fill([(got["table"], (slice(0, 6), slice(3, 5), slice(0, 4)), out)])
    np.testing.assert_array_equal(out, arrays["table"][:, 3:])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"{path}: damaged safetensors file: .* truncated"):
        files.open_any(path)
    with pytest.raises(ValueError, match=f"{path}: .*(cut short|cannot be read)") as caught:
        got["half"].all()
    assert "\n" not in str(caught.value)


def test_torch_files_are_read_from_local_disks_only(bucket, tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pth")
    path = emulator.upload(tmp_path / "a.pth", bucket / "a.pth")
    with pytest.raises(ValueError, match=f"^{path}: only safetensors are read from an object"):
        disk.read(str(path))
