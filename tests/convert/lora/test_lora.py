"""The public functions of convert/lora."""

import dataclasses

import pytest

from convert import lora, save, weights
from tests.convert import tiny


def test_unclear_or_contradicting_experts_are_refused(tmp_path):
    plain = tiny.save_adapter(tmp_path / "style.safetensors", tiny.pair(tiny.Q))
    low = tiny.save_adapter(tmp_path / "style_low_noise.safetensors", tiny.pair(tiny.Q))
    both = tiny.save_adapter(tmp_path / "high_to_low.safetensors", tiny.pair(tiny.Q))
    swapped = tiny.save_adapter(
        tmp_path / "a_high_noise.safetensors", tiny.pair(tiny.Q), {"wanjax.expert": "low"}
    )
    cases = [
        (plain, None, "does not say its expert"),
        (low, "high", "adapter is for low noise, asked for high"),
        (both, None, "both high and low"),
        (swapped, None, "the pair looks swapped"),
        ([low, low], None, "low noise twice"),
        ([plain, low], None, "no expert"),
    ]
    for path, expert, message in cases:
        with pytest.raises(ValueError, match=message):
            lora.load(path, tiny.CONFIG, expert=expert)
    single = dataclasses.replace(tiny.CONFIG, experts=("high",), boundary=None)
    assert set(lora.load(plain, single)) == {"high"}
    with pytest.raises(ValueError, match="low-noise part"):
        lora.load(low, single)


def test_image_attention_of_an_i2v_adapter_is_left_out_in_one_line(tmp_path):
    tensors = tiny.pair(tiny.Q)
    for i in range(3):
        tensors |= tiny.pair(f"diffusion_model.blocks.{i}.cross_attn.k_img")
        tensors |= tiny.pair(f"diffusion_model.blocks.{i}.cross_attn.v_img")
    path = tiny.save_adapter(tmp_path / "x_high_noise.safetensors", tensors)
    with pytest.warns(UserWarning, match="1 applied; 6 left out: image attention") as caught:
        assert set(lora.load(path, tiny.CONFIG)) == {"high"}
    assert len(caught) == 1
    save.save_diffusers(tiny.params(), tiny.CONFIG, tmp_path / "m")
    args = [str(tmp_path / "m"), "--to", "diffusers", "--out", str(tmp_path / "o")]
    args += ["--lora", str(path)]
    assert weights.main(args) == 1 and not (tmp_path / "o").exists()
    assert weights.main([*args, "--no-strict"]) == 0


def test_modules_of_wrong_shape_or_layer_are_refused(tmp_path):
    for tensors, message in (
        (tiny.pair(tiny.Q, fan_in=64), r"to_q.weight \(32, 64\), the model has \(32, 32\)"),
        (tiny.pair(tiny.Q.replace("1", "7")), "no such module"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.load(tiny.save_adapter(tmp_path / "x_low.safetensors", tensors), tiny.CONFIG)


@pytest.mark.parametrize(
    "text,want",
    [
        ("x.safetensors", ("x.safetensors", None, 1.0)),
        ("x.safetensors:high", ("x.safetensors", "high", 1.0)),
        ("x.safetensors@-0.5", ("x.safetensors", None, -0.5)),
        ("a:b/x.safetensors:both@2", ("a:b/x.safetensors", "both", 2.0)),
        ("x@y.safetensors:low@1e-3", ("x@y.safetensors", "low", 1e-3)),
        ("x.safetensors:middle@2", ("x.safetensors:middle", None, 2.0)),
    ],
)
def test_a_lora_argument_is_file_expert_and_strength(text, want):
    assert lora.parse_argument(text) == want


def test_an_existing_file_may_have_an_at_sign_in_its_name(tmp_path):
    path = str(tiny.save_adapter(tmp_path / "style@v2.safetensors", tiny.pair(tiny.Q)))
    assert lora.parse_argument(path) == (path, None, 1.0)
    assert lora.parse_argument(f"{path}:low") == (path, "low", 1.0)
    assert lora.parse_argument(f"{path}:low@0.5") == (path, "low", 0.5)


@pytest.mark.parametrize(
    "text,message",
    [
        ("x.safetensors@much", "--lora x.safetensors@much: strength 'much' is not a number"),
        ("x.safetensors@", "strength '' is not a number"),
        ("x.safetensors:high@nan", "strength 'nan' is not finite"),
        ("x.safetensors@-inf", "strength '-inf' is not finite"),
    ],
)
def test_a_strength_that_is_no_finite_number_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        lora.parse_argument(text)
