"""Advantages against golden values of five reference implementations.

Golden fields stored in float32 are compared at 2e-5; in prompts without spread those show rounding
noise over a tiny epsilon where the value here is exactly 0, so such prompts are left out of them.
"""

import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from wanjax import advantages
from wanjax.advantages import Rule

GOLDEN = pathlib.Path(__file__).parent / "golden" / "grpo" / "advantages.npz"
CASES = ("pick", "binary", "onegroup", "pairs", "allzero")
FIELDS = {
    "flowgrpo_group_std": "flow_grpo",
    "flowgrpo_global_std": "flow_grpo_global",
    "miles_gmean0_gstd0_norm1": "miles",
    "miles_gmean0_gstd1_norm1": Rule(std="batch", ddof=1),
    "miles_gmean1_gstd0_norm1": Rule(mean="batch", ddof=1),
    "miles_gmean1_gstd1_norm1": Rule(mean="batch", std="batch", ddof=1),
    "dance_group": "dance",
    "dance_nogroup": Rule(mean="batch", std="batch", ddof=1, eps=1e-8),
    "unirl_group": "unirl",
    "unirl_group_globalstd": Rule(std="batch", ddof=1, eps=1e-8),
    "unirl_globalscope": Rule(mean="batch", std="batch", ddof=1, eps=1e-8),
}
MULTI = {
    "ff_sum_globalstd0": Rule(eps=1e-6, eps_in="floor"),
    "ff_sum_globalstd1": Rule(std="batch", eps=1e-6, eps_in="floor"),
    "ff_gdpo": "gdpo",
    "flowgrpo_sum_groupstd": "flow_grpo",
}


def _advantages(rewards, preset, weights=None):
    """By preset, or by a Rule that belongs to no preset but uses what those consist of."""
    if isinstance(preset, str):
        return advantages.group_advantages(rewards, preset, weights=weights)
    total = rewards if weights is None else np.tensordot(weights, rewards, 1)
    return advantages._normalise(np.asarray(total, np.float64), preset)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("field", FIELDS)
def test_group_advantages_equal_golden(case, field):
    golden = np.load(GOLDEN)
    rewards, expected = golden[f"{case}_rewards"], golden[f"{case}_{field}"]
    adv = _advantages(rewards, FIELDS[field])
    assert adv.dtype == np.float64
    if expected.dtype == np.float64:
        np.testing.assert_allclose(adv, expected, rtol=1e-9, atol=1e-9)
    else:
        keep = ~golden[f"{case}_zero_std_group"] | ("gmean1" in field) | ("nogroup" in field)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(adv[keep], expected[keep], rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("case", ["multi2", "multi3"])
@pytest.mark.parametrize("field", MULTI)
def test_multi_reward_advantages_equal_golden(case, field):
    golden = np.load(GOLDEN)
    adv = _advantages(golden[f"{case}_rewards"], MULTI[field], golden[f"{case}_weights"])
    np.testing.assert_allclose(adv, golden[f"{case}_{field}"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["multi2", "multi3"])
def test_gdpo_before_batch_normalisation_is_the_weighted_sum_of_group_rules(case):
    golden = np.load(GOLDEN)
    weights, rewards = golden[f"{case}_weights"], golden[f"{case}_rewards"]
    rule = Rule(eps=1e-6, eps_in="floor")
    each = [w * _advantages(r, rule) for w, r in zip(weights, rewards, strict=True)]
    np.testing.assert_allclose(sum(each), golden[f"{case}_ff_gdpo_prebn"], rtol=1e-9, atol=1e-9)
    total = np.tensordot(weights, rewards, 1)
    np.testing.assert_allclose(total, golden[f"{case}_aggregated"], rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_zero_spread_equals_golden(case):
    golden = np.load(GOLDEN)
    flat = advantages.zero_spread(golden[f"{case}_rewards"])
    np.testing.assert_array_equal(flat, golden[f"{case}_zero_std_group"])
    assert flat.mean() == golden[f"{case}_zero_std_ratio"]


def test_hand_computed_pair():
    rewards = [[1.0, 0.0]]  # mean .5, population std .5, unbiased std 1/√2
    adv = advantages.group_advantages(rewards, "flow_grpo")
    np.testing.assert_allclose(adv, [[0.5 / 0.5001, -0.5 / 0.5001]], rtol=1e-12)
    adv = advantages.group_advantages(rewards, "dance")
    np.testing.assert_allclose(adv, [[2**-0.5, -(2**-0.5)]], rtol=1e-7)


@pytest.mark.parametrize("preset", ["flow_grpo", "flow_grpo_global", "miles", "dance", "unirl"])
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 2**31), st.floats(-5, 5))
def test_advantages_are_centred_and_ignore_a_common_offset(preset, seed, offset):
    rewards = np.random.default_rng(seed).normal(size=(3, 4))
    rewards[1] = rewards[1, 0]
    adv = advantages.group_advantages(rewards, preset)
    np.testing.assert_allclose(adv.mean(1), 0, atol=1e-12)
    assert np.all(adv[1] == 0)
    shifted = advantages.group_advantages(rewards + offset, preset)
    np.testing.assert_allclose(shifted, adv, atol=1e-9)
    assert np.all(np.argsort(adv[0]) == np.argsort(rewards[0]))


def test_gdpo_keeps_both_rewards_equal_where_a_sum_is_ruled_by_the_larger():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(2, 8, 16)) * np.array([1.0, 100.0])[:, None, None]
    weights = [1.0, 1.0]
    gdpo = advantages.group_advantages(rewards, "gdpo", weights=weights)
    summed = advantages.group_advantages(rewards, "flow_grpo", weights=weights)
    assert np.corrcoef(gdpo.ravel(), rewards[0].ravel())[0, 1] > 0.6
    assert np.corrcoef(summed.ravel(), rewards[0].ravel())[0, 1] < 0.2


def test_best_of_n_keeps_the_best_and_the_worst_of_each_group():
    adv = [[0.1, -2.0, 3.0, 0.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    np.testing.assert_array_equal(advantages.best_of_n(adv, 2), [[1, 2], [0, 5]])
    np.testing.assert_array_equal(advantages.best_of_n(adv, 4), [[1, 2, 4, 5], [0, 1, 4, 5]])
    np.testing.assert_array_equal(advantages.best_of_n(adv, 6), [range(6), range(6)])


@pytest.mark.parametrize("keep", [0, 3, 8])
def test_best_of_n_of_an_impossible_number_is_an_error(keep):
    with pytest.raises(ValueError, match=f"keeps {keep} of 6 .* even number from 2 to 6"):
        advantages.best_of_n(np.zeros((2, 6)), keep)


@pytest.mark.parametrize(
    ("rewards", "preset", "weights", "message"),
    [
        (np.zeros((2, 2)), "grpo", None, "advantage.preset is 'grpo'"),
        (np.zeros(4), "miles", None, "shape"),
        (np.zeros((2, 3, 4)), "miles", None, "weights have shape"),
        (np.zeros((2, 3, 4)), "gdpo", [1.0], "weights have shape"),
        (np.zeros((3, 1)), "dance", None, "group_size"),
    ],
)
def test_errors_name_the_config_key(rewards, preset, weights, message):
    with pytest.raises(ValueError, match=message):
        advantages.group_advantages(rewards, preset, weights=weights)
