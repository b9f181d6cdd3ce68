"""convert/disk.py: any layout as lazy tensors under diffusers names, with its configs."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert import disk, files, layouts, load
from tests.convert import tiny


def test_a_list_of_single_files_loads_as_one_model(saved, tmp_path):
    layouts.write(disk.read(saved[0]), tmp_path / "out", "comfyui")
    (tmp_path / "out/wanjax.json").unlink()
    files_of = sorted(str(p) for p in tmp_path.glob("out/*/*.safetensors"))
    with pytest.raises(ValueError, match="two experts need boundary_ratio"):
        load.load(files_of)
    params, config = load.load([f for f in files_of if "low" not in f])
    assert tiny.equal(params, {k: v for k, v in saved[1].items() if k != "low"})
    assert (config.experts, config.vae, config.text) == (("high",), tiny.VAE, tiny.TEXT)


def comfy(saved, tmp_path, change=lambda t: t):
    """A ComfyUI file of the high expert, its tensors changed."""
    tensors = disk.read(saved[0]).tensors["transformer"]
    named = change(layouts.original_names("transformer", tensors))
    path = tmp_path / "wan_high_noise.safetensors"
    header = {"wanjax.transformer": json.dumps({"num_heads": 2})}
    files.write_safetensors(path, named, header)
    return path


PREFIXES = [
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "model.",
    "module.",
    "module._orig_mod.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_wrapper_prefixes_are_found_without_being_told(saved, tmp_path, prefix):
    path = comfy(saved, tmp_path, lambda t: {prefix + n: v for n, v in t.items()})
    tree, _ = load.load_component(path, "transformer")
    assert tiny.equal(tree, saved[1]["high"])


def test_a_checkpoint_of_several_components_in_one_file_is_split(saved, tmp_path):
    checkpoint = disk.read(saved[0])
    dit = layouts.original_names("transformer", checkpoint.tensors["transformer"])
    text = checkpoint.tensors["text_encoder"]
    merged = {f"model.diffusion_model.{n}": t for n, t in dit.items()}
    merged |= {f"text_encoders.umt5xxl.transformer.{n}": t for n, t in text.items()}
    header = {"wanjax.transformer": json.dumps({"num_heads": 2})}
    files.write_safetensors(tmp_path / "all.safetensors", merged, header)
    got = disk.read(tmp_path / "all.safetensors")
    tiny.same(got.tensors["transformer"], checkpoint.tensors["transformer"])
    tiny.same(got.tensors["text_encoder"], text)


@pytest.mark.parametrize("form", ["scalar", "row", "block"])
def test_scaled_fp8_reads_as_weight_times_scale(saved, tmp_path, form, rng):
    f8 = np.dtype(ml_dtypes.float8_e4m3fn)
    name = "blocks.1.self_attn.q"
    w8 = rng.standard_normal((32, 32)).astype(f8)
    shape = {"scalar": (), "row": (32, 1), "block": (32, 4, 1)}[form]
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)

    def change(t):
        extra = {f"{name}.scale_weight": scale, f"{name}.scale_input": np.ones((), np.float32)}
        extra |= {f"{name}.weight": w8, "scaled_fp8": np.zeros(2, f8)}
        return t | {n: files.of_array(v) for n, v in extra.items()}

    path = comfy(saved, tmp_path, change)
    tensor = disk.read(path).tensors["transformer"]["blocks.1.attn1.to_q.weight"]
    w = w8.astype(np.float32)
    want = (w.reshape(32, 4, 8) * scale).reshape(32, 32) if form == "block" else w * scale
    np.testing.assert_array_equal(tensor.all(), want)
    np.testing.assert_array_equal(tensor.read((slice(3, 9), slice(5, 30))), want[3:9, 5:30])
    tree, _ = load.load_component(path, "transformer")
    kernel = tree["blocks"]["attn1"]["to_q"]["kernel"]
    np.testing.assert_array_equal(kernel[1], want.T)


def test_plain_fp8_loads_as_bfloat16(saved, tmp_path):
    f8 = ml_dtypes.float8_e4m3fn
    path = comfy(saved, tmp_path, lambda t: {n: files.cast(v, f8) for n, v in t.items()})
    tree, _ = load.load_component(path, "transformer")
    leaf = tree["blocks"]["attn1"]["to_q"]["kernel"]
    want = jnp.asarray(saved[1]["high"]["blocks"]["attn1"]["to_q"]["kernel"]).astype(f8)
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(leaf, want.astype(jnp.bfloat16))


def test_expert_files_are_told_apart_by_name(saved, tmp_path):
    layouts.write(disk.read(saved[0]), tmp_path / "out", "comfyui")
    folder = tmp_path / "out/diffusion_models"
    (folder / "wan_high_noise.safetensors").rename(folder / "Wan_T2V_HIGH_fp16.safetensors")
    (folder / "wan_low_noise.safetensors").rename(folder / "Wan_T2V_LOW_fp16.safetensors")
    got = disk.read(folder).tensors
    want = disk.read(saved[0]).tensors
    tiny.same(got["transformer"], want["transformer"])
    tiny.same(got["transformer_2"], want["transformer_2"])


def test_boundary_without_a_second_expert_is_refused(broken):
    shutil.rmtree(broken / "transformer_2")
    with pytest.raises(ValueError, match="boundary_ratio 0.875 .* no transformer_2"):
        load.load(broken)


def test_unknown_config_keys_are_ignored_with_a_warning(broken):
    path = broken / "vae/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clip_output": False}))
    with pytest.warns(UserWarning, match="clip_output"):
        load.load(broken)
