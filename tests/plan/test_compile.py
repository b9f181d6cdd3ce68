"""Plans: every algorithm's programs compile from shapes, and what training holds."""

import math

import jax
import pytest

from tests import tiny
from wanjax import setup as setups
from wanjax.plan import __main__ as command
from wanjax.plan import chips, compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("plan"))


CASES = {
    "grpo": {"mesh__data": 1, "mesh__fsdp": 4, "micro_samples": 4},
    "nft": {
        "algorithm": "nft", "guidance__high": 1.0, "guidance__low": 1.0, "micro_samples": 4,
        "model__offload": True,
    },
    "sft": {"algorithm": "sft", "data__batch": 8, "lora__rank": 0, "mesh__data": 4},
    "dmd2": {
        "algorithm": "dmd2", "guidance__high": 1.0, "guidance__low": 1.0, "micro_samples": 4,
        "sampling__sigmas": (1.0, 0.9, 0.6), "sampling__grid": "explicit",
        "dmd2__gan_weight": 0.1,
    },
}  # fmt: skip
PHASES = {
    "grpo": {"rollout", "decode", "update high", "update low"},
    "nft": {"rollout", "decode", "update high", "update low"},
    "sft": {"update high", "update low"},
    "dmd2": {f"{what} {e}" for what in ("rollout", "student", "critic") for e in ("high", "low")},
}


@pytest.mark.parametrize("name", CASES)
def test_every_algorithms_steps_compile_from_shapes(model, tmp_path, name):
    config = tiny.make_config(model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), **CASES[name])
    result = compile.make_plan(config, "cpu:4")
    assert set(result["phases"]) == PHASES[name] and result["fits"] and not result["note"]
    for phase, facts in result["phases"].items():
        assert facts["arguments"] > 0 and facts["rematerializations"] == 0, phase
        assert facts["flops"] > 0 or phase == "decode"
        assert math.isfinite(facts["peak"])
    assert set(result["trees"]) == {"parameters", "adapters", "optimizer"}
    assert (result["trees"]["parameters"] > 0) != config.model.offload
    moved = [facts["collectives"] for facts in result["phases"].values()]
    assert any("all-reduce" in kinds for kinds in moved)  # gradients over the batch's shards
    text = command.describe(result)
    assert all(phase in text for phase in PHASES[name])


def test_what_training_holds(model, tmp_path):
    """A full fine-tuning: weights, two moments, gradients; an expert that waits on the host does
    not count; the critic of DMD2 trains too."""

    def held(name, **changes):
        config = tiny.make_config(model, tmp_path, **CASES[name] | changes)
        run = compile.make_setup(config, "", chips.CHIPS["cpu"])
        weights = setups.weight_shapes(config, run.model, run.roles)["student"]
        sizes = [sum(x.size for x in jax.tree.leaves(w)) for w in weights.values()]
        return compile.held(config, run), sizes, compile._whole(weights["high"])

    full, (high, low), weights = held("sft")
    moments_and_gradients = 12 * (high + low)
    assert 0 <= full - 2 * weights - moments_and_gradients < 100  # counts of steps
    assert held("nft", model__offload=False)[0] - held("nft")[0] == weights
    adapters = (held("grpo")[0] - 2 * weights) / 4  # themselves, two moments, gradients
    critic = held("dmd2", dmd2__gan_weight=0.0)[0] - 2 * weights - 5 * adapters  # 5: an average
    assert abs(critic - 4 * adapters) < 1000 < adapters  # but for counts of steps
