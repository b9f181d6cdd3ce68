"""Every layout in and out: byte-exact round trips over the published key lists, quantised forms."""

import dataclasses
import json
import pathlib
import pickle

import diffusers
import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from convert import disk, export, files, names, weights
from tests.convert import test_names, tiny
from wanjax import trees
from wanjax.models import clip, wan

DTYPES = {1: np.float32, 2: ml_dtypes.bfloat16}


def small(keys, config):
    """The key list with every large axis shrunk, ratios to the model width kept."""
    dim = config.get("dim") or config.get("num_attention_heads", 0) * config.get(
        "attention_head_dim", 0
    )

    def size(n):
        if dim and n % dim == 0:
            return 8 * (n // dim)
        return n if n <= 96 else 4 + 4 * (n % 3)

    return {k: tuple(map(size, shape)) for k, shape in keys.items()}


def random_tensors(shapes, seed=0):
    """Random tensors: vectors float32, matrices bfloat16, the rest float16."""
    rng = np.random.default_rng(seed)
    draw = lambda s: rng.standard_normal(s).astype(DTYPES.get(len(s), np.float16))
    return {n: files.of_array(draw(s)) for n, s in shapes.items()}


def same(got, want):
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:5]
    for name, tensor in want.items():
        a, b = got[name].all(), tensor.all()
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("stem", [s for s in test_names.LISTS if "vae" not in s])
def test_round_trip_through_every_layout_is_byte_exact(stem, tmp_path):
    """source file -> ComfyUI -> original -> diffusers (where it has a class), all equal."""
    naming, keys = test_names.key_list(stem)
    config = json.loads((test_names.GOLDEN / f"{stem}.json").read_text())["config"]
    component = test_names.component(stem)
    want = random_tensors(small(keys, config))
    files.write_safetensors(tmp_path / "model.safetensors", want)
    steps = ["comfyui", "original"] + (["diffusers"] if naming == "diffusers" else [])
    source = tmp_path / "model.safetensors"
    hub = disk.read(source).tensors[component]
    for layout in steps:
        export.write(disk.read(source), tmp_path / layout, layout)
        source = tmp_path / layout
        if layout == "comfyui":
            (source,) = source.glob("*/*.safetensors")
        got = disk.read(source) if layout != "diffusers" else None
        if layout == "original" and naming == "original":
            same(files.open_folder(source)[0], want)
        if got:
            same(got.tensors[component], hub)
        else:
            same(files.open_folder(source / component)[0], want)
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
    config = json.loads((test_names.GOLDEN / f"{stem}.json").read_text())["config"]
    width, z_dim = config["base_dim"], config["z_dim"]
    widths = sorted({width, config["decoder_base_dim"] or width}, reverse=True)

    def size(n):
        for k, w in enumerate(widths):
            if n % w == 0:
                return (4 if k else 8) * (n // w) if len(widths) > 1 else 4 * (n // w)
        return n

    _, keys = test_names.key_list(stem)
    free = {z_dim, 2 * z_dim, 3, 12}
    want = random_tensors(
        {
            k: tuple(n if n in free and n not in widths else size(n) for n in s)
            for k, s in keys.items()
        }
    )
    files.write_safetensors(tmp_path / "vae.safetensors", want)
    source = tmp_path / "vae.safetensors"
    for layout in ("original", "comfyui", "diffusers"):
        export.write(disk.read(source), tmp_path / layout, layout)
        source = tmp_path / layout
        if layout == "comfyui":
            source = source / "vae/wan_vae.safetensors"
            table = dict(test_names.PATTERNS[f"vae_wan{version}"]["table"])
            assert set(files.open_safetensors(source)[0]) == set(table)
    same(files.open_folder(source / "vae")[0], want)
    assert (tmp_path / "original" / f"Wan{version}_VAE.pth").is_file()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(diffusers folder, parameters) of the tiny two-expert model."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    params = tiny.params()
    weights.save_diffusers(params, tiny.CONFIG, folder)
    return folder, params


@pytest.mark.parametrize("layout", export.LAYOUTS)
def test_every_layout_loads_to_the_same_parameters_and_config(model, tmp_path, layout):
    export.write(disk.read(model[0]), tmp_path / "out", layout)
    params, config = weights.load(tmp_path / "out")
    assert tiny.equal(params, model[1])
    assert config == tiny.CONFIG


def test_a_list_of_single_files_loads_as_one_model(model, tmp_path):
    export.write(disk.read(model[0]), tmp_path / "out", "comfyui")
    (tmp_path / "out/wanjax.json").unlink()
    files_of = sorted(str(p) for p in tmp_path.glob("out/*/*.safetensors"))
    with pytest.raises(ValueError, match="two experts need boundary_ratio"):
        weights.load(files_of)
    params, config = weights.load([f for f in files_of if "low" not in f])
    assert tiny.equal(params, {k: v for k, v in model[1].items() if k != "low"})
    assert (config.experts, config.vae, config.text) == (("high",), tiny.VAE, tiny.TEXT)


def comfy(model, tmp_path, change=lambda t: t, **kwargs):
    """A ComfyUI file of the high expert, its tensors changed."""
    tensors = disk.read(model[0]).tensors["transformer"]
    named = change(export.original_names("transformer", tensors))
    path = tmp_path / "wan_high_noise.safetensors"
    header = {"wanjax.transformer": json.dumps({"num_heads": 2})}
    files.write_safetensors(path, named, header, **kwargs)
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
def test_wrapper_prefixes_are_found_without_being_told(model, tmp_path, prefix):
    path = comfy(model, tmp_path, lambda t: {prefix + n: v for n, v in t.items()})
    tree, _ = weights.load_component(path, "transformer")
    assert tiny.equal(tree, model[1]["high"])


def test_a_checkpoint_of_several_components_in_one_file_is_split(model, tmp_path):
    checkpoint = disk.read(model[0])
    dit = export.original_names("transformer", checkpoint.tensors["transformer"])
    text = checkpoint.tensors["text_encoder"]
    merged = {f"model.diffusion_model.{n}": t for n, t in dit.items()}
    merged |= {f"text_encoders.umt5xxl.transformer.{n}": t for n, t in text.items()}
    header = {"wanjax.transformer": json.dumps({"num_heads": 2})}
    files.write_safetensors(tmp_path / "all.safetensors", merged, header)
    got = disk.read(tmp_path / "all.safetensors")
    same(got.tensors["transformer"], checkpoint.tensors["transformer"])
    same(got.tensors["text_encoder"], text)


@pytest.mark.parametrize("form", ["scalar", "row", "block"])
def test_scaled_fp8_reads_as_weight_times_scale(model, tmp_path, form, rng):
    f8 = np.dtype(ml_dtypes.float8_e4m3fn)
    name = "blocks.1.self_attn.q"
    w8 = rng.standard_normal((32, 32)).astype(f8)
    shape = {"scalar": (), "row": (32, 1), "block": (32, 4, 1)}[form]
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)

    def change(t):
        extra = {f"{name}.scale_weight": scale, f"{name}.scale_input": np.ones((), np.float32)}
        extra |= {f"{name}.weight": w8, "scaled_fp8": np.zeros(2, f8)}
        return t | {n: files.of_array(v) for n, v in extra.items()}

    path = comfy(model, tmp_path, change)
    tensor = disk.read(path).tensors["transformer"]["blocks.1.attn1.to_q.weight"]
    w = w8.astype(np.float32)
    want = (w.reshape(32, 4, 8) * scale).reshape(32, 32) if form == "block" else w * scale
    np.testing.assert_array_equal(tensor.all(), want)
    np.testing.assert_array_equal(tensor.read((slice(3, 9), slice(5, 30))), want[3:9, 5:30])
    tree, _ = weights.load_component(path, "transformer")
    kernel = tree["blocks"]["attn1"]["to_q"]["kernel"]
    np.testing.assert_array_equal(kernel[1], want.T)


