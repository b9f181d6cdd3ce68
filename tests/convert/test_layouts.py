"""convert/layouts.py: byte-exact round trips over the published key lists, and what others load."""

import dataclasses
import json
import shutil

import diffusers
import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from convert import disk, files, layouts, load, names, save, verify
from tests import emulator
from tests.convert import published, tiny
from wanjax import trees
from wanjax.models import clip, wan


@pytest.mark.parametrize("stem", [s for s in published.LISTS if "vae" not in s])
def test_round_trip_through_every_layout_is_byte_exact(stem, tmp_path):
    """source file -> ComfyUI -> original -> diffusers (where it has a class), all equal."""
    naming, keys = published.key_list(stem)
    config = json.loads((published.VARIANTS / f"{stem}.json").read_text())["config"]
    component = published.component(stem)
    want = published.random_tensors(published.small(keys, config))
    files.write_safetensors(tmp_path / "model.safetensors", want)
    steps = ["comfyui", "original"] + (["diffusers"] if naming == "diffusers" else [])
    source = tmp_path / "model.safetensors"
    hub = disk.read(source).tensors[component]
    for layout in steps:
        layouts.write(disk.read(source), tmp_path / layout, layout)
        source = tmp_path / layout
        if layout == "comfyui":
            (source,) = source.glob("*/*.safetensors")
        got = disk.read(source) if layout != "diffusers" else None
        if layout == "original" and naming == "original":
            tiny.same(files.open_folder(source)[0], want)
        if got:
            tiny.same(got.tensors[component], hub)
        else:
            tiny.same(files.open_folder(source / component)[0], want)
    if "vace" in stem:
        written = json.loads((tmp_path / "diffusers/transformer/config.json").read_text())
        assert written["vace_layers"] == config["vace_layers"]
        assert written["vace_in_channels"] == config["vace_in_channels"]
    if component == "transformer":
        table = names.rules("transformer", ())
        for name in files.open_folder(tmp_path / "original")[0]:
            assert names.to_diffusers(name, table) or name.endswith(".kernel")


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_published_vae_round_trips_through_every_layout(version, tmp_path):
    stem = f"keys_vae_wan{version}"
    config = json.loads((published.VARIANTS / f"{stem}.json").read_text())["config"]
    width, z_dim = config["base_dim"], config["z_dim"]
    widths = sorted({width, config["decoder_base_dim"] or width}, reverse=True)

    def size(n):
        for k, w in enumerate(widths):
            if n % w == 0:
                return (4 if k else 8) * (n // w) if len(widths) > 1 else 4 * (n // w)
        return n

    _, keys = published.key_list(stem)
    free = {z_dim, 2 * z_dim, 3, 12}
    want = published.random_tensors(
        {
            k: tuple(n if n in free and n not in widths else size(n) for n in s)
            for k, s in keys.items()
        }
    )
    files.write_safetensors(tmp_path / "vae.safetensors", want)
    source = tmp_path / "vae.safetensors"
    for layout in ("original", "comfyui", "diffusers"):
        layouts.write(disk.read(source), tmp_path / layout, layout)
        source = tmp_path / layout
        if layout == "comfyui":
            source = source / "vae/wan_vae.safetensors"
            table = dict(published.PATTERNS[f"vae_wan{version}"]["table"])
            assert set(files.open_safetensors(source)[0]) == set(table)
    tiny.same(files.open_folder(source / "vae")[0], want)
    assert (tmp_path / "original" / f"Wan{version}_VAE.pth").is_file()


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_every_layout_loads_to_the_same_parameters_and_config(saved, tmp_path, layout):
    layouts.write(disk.read(saved[0]), tmp_path / "out", layout)
    params, config = load.load(tmp_path / "out")
    assert tiny.equal(params, saved[1])
    assert config == tiny.CONFIG


def test_scaled_fp8_export_is_read_back_within_one_rounding(saved, tmp_path):
    layouts.write(disk.read(saved[0]), tmp_path / "out", "comfyui", "fp8_scaled")
    path = tmp_path / "out/diffusion_models/wan_high_noise.safetensors"
    raw, _ = files.open_safetensors(path)
    assert raw["blocks.0.ffn.0.weight"].dtype == ml_dtypes.float8_e4m3fn
    assert raw["blocks.0.ffn.0.scale_weight"].shape == () and "scaled_fp8" in raw
    got = disk.read(path).tensors["transformer"]
    for name, tensor in disk.read(saved[0]).tensors["transformer"].items():
        want = tensor.all()
        error = np.abs(got[name].all() - want)
        assert (error <= np.abs(want) / 16 + np.abs(want).max() / 448 / 512).all(), name


def test_the_sentencepiece_model_travels_as_a_tensor_and_as_a_file(saved, tmp_path):
    checkpoint = disk.read(saved[0])
    checkpoint.tokenizer = tmp_path / "tokenizer"
    checkpoint.tokenizer.mkdir()
    (checkpoint.tokenizer / "spiece.model").write_bytes(b"\x01pieces\x00")
    layouts.write(checkpoint, tmp_path / "c", "comfyui")
    raw, _ = files.open_safetensors(tmp_path / "c/text_encoders/umt5_xxl.safetensors")
    assert raw["spiece_model"].all().tobytes() == b"\x01pieces\x00"
    alone = disk.read([tmp_path / "c/text_encoders/umt5_xxl.safetensors"])
    layouts.write(alone, tmp_path / "o", "original")
    assert (tmp_path / "o/google/umt5-xxl/spiece.model").read_bytes() == b"\x01pieces\x00"


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_a_model_in_an_object_store_is_converted_as_the_local_one(saved, bucket, tmp_path, layout):
    folder = shutil.copytree(saved[0], tmp_path / "made")
    for name in ("spiece.model", "tokenizer.json"):
        (folder / "tokenizer").mkdir(exist_ok=True)
        (folder / "tokenizer" / name).write_text(name)
    path = emulator.upload(folder, bucket / "made")
    layouts.write(disk.read(path), tmp_path / "remote", layout)
    layouts.write(disk.read(folder), tmp_path / "local", layout)
    files_of = lambda at: {p.relative_to(at): p.read_bytes() for p in at.rglob("*.*")}
    assert files_of(tmp_path / "remote") == files_of(tmp_path / "local")


def test_diffusers_loads_what_came_from_original_files(saved, tmp_path):
    layouts.write(disk.read(saved[0]), tmp_path / "o", "original")
    layouts.write(disk.read(tmp_path / "o"), tmp_path / "d", "diffusers")
    pipe = diffusers.WanPipeline.from_pretrained(tmp_path / "d", tokenizer=None)
    shapes = jax.eval_shape(lambda: wan.init(jax.random.key(0), tiny.WAN))
    assert trees.count(shapes) == sum(p.numel() for p in pipe.transformer.parameters())
    assert pipe.config.boundary_ratio == tiny.CONFIG.boundary


def test_an_i2v_model_with_clip_goes_through_original_files_into_its_pipeline(tmp_path):
    """36-channel style input, image key and value projections, CLIP as .pth with joined q, k, v."""
    config = dataclasses.replace(
        tiny.CONFIG,
        name="tiny_i2v",
        wan=dataclasses.replace(tiny.WAN, in_channels=9, image_dim=80, added_kv_proj_dim=32),
        image=clip.CLIPVisionConfig(
            hidden_size=80,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=1,
            image_size=28,
        ),
        experts=("high",),
        boundary=None,
    )
    params = tiny.params(config)
    shapes = jax.eval_shape(lambda: clip.init(jax.random.key(0), config.image))
    params["image_encoder"] = tiny.random_like(shapes, 9)
    save.save_diffusers(params, config, tmp_path / "d")
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(tmp_path / "d", tokenizer=None)
    assert pipe.image_encoder.config.hidden_size == 80
    assert pipe.image_processor.crop_size["height"] == 28
    layouts.write(disk.read(tmp_path / "d"), tmp_path / "o", "original")
    clip_file = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    state = torch.load(tmp_path / "o" / clip_file, weights_only=True)
    assert state["visual.transformer.0.attn.to_qkv.weight"].shape == (240, 80)
    assert state["visual.cls_embedding"].shape == (1, 1, 80)
    got, again = load.load(tmp_path / "o")
    assert again == config and tiny.equal(got, params)
    errors = verify.verify(disk.read(tmp_path / "d"), disk.read(tmp_path / "o"))
    assert max(e for _, e in errors) < 1e-5
