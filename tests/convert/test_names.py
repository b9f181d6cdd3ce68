"""convert/names.py against the published name lists of every variant (tests/golden/wan)."""

import numpy as np
import pytest

from convert import names
from tests.convert import published


@pytest.mark.parametrize("stem", published.LISTS)
def test_every_published_name_maps_to_the_other_naming_and_back(stem):
    naming, keys = published.key_list(stem)
    table = names.rules(published.component(stem), keys)
    if naming == "original":
        for name in keys:
            new, _ = names.to_diffusers(name, table)
            assert [names.to_original(n, table)[0] for n in new] == [name] * len(new)
    else:
        for name in keys:
            old, part, _ = names.to_original(name, table)
            assert names.to_diffusers(old, table)[0][part] == name


@pytest.mark.parametrize("stem", published.LISTS)
def test_component_and_naming_are_recognised(stem):
    naming, keys = published.key_list(stem)
    assert [f[:2] for f in names.detect(keys)] == [(published.component(stem), naming)]
    wrapped = ["model.diffusion_model." + k for k in keys]
    if published.component(stem) == "transformer":
        assert names.detect(wrapped) == [("transformer", naming, "model.diffusion_model.")]


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_vae_names_equal_the_published_table(version):
    table = published.PATTERNS[f"vae_wan{version}"]["table"]
    rules = names.rules("vae", [d for _, d in table])
    assert rules == names.rules("vae", [o for o, _ in table])
    for original, diffusers in table:
        assert names.to_original(diffusers, rules)[0] == original
        assert names.to_diffusers(original, rules)[0] == (diffusers,)


@pytest.mark.parametrize("group", ["block", "core", "image_conditioning", "vace", "animate"])
def test_transformer_rules_equal_the_published_patterns(group):
    for row in published.PATTERNS["transformer"][group]:
        if row["diffusers"] is None:
            continue
        for p in row.get("p", [""]):
            fill = lambda s, p=p: s.replace("{i+1}", "4").replace("{i}", "3").replace("{p}", p)
            new = [row["diffusers"]] if isinstance(row["diffusers"], str) else row["diffusers"]
            rules = names.rules("transformer", [])
            assert names.to_diffusers(fill(row["original"]), rules)[0] == tuple(map(fill, new))
            for part, name in enumerate(new):
                assert names.to_original(fill(name), rules)[:2] == (fill(row["original"]), part)


def test_patterns_match_whole_names_only():
    rules = names.rules("transformer", [])
    for name in (
        "xblocks.0.self_attn.q.weight",
        "blocks.0.self_attn.q.weight2",
        "blocks.a.modulation",
    ):
        assert names.to_diffusers(name, rules) is None


def test_wrapper_prefixes_are_removed_anywhere():
    assert (
        names.unwrap("module._orig_mod.blocks.0._fsdp_wrapped_module.norm2.weight")
        == "blocks.0.norm2.weight"
    )


@pytest.mark.parametrize(
    "path,shape,expected",
    [
        ("blocks/attn1/to_out.0/kernel", (2, 3, 5), [("blocks.%d.attn1.to_out.0.weight", (5, 3))]),
        ("blocks/norm2/scale", (2, 5), [("blocks.%d.norm2.weight", (5,))]),
        ("blocks/scale_shift_table", (2, 1, 6, 5), [("blocks.%d.scale_shift_table", (1, 6, 5))]),
        ("patch_embedding/kernel", (1, 2, 3, 4, 5), [("patch_embedding.weight", (5, 4, 1, 2, 3))]),
        ("shared/embedding", (7, 5), [("shared.weight", (7, 5))]),
        ("decoder/norm_out/gamma", (5,), [("decoder.norm_out.gamma", (5, 1, 1, 1))]),
    ],
)
def test_paths_name_torch_tensors_with_their_shapes(path, shape, expected):
    got = names.torch_names(path, shape)
    if names.stack_root(path):
        expected = [(n % i, s) for n, s in expected for i in range(shape[0])]
    assert got == expected


def test_kernels_move_outputs_last_and_inputs_before_them():
    w = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)  # Conv2d [O,I,h,w]
    moved = w.transpose(names.permutation("a/kernel", 4))
    np.testing.assert_array_equal(moved, np.einsum("oihw->hwio", w))
    assert names.permutation("a/kernel", 2) == (1, 0)
    assert names.permutation("a/embedding", 2) == (0, 1)
    assert names.torch_shape("a/kernel", moved.shape) == w.shape


def test_special_variants_are_named():
    for stem, variant in (
        ("keys_wan2.2_s2v_14b", "Wan2.2 S2V"),
        ("keys_wan_dancer_14b", "Wan-Dancer"),
        ("keys_wan2.2_animate_14b", "Wan2.2 Animate"),
        ("keys_wan2.1_vace_1.3b", "VACE"),
        ("keys_wan2.2_fun_a14b_control_camera", "Fun camera control"),
        ("keys_wan2.1_t2v_1.3b", None),
    ):
        naming, keys = published.key_list(stem)
        table = names.rules("transformer", keys)
        if naming == "original":
            keys = [d for k in keys for d in names.to_diffusers(k, table)[0]]
        assert names.special_variant(keys) == variant
