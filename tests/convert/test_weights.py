"""The command python -m convert.weights."""

import ml_dtypes
import numpy as np
import pytest

from convert import disk, files, save, weights
from convert.lora import adapter
from tests.convert import tiny


def test_command_converts_and_reports(saved, tmp_path, capsys):
    args = [str(saved[0]), "--to", "original", "--out", str(tmp_path / "o"), "--dtype", "bfloat16"]
    assert weights.main([*args, "--verify"]) == 0
    text = capsys.readouterr().out
    assert "transformer_2" in text and "worst relative error" in text
    raw, _ = files.open_folder(tmp_path / "o/high_noise_model")
    assert raw["blocks.0.ffn.0.weight"].dtype == ml_dtypes.bfloat16
    assert raw["blocks.0.modulation"].dtype == np.float32
    assert weights.main(args) == 1
    assert "exists and is not empty" in capsys.readouterr().err


def test_one_file_goes_onto_both_experts_with_different_strengths(tmp_path):
    save.save_diffusers(tiny.params(), tiny.CONFIG, tmp_path / "m")
    path = tiny.save_adapter(
        tmp_path / "style.safetensors", tiny.pair(tiny.Q) | {f"{tiny.Q}.alpha": np.asarray(1.0)}
    )
    args = [str(tmp_path / "m"), "--to", "diffusers", "--out", str(tmp_path / "out")]
    assert weights.main([*args, "--lora", f"{path}:high@3.0", "--lora", f"{path}:low@1.5"]) == 0
    old, new = disk.read(tmp_path / "m").tensors, disk.read(tmp_path / "out").tensors
    name = "blocks.1.attn1.to_q.weight"
    change = [new[c][name].all() - old[c][name].all() for c in ("transformer", "transformer_2")]
    a, b = tiny.pair(tiny.Q).values()
    np.testing.assert_allclose(change[0], 3.0 * 0.5 * b @ a, atol=2e-6)
    np.testing.assert_allclose(change[1], 1.5 * 0.5 * b @ a, atol=2e-6)
    other = "blocks.0.attn1.to_q.weight"
    assert (new["transformer"][other].all() == old["transformer"][other].all()).all()


def test_rounding_of_a_small_change_in_bfloat16_is_reported():
    base = {n: files.cast(t, "bfloat16") for n, t in save.of_tree(tiny.params()["high"]).items()}
    name = "blocks.0.attn1.to_q"
    a, b = tiny.pair("m").values()
    w = base[f"{name}.weight"].all().astype(np.float32)
    scale = float(1e-4 * np.linalg.norm(w) / np.linalg.norm(b @ a))
    found = adapter.Adapter(modules={"high": {name: adapter.LowRank(a, b, scale)}})
    merged, rounding = weights.merge(base, found, "high", 1.0, None, "transformer")
    got = merged[f"{name}.weight"].all()
    assert got.dtype == base[f"{name}.weight"].dtype
    exact = w + np.float32(scale) * (b @ a)
    np.testing.assert_array_equal(got, exact.astype(got.dtype))
    want = np.linalg.norm(got.astype(np.float32) - exact) / np.linalg.norm(exact - w)
    assert rounding.relative == pytest.approx(want, rel=1e-3)
    assert want > 0.5 and rounding.large  # half of the change and more is lost
    assert rounding.moved == (got.astype(np.float32) != w).sum()


@pytest.mark.parametrize("dtype, warned", [("bfloat16", True), ("float32", False)])
def test_the_command_warns_where_the_stored_dtype_loses_the_change(tmp_path, capsys, dtype, warned):
    model, pair = tmp_path / "m", tiny.pair(tiny.Q)
    save.save_diffusers(tiny.params(), tiny.CONFIG, model)
    path = tiny.save_adapter(tmp_path / "small_high_noise.safetensors", pair)
    args = [str(model), "--to", "diffusers", "--out", str(tmp_path / dtype), "--dtype", dtype]
    assert weights.main([*args, "--lora", f"{path}@0.001"]) == 0
    text = capsys.readouterr().out
    assert "of the wanted change along it; rounding is" in text
    assert ("warning: --lora" in text and "write --dtype float32, or apply" in text) == warned