def test_plain_fp8_loads_as_bfloat16(model, tmp_path):
    f8 = ml_dtypes.float8_e4m3fn
    path = comfy(model, tmp_path, lambda t: {n: files.cast(v, f8) for n, v in t.items()})
    tree, _ = weights.load_component(path, "transformer")
    leaf = tree["blocks"]["attn1"]["to_q"]["kernel"]
    want = jnp.asarray(model[1]["high"]["blocks"]["attn1"]["to_q"]["kernel"]).astype(f8)
    assert leaf.dtype == jnp.bfloat16
    np.testing.assert_array_equal(leaf, want.astype(jnp.bfloat16))


def test_scaled_fp8_export_is_read_back_within_one_rounding(model, tmp_path):
    export.write(disk.read(model[0]), tmp_path / "out", "comfyui", "fp8_scaled")
    path = tmp_path / "out/diffusion_models/wan_high_noise.safetensors"
    raw, _ = files.open_safetensors(path)
    assert raw["blocks.0.ffn.0.weight"].dtype == ml_dtypes.float8_e4m3fn
    assert raw["blocks.0.ffn.0.scale_weight"].shape == () and "scaled_fp8" in raw
    got = disk.read(path).tensors["transformer"]
    for name, tensor in disk.read(model[0]).tensors["transformer"].items():
        want = tensor.all()
        error = np.abs(got[name].all() - want)
        assert (error <= np.abs(want) / 16 + np.abs(want).max() / 448 / 512).all(), name


