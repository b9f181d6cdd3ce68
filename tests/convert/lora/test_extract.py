"""convert/lora/extract.py on a planted change."""

import numpy as np
import pytest

from convert import save, weights
from convert.lora import adapter, extract
from tests.convert import tiny


def test_extraction_finds_a_planted_low_rank_change(tmp_path):
    base = save.of_tree(tiny.params()["high"])
    name = "blocks.0.attn1.to_q"
    a, b = tiny.pair("m", 3).values()
    planted = adapter.Adapter(modules={None: {name: adapter.LowRank(a, b, 0.3)}})
    planted.dense = {None: {"blocks.1.norm2.bias": np.ones(32, np.float32)}}
    tuned, _ = weights.merge(base, planted, None, 1.0, None, "transformer")
    pairs, dense, lost = extract.approximate(base, tuned, 3)
    assert lost < 1e-5 and set(pairs) == {name} and set(dense) == {"blocks.1.norm2.bias"}
    np.testing.assert_allclose(
        pairs[name].delta(), planted.deltas(None)[f"{name}.weight"], atol=1e-5
    )
    with pytest.raises(ValueError, match="equal"):
        extract.approximate(base, base, 3)
    _, _, lost = extract.approximate(base, tuned, 1)
    change = planted.deltas(None)
    s = np.linalg.svd(change[f"{name}.weight"], compute_uv=False)
    total = np.sqrt((s**2).sum() + 32)
    assert lost == pytest.approx(np.sqrt((s[1:] ** 2).sum()) / total, rel=1e-3)
