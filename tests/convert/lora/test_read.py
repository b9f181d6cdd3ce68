"""convert/lora/read.py: every dialect, against the dense changes of tests/golden/lora."""

import json

import numpy as np
import pytest

from convert.lora import read
from tests import emulator
from tests.convert import published, tiny


def test_golden_file_gives_the_expected_dense_change(golden):
    published.check(*golden, 1e-6)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t | {f"{tiny.Q}.dora_scale": np.ones(32, np.float32)}, "DoRA"),
        (lambda t: t | {"lora_te_x.lora_down.weight": np.ones((2, 2))}, "1 of 3 keys are not Wan"),
        (lambda t: t | {f"{tiny.Q}x.lora_A.weight": np.ones((2, 2))}, "not Wan adapter keys"),
        (
            lambda t: {k: v for k, v in t.items() if "lora_B" not in k},
            "not make a complete adapter",
        ),
        (lambda t: t | {f"{tiny.Q}.alpha": np.ones(3)}, "not one finite number"),
        (lambda t: t | {f"{tiny.Q}.alpha": np.asarray(np.nan)}, "are NaN or infinite"),
        (lambda t: t | {f"{tiny.Q}.lora_B.weight": np.ones((32, 3))}, "pair of shapes"),
        (lambda t: t | {f"{tiny.Q}.lora_up.weight": np.ones((32, 2))}, "two tensors of kind b"),
        (lambda t: t | {f"{tiny.Q}.hada_w1_a": np.ones((32, 2))}, "not make a complete adapter"),
        (lambda t: {}, "no adapter tensors"),
    ],
)
def test_what_cannot_be_read_whole_is_refused(tmp_path, change, message):
    path = tiny.save_adapter(tmp_path / "x.safetensors", change(tiny.pair(tiny.Q)))
    with pytest.raises(ValueError, match=message) as error:
        read.read(path)
    assert "\n" not in str(error.value) and "x.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        "lora_unet_blocks_1.self_attn.q.lora_{}.weight",  # dots after the underscored prefix
        "lora_unet_blocks_1_self_attn_q.lora_{}.weight",
        "blocks.1.self_attn.q.lora_{}.my_adapter.weight",
        "pipe.dit.blocks.1.self_attn.q.lora_{}.weight",
        "base_model.model.diffusion_model.blocks.1.self_attn.q.lora_{}.default.weight",
        "transformer.blocks.1.attn1.to_q.lora.{}.weight",
        "lora_transformer_blocks_1_attn1_to_q.lora_{}.weight",
        "module._orig_mod.blocks.1.attn1.to_q.lora_{}",
    ],
)
def test_one_module_is_found_under_every_spelling(tmp_path, key):
    sides = ("A", "B") if "alpha" not in key else ()
    sides = ("down", "up") if "unet" in key or "lora." in key else sides
    tensors = dict(zip((key.format(s) for s in sides), tiny.pair("m").values(), strict=True))
    found = read.read(tiny.save_adapter(tmp_path / "x.safetensors", tensors))
    assert list(found.modules[None]) == ["blocks.1.attn1.to_q"]


def test_rank_stabilised_scale_is_alpha_over_root_rank(tmp_path):
    settings = {"r": 4, "lora_alpha": 6, "use_rslora": True}
    header = {
        "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in settings.items()})
    }
    path = tiny.save_adapter(
        tmp_path / "x.safetensors", tiny.pair("transformer.blocks.0.attn1.to_q", 4), header
    )
    assert read.read(path).modules[None]["blocks.0.attn1.to_q"].scale == 3.0


def test_alpha_patterns_are_names_and_anything_else_is_refused(tmp_path):
    key = "transformer.blocks.0.attn1.to_q"
    for pattern, scale in (
        ("^blocks.0.attn1.to_q", 4.0),
        ("attn1.to_q", 4.0),
        ("^attn1.to_q", 1.0),
    ):
        settings = {"r": 2, "lora_alpha": 2, "alpha_pattern": {pattern: 8}}
        header = {"lora_adapter_metadata": json.dumps(settings)}
        found = read.read(tiny.save_adapter(tmp_path / "x.safetensors", tiny.pair(key), header))
        assert found.modules[None]["blocks.0.attn1.to_q"].scale == scale
    header = {"lora_adapter_metadata": json.dumps(settings | {"alpha_pattern": {"(a+)+$": 8}})}
    with pytest.raises(ValueError, match="is an expression"):
        read.read(tiny.save_adapter(tmp_path / "x.safetensors", tiny.pair(key), header))


@pytest.mark.parametrize(
    "name,expert",
    [
        ("style_high_noise", "high"),
        ("Wan22_Lightning_LOW_fp16", "low"),
        ("x-HighNoise-rank64", "high"),
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH_fp16", "high"),
        ("wan22_low_r64", "low"),
        ("high_quality_style", None),
        ("low_light", None),
        ("highway_follower", None),
        ("slow_motion", None),
        ("below", None),
    ],
)
def test_the_expert_is_read_from_the_file_name(tmp_path, name, expert):
    assert read.read(
        tiny.save_adapter(tmp_path / f"{name}.safetensors", tiny.pair(tiny.Q))
    ).experts == [expert]


def test_adapters_in_an_object_store_and_in_the_home_folder_read_alike(
    bucket, tmp_path, monkeypatch
):
    tiny.save_adapter(tmp_path / "x_high_noise.safetensors", tiny.pair(tiny.Q))
    tiny.save_adapter(tmp_path / "x_low_noise.safetensors", tiny.pair(tiny.Q))
    emulator.upload(tmp_path, bucket / "adapters")
    monkeypatch.setenv("HOME", str(tmp_path))
    (want,) = read.read("~/x_low_noise.safetensors").modules["low"].values()
    one = read.read(f"{bucket}/adapters/x_low_noise.safetensors")
    both = read.read(f"{bucket}/adapters")
    assert one.experts == ["low"] and both.experts == ["high", "low"]
    for found in (one, both):
        (pair,) = found.modules["low"].values()
        np.testing.assert_array_equal(pair.b @ pair.a, want.b @ want.a)
    with pytest.raises(ValueError, match=f"^{bucket}/none.safetensors: no such file; give the"):
        read.read(f"{bucket}/none.safetensors")
