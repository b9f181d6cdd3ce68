"""convert/merge.py: what rounding to the stored dtype loses."""

import numpy as np
import pytest

from convert import files, merge, save
from convert.lora import adapter
from tests.convert import tiny


def test_rounding_of_a_small_change_in_bfloat16_is_reported():
    base = {n: files.cast(t, "bfloat16") for n, t in save.of_tree(tiny.params()["high"]).items()}
    name = "blocks.0.attn1.to_q"
    a, b = tiny.pair("m").values()
    w = base[f"{name}.weight"].all().astype(np.float32)
    scale = 1e-4 * np.linalg.norm(w) / np.linalg.norm(b @ a)
    found = adapter.Adapter(modules={"high": {name: adapter.LowRank(a, b, scale)}})
    merged, rounding = merge.merge(base, found, "high", 1.0, None, "transformer")
    got = merged[f"{name}.weight"].all()
    assert got.dtype == base[f"{name}.weight"].dtype
    exact = w + np.float32(scale) * (b @ a)
    np.testing.assert_array_equal(got, exact.astype(got.dtype))
    want = np.linalg.norm(got.astype(np.float32) - exact) / np.linalg.norm(exact - w)
    assert np.sqrt(rounding.error / rounding.change) == pytest.approx(want, rel=1e-3)
    assert want > 0.5  # half of the change and more is lost
    assert rounding.moved == (got.astype(np.float32) != w).sum()
