"""The benchmark scripts run at tiny size, and count kernels right."""

import argparse
import dataclasses
import pathlib
import sys

import numpy as np
import pytest


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "scripts" / "bench")
    for name in ("ours", "kernels", "report_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import kernels  # pyright: ignore[reportMissingImports]
    import ours  # pyright: ignore[reportMissingImports]

    small = dict(num_attention_heads=2, attention_head_dim=12, ffn_dim=32)
    wan = dataclasses.replace(ours.MODEL.wan, **small)
    monkeypatch.setattr(ours, "MODEL", dataclasses.replace(ours.MODEL, wan=wan))
    return ours, kernels


def test_kernels_are_summed_by_kind(bench):
    flash = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttn"
    events = [
        (0, 10e6, "nvjet_sm90_tst_256x152_64x4_1x2_h_bz_coopA_NNT"),
        (4e6, 10e6, f"{flash}FwdSm90"),  # 4 ms beyond the product
        (20e6, 5e6, f"{flash}BwdSm90"),
        (25e6, 1e6, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16"),
        (26e6, 2e6, "loop_convert_fusion_3"),
        (28e6, 2e6, "MemcpyD2D"),
        (40e6, 1e6, "ncclDevKernel_SendRecv"),
    ]
    assert bench[1].summary(events) == {
        "copies": 0.002,
        "collectives": 0.001,
        "attention backward": 0.006,
        "attention forward": 0.01,
        "products": 0.01,
        "rest": 0.002,
        "idle": 0.016,  # 14 to 20 and 30 to 40
        "longest of the rest": {"loop_convert_fusion_3": 0.002},
    }


@pytest.mark.parametrize("figure", ["forward", "lora_step", "checkpoint"])
def test_figures_run(bench, figure, tmp_path):
    args = argparse.Namespace(
        repeats=1, layers=2, size="32x32x5", remat="full", batch=1, mesh="", weights="bfloat16",
        offload=False, text_rows=16, folder=tmp_path, kernels=False,
    )  # fmt: skip
    row = bench[0].FIGURES[figure](args)
    assert row["seconds"] > 0 and row["first_s"] > 0
    assert figure != "checkpoint" or row["restore_s"] > 0 and not list(tmp_path.iterdir())


def test_random_weights_are_normal(bench):
    """A normal that jax draws in bfloat16 has 128 values of mean -0.011, which one-byte weights
    round about three times as badly as those of a float32 draw."""
    params = bench[0].random_params(bench[0].MODEL.wan, 0, "bfloat16")
    kernel = np.asarray(params["blocks"]["ffn.net.0.proj"]["kernel"], np.float32)
    assert len(np.unique(kernel)) > 1000
    assert abs(kernel.mean()) < 4 * 0.02 / kernel.size**0.5
    np.testing.assert_allclose(kernel.std(), 0.02, rtol=0.02)
