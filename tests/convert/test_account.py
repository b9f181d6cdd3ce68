"""convert/account.py: every tensor that does not fit the config is named."""

import numpy as np
import pytest

from convert import files, load
from tests.convert import published, tiny


def test_missing_tensors_are_named(broken):
    tiny.edit(broken, lambda d: (d.pop("blocks.1.attn1.to_q.weight"), d.pop("proj_out.bias")))
    with pytest.raises(ValueError, match=r"transformer has .* 2 missing: .*blocks\.1\.attn1\.to_q"):
        load.load(broken)


def test_unexpected_and_misshapen_tensors_are_named_with_shapes(broken):
    def change(d):
        d["blocks.7.norm2.bias"] = np.zeros(32, np.float32)
        d["proj_out.weight"] = np.zeros((16, 31), np.float32)

    tiny.edit(broken, change)
    pattern = r"1 unexpected: blocks\.7.*1 of wrong shape: proj_out.weight is \(16, 31\), expected"
    with pytest.raises(ValueError, match=pattern) as error:
        load.load(broken)
    assert "\n" not in str(error.value)


def test_variants_the_model_cannot_run_are_named(tmp_path):
    naming, keys = published.key_list("keys_wan2.2_s2v_14b")
    files.write_safetensors(
        tmp_path / "s2v.safetensors", published.random_tensors(published.small(keys, {"dim": 5120}))
    )
    with pytest.raises(ValueError, match="S2V checkpoint, which the model code does not run"):
        load.load(tmp_path / "s2v.safetensors")
