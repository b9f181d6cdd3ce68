"""Changes of a config with which a plan fits."""

import dataclasses

import pytest

from tests import tiny
from wanjax.plan import __main__ as command
from wanjax.plan import advice, chips, compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def test_a_plan_that_does_not_fit_names_changes_that_do(model, tmp_path, monkeypatch):
    config = tiny.make_config(model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), mesh__data=4)
    peaks = [compile.make_plan(config, "cpu:4")["total"]]
    half = config.copy_and_resolve_references()
    half.update_from_flattened_dict({"micro_samples": 4, "sampling.batch": 4})
    peaks.append(compile.make_plan(half, "cpu:4")["total"])
    assert peaks[1] < peaks[0]
    chip = dataclasses.replace(chips.CHIPS["cpu"], hbm=sum(peaks) / 2 / 0.97)
    monkeypatch.setitem(chips.CHIPS, "cpu", chip)
    result = compile.make_plan(config, "cpu:4")
    assert not result["fits"]
    (option,) = advice.advise(config, "cpu:4", most=1)
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(option["changes"])
    assert compile.make_plan(changed, "cpu:4")["fits"]
    result["advice"] = [option]
    assert "fits with config." in command.describe(result)
    result["advice"] = []
    assert "no change that was tried" in command.describe(result)
