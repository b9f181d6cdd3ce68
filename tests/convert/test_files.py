"""convert/files.py: torch and GGUF files, and files that must be refused; see also test_fuzz.py."""

import json
import pathlib
import pickle

import gguf
import numpy as np
import pytest
import torch

from convert import disk, files, layouts, load


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
