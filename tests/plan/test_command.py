"""The plan in words."""

import dataclasses

import pytest

from tests import tiny
from wanjax.plan import __main__ as command
from wanjax.plan import chips, compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


GRPO = {"mesh__data": 1, "mesh__fsdp": 4, "micro_samples": 4}


def test_a_phase_whose_links_take_longer_says_what_lowers_that(model, tmp_path, monkeypatch):
    config = tiny.make_config(model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), **GRPO)
    chip = dataclasses.replace(chips.CHIPS["cpu"], peak=1e9, link=1.0)
    monkeypatch.setitem(chips.CHIPS, "cpu", chip)
    result = compile.make_plan(config, "cpu:4")
    rollout, update = (result["phases"][name] for name in ("rollout", "update high"))
    assert rollout["link_seconds"] == sum(c["bytes"] for c in rollout["collectives"].values())
    text = command.describe(result)
    assert text.count("its collectives take longer than its products: ") == 3  # decode: unknown
    gathers = {"all-gather": {"count": 1, "bytes": 9}, "all-to-all": {"count": 9, "bytes": 8}}
    rollout["collectives"] = update["collectives"] = gathers
    assert "products: raise config.sampling.batch" in command.describe(result)
    assert "products: raise config.micro_samples" in command.describe(result)
    update["collectives"] = {"all-to-all": {"count": 1, "bytes": 9}}
    assert "products: lower config.mesh.context" in command.describe(result)
    for phase in result["phases"].values():
        phase["link_seconds"] = 0.0
    assert "than its products" not in command.describe(result)