def test_gguf_reads_every_listed_type(model, tmp_path, rng):
    """patch_embedding has four axes there; Q8_0 and Q4_K against gguf's own dequantisation."""
    wide = rng.standard_normal((32, 256)).astype(np.float32)
    q = gguf.GGMLQuantizationType
    tensors = export.original_names("transformer", disk.read(model[0]).tensors["transformer"])
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


def test_the_sentencepiece_model_travels_as_a_tensor_and_as_a_file(model, tmp_path):
    checkpoint = disk.read(model[0])
    checkpoint.tokenizer = tmp_path / "tokenizer"
    checkpoint.tokenizer.mkdir()
    (checkpoint.tokenizer / "spiece.model").write_bytes(b"\x01pieces\x00")
    export.write(checkpoint, tmp_path / "c", "comfyui")
    raw, _ = files.open_safetensors(tmp_path / "c/text_encoders/umt5_xxl.safetensors")
    assert raw["spiece_model"].all().tobytes() == b"\x01pieces\x00"
    alone = disk.read([tmp_path / "c/text_encoders/umt5_xxl.safetensors"])
    export.write(alone, tmp_path / "o", "original")
    assert (tmp_path / "o/google/umt5-xxl/spiece.model").read_bytes() == b"\x01pieces\x00"


def test_variants_the_model_cannot_run_are_named(tmp_path):
    naming, keys = test_names.key_list("keys_wan2.2_s2v_14b")
    files.write_safetensors(
        tmp_path / "s2v.safetensors", random_tensors(small(keys, {"dim": 5120}))
    )
    with pytest.raises(ValueError, match="S2V checkpoint, which the model code does not run"):
        weights.load(tmp_path / "s2v.safetensors")


def test_expert_files_are_told_apart_by_name(model, tmp_path):
    export.write(disk.read(model[0]), tmp_path / "out", "comfyui")
    folder = tmp_path / "out/diffusion_models"
    (folder / "wan_high_noise.safetensors").rename(folder / "Wan_T2V_HIGH_fp16.safetensors")
    (folder / "wan_low_noise.safetensors").rename(folder / "Wan_T2V_LOW_fp16.safetensors")
    got = disk.read(folder).tensors
    want = disk.read(model[0]).tensors
    same(got["transformer"], want["transformer"])
    same(got["transformer_2"], want["transformer_2"])


def test_verify_compares_block_by_block_and_sees_a_swapped_norm(model, tmp_path):
    source = disk.read(model[0])
    export.write(source, tmp_path / "out", "original")
    errors = export.verify(source, disk.read(tmp_path / "out"))
    assert len(errors) == 6 and max(e for _, e in errors) < 1e-5
    broken = disk.read(tmp_path / "out")
    t = broken.tensors["transformer_2"]
    a, b = "blocks.1.attn1.norm_q.weight", "blocks.1.attn1.norm_k.weight"
    t[a], t[b] = t[b], t[a]
    worst = max(export.verify(source, broken), key=lambda e: e[1])
    assert worst[0] == "transformer_2 block 1" and worst[1] > 1e-3


def test_command_converts_and_reports(model, tmp_path, capsys):
    args = [str(model[0]), "--to", "original", "--out", str(tmp_path / "o"), "--dtype", "bfloat16"]
    assert export.main([*args, "--verify"]) == 0
    text = capsys.readouterr().out
    assert "transformer_2" in text and "worst relative error" in text
    raw, _ = files.open_folder(tmp_path / "o/high_noise_model")
    assert raw["blocks.0.ffn.0.weight"].dtype == ml_dtypes.bfloat16
    assert raw["blocks.0.modulation"].dtype == np.float32
    assert export.main(args) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_diffusers_loads_what_came_from_original_files(model, tmp_path):
    export.write(disk.read(model[0]), tmp_path / "o", "original")
    export.write(disk.read(tmp_path / "o"), tmp_path / "d", "diffusers")
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
    weights.save_diffusers(params, config, tmp_path / "d")
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(tmp_path / "d", tokenizer=None)
    assert pipe.image_encoder.config.hidden_size == 80
    assert pipe.image_processor.crop_size["height"] == 28
    export.write(disk.read(tmp_path / "d"), tmp_path / "o", "original")
    clip_file = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    state = torch.load(tmp_path / "o" / clip_file, weights_only=True)
    assert state["visual.transformer.0.attn.to_qkv.weight"].shape == (240, 80)
    assert state["visual.cls_embedding"].shape == (1, 1, 80)
    got, again = weights.load(tmp_path / "o")
    assert again == config and tiny.equal(got, params)
    errors = export.verify(disk.read(tmp_path / "d"), disk.read(tmp_path / "o"))
    assert max(e for _, e in errors) < 1e-5
