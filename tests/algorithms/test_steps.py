"""Optimizer steps over micro-batches: their sizes, and FLOPs by hand."""

import types

import pytest

from tests import tiny
from wanjax.algorithms import steps
from wanjax.models import wan


def test_update_flops_by_hand():
    config = lambda remat: wan.WanConfig(1, 2, 1, 3, text_len=5, remat=remat)
    # D 2, F 3, L 4, S 5: dense 12·4·4 + 4·2·3·4 + 4·4·5 = 368, attention 4·2·4·9 = 288
    flops = lambda remat, lora: steps.training_flops(config(remat), (1, 2, 2), lora=lora)
    assert flops("full", True) == 2 * 656 + 368 + 720
    assert flops("none", False) == 656 + 2 * 368 + 720
    assert flops("save_attention", True) == flops("offload", True) == 656 + 2 * 368 + 720
    assert flops("save_matmuls", True) == 656 + 368 + 720


@pytest.mark.parametrize("slots, samples, changes, sizes", [
    ({"high": [0], "low": [0, 1]}, 8, {}, {4}),
    ({"high": [0], "low": [0, 1]}, 7, {}, {4, 3}),
    ({"high": [0], "low": [0, 1, 2]}, 8, {"micro_steps": 2}, {4, 8}),
    ({"high": [0], "low": [0, 1, 2]}, 8, {"mix_experts": True}, {4, 12}),
    ({"high": [], "low": [0]}, 2, {}, {2}),
])  # fmt: skip
def test_sizes_of_micro_batches_by_hand(slots, samples, changes, sizes):
    config = tiny.replace_algorithm(tiny.make_setup(), **changes).algorithm
    assert steps.batches(slots, samples, config) == sizes


def test_a_batch_of_another_policy_is_refused():
    state = types.SimpleNamespace(step=3)
    steps.check_version(types.SimpleNamespace(version=3), state)
    with pytest.raises(ValueError, match="batch of policy 2 given to policy 3"):
        steps.check_version(types.SimpleNamespace(version=2), state)
