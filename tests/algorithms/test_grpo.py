"""GRPO end to end on a random two-expert model: on-policy identities, routing, micro-batching,
KL."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from wanjax import optim, settings, trees
from wanjax import state as states
from wanjax.algorithms import Tools, grpo
from wanjax.data import Item
from wanjax.models import presets
from wanjax.parallel import sharding


def _collect(setup, state=None):
    params = tiny.parameters()
    if state is None:
        state = grpo.init(
            jax.random.key(0), setup, {"student": {e: params[e] for e in setup.model.experts}}
        )
    ctx, uncond = tiny.contexts()
    texts = ["a", "b"]
    batch = grpo.collect(
        state, setup, Item(texts, ctx),
        Tools(params["vae"], uncond, tiny.mean_reward),
    )  # fmt: skip
    return state, batch


def _rewarded(setup, weights):
    """The same Setup with other rewards."""
    return dataclasses.replace(setup, rewards=settings.RewardConfig(weights, "stop"))


def _stir(state, setup, scale=0.3):
    """Move the trained weights away from their start, so that nothing is zero."""
    leaves, treedef = jax.tree.flatten(states.trainable(state, setup.training))
    keys = jax.random.split(jax.random.key(7), len(leaves))
    moved = [x + scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return states.replace_trainable(state, setup.training, jax.tree.unflatten(treedef, moved))


def _ratios(metrics):
    names = [n for n in metrics if "ratio_min" in n or "ratio_max" in n]
    assert names
    return {name: float(metrics[name]) for name in names}


@pytest.mark.parametrize("kind", ["flow", "dance", "cps", "linear"])
def test_first_update_has_ratio_one_without_recompute(kind):
    setup = tiny.make_setup(sde__kind=kind)
    state, batch = _collect(setup)
    _, metrics = tiny.update(grpo, state, setup, batch)
    assert all(abs(r - 1) <= 1e-6 for r in _ratios(metrics).values()), _ratios(metrics)


def test_first_update_has_ratio_exactly_one_with_recompute():
    setup = tiny.make_setup(algorithm__recompute_old_logp=True)
    state, batch = _collect(setup)
    _, metrics = tiny.update(grpo, state, setup, batch)
    assert set(_ratios(metrics).values()) == {1.0}


def test_recomputed_scores_of_later_updates_are_those_of_the_sampling_policy():
    setup = tiny.make_setup(algorithm__recompute_old_logp=True, algorithm__updates=2)
    state, batch = _collect(setup)
    data = grpo._replay_data(setup, batch)
    again = grpo._rescore(state, setup, batch, data, grpo._slots(setup, batch.steps_W))
    np.testing.assert_allclose(again, batch.trajectory.logp, atol=1e-6)
    _, metrics = tiny.update(grpo, state, setup, batch)
    assert float(metrics["grpo/ratio_std/high"]) > 1e-7  # the second update is off-policy


def test_the_first_optimizer_steps_metrics_are_told_beside_the_merged_ones():
    """So that the alarms of the first step also serve several updates a rollout."""
    setup = tiny.make_setup(algorithm__updates=2)
    state, batch = _collect(setup)
    after, metrics = tiny.update(grpo, state, setup, batch)
    for expert in ("high", "low"):
        begun = float(metrics[f"{optim.START}grpo/ratio_max/{expert}"])
        assert abs(begun - 1) <= 1e-6 < abs(float(metrics[f"grpo/ratio_max/{expert}"]) - 1)
    _, metrics = tiny.update(grpo, after, setup, _collect(setup, after)[1])
    assert not any(optim.START in name for name in metrics)


def test_each_expert_has_its_own_learning_rate_and_clip_range():
    setup = tiny.make_setup(algorithm__clip={"high": 1e9, "low": 1e-9})
    rates = {"high": tiny.adamw(lr=0.0), "low": tiny.adamw(lr=1e-2)}
    setup = tiny.replace_training(setup, optim=rates)
    state, batch = _collect(setup)
    before = states.trainable(_stir(state, setup, 0.02), setup.training)
    after, metrics = tiny.update(
        grpo, states.replace_trainable(state, setup.training, before), setup, batch
    )
    assert metrics["grpo/clip_frac/high"] == 0 < metrics["grpo/clip_frac/low"]
    moved = states.trainable(after, setup.training)
    same = lambda e: all(map(np.array_equal, *map(jax.tree.leaves, (moved[e], before[e]))))
    assert same("high") and not same("low")
    assert 0.2 < metrics["grpo/v_rms/high"] < 5


def test_a_window_that_walks_off_the_trained_expert_is_refused_at_the_start():
    walking = dict(strategy__name="mix_progressive", setup__experts=("high",))
    grpo.check(tiny.make_setup(**walking, setup__steps=1))
    with pytest.raises(ValueError, match="picks no step of the trained experts"):
        grpo.check(tiny.make_setup(**walking, setup__steps=500))


def test_two_rewards_are_normalised_each_on_its_own_over_random_windows():
    setup = tiny.make_setup(algorithm__advantage="gdpo", strategy__name="mix_random")
    setup = _rewarded(setup, {"mean": 1.0, "thousand": 0.5})
    ctx, uncond = tiny.contexts()
    state, _ = _collect(tiny.make_setup())

    def reward(video, prompts):
        (mean,), _ = (list(found.values()) for found in tiny.mean_reward(video, prompts))
        return {"mean": mean, "thousand": -1000 * mean}, {}

    tools = Tools(tiny.parameters()["vae"], uncond, reward)
    batch = grpo.collect(state, setup, Item(["a", "b"], ctx), tools)
    # opposed rewards: only the weights differ, the scale of the second does not count
    alone = _rewarded(setup, {"mean": 1.0})
    tools = dataclasses.replace(tools, reward=tiny.mean_reward)
    want = grpo.collect(state, alone, Item(["a", "b"], ctx), tools)
    np.testing.assert_array_equal(want.steps_W, batch.steps_W)
    np.testing.assert_allclose(
        np.corrcoef(batch.adv_B, want.adv_B)[0, 1], 1, atol=1e-3
    )  # (1 − 0.5) of the same direction


@pytest.mark.parametrize("rank", [2, 0])
def test_kl_is_exactly_zero_at_the_start_and_positive_later_for_both_experts(rank):
    setup = tiny.make_setup(
        lora__rank=rank, algorithm__kl_beta={"high": 0.1, "low": 0.1}, optim__lr=1e-3
    )
    state, batch = _collect(setup)
    state, metrics = tiny.update(grpo, state, setup, batch)
    assert float(metrics["grpo/kl/high"]) == 0.0 == float(metrics["grpo/kl/low"])
    for expert in ("high", "low"):  # |v| / |v of the reference|
        assert float(metrics[f"grpo/v_norm_ratio/{expert}"]) == 1.0
    state, batch = _collect(setup, state)
    _, metrics = tiny.update(grpo, state, setup, batch)
    assert float(metrics["grpo/kl/high"]) > 0 and float(metrics["grpo/kl/low"]) > 0
    for expert in ("high", "low"):
        ratio = float(metrics[f"grpo/v_norm_ratio/{expert}"])
        assert ratio != 1.0 and abs(ratio - 1) < 0.2


def test_the_velocity_norm_ratio_is_that_to_the_reference():
    """Full weights whose last layer is doubled give velocities of twice the norm."""
    beta = {"high": 0.1, "low": 0.1}
    setup = tiny.make_setup(lora__rank=0, algorithm__kl_beta=beta, optim__lr=0.0)
    setup = tiny.replace_sampling(setup, guidance=presets.Guidance(1.0, 1.0))
    state, batch = _collect(setup)
    double = lambda path, x: 2 * x if path.startswith("proj_out/") else x
    student = {e: trees.map_paths(double, t) for e, t in state.params["student"].items()}
    _, metrics = tiny.update(
        grpo, state.replace(params={**state.params, "student": student}), setup, batch
    )
    for expert in ("high", "low"):
        np.testing.assert_allclose(metrics[f"grpo/v_norm_ratio/{expert}"], 2, rtol=1e-5)


@pytest.mark.parametrize("kind", ["g2", "g2h", "v_mse", "x_mse"])
def test_kl_gradient_pulls_back_to_the_reference(kind):
    setup = tiny.make_setup(
        algorithm__kl_beta={"high": 1e3, "low": 1e3}, algorithm__kl_kind=kind, optim__lr=1e-3
    )
    state, batch = _collect(setup)
    state = _stir(state, setup)
    _, batch = _collect(setup, state)
    after, metrics = tiny.update(grpo, state, setup, batch)
    _, again = tiny.update(grpo, after.replace(step=state.step), setup, batch)
    for expert in ("high", "low"):
        assert float(again[f"grpo/kl/{expert}"]) < float(metrics[f"grpo/kl/{expert}"])


@pytest.mark.parametrize("experts", [("high",), ("low",), ("high", "low")])
def test_only_the_trained_experts_change_and_the_base_never_does(experts):
    setup = tiny.make_setup(setup__experts=experts)
    state, batch = _collect(setup)
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = tiny.update(grpo, state, setup, batch)
    assert set(after.adapters["default"]) == set(experts) == set(after.opt)
    for expert in experts:
        assert float(metrics[f"grad_norm/{expert}"]) > 0
        flat = trees.flatten(after.adapters["default"][expert])
        start = trees.flatten(state.adapters["default"][expert])
        moved = {path.rsplit("/", 1)[1] for path in flat if np.any(flat[path] != start[path])}
        assert "b" in moved and "scale" not in moved
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_window_inside_one_expert_leaves_the_other_untouched():
    setup = tiny.make_setup(strategy__name="high_window", strategy__window=1)
    state, batch = _collect(setup)
    after, metrics = tiny.update(grpo, state, setup, batch)
    assert not [name for name in metrics if name.endswith("/low")]
    for old, new in zip(
        jax.tree.leaves((state.adapters["default"]["low"], state.opt["low"])),
        jax.tree.leaves((after.adapters["default"]["low"], after.opt["low"])),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)


def _one_step_gradients(setup, state, batch):
    """{expert: gradient} of an update, to scale: the first moments of a fresh AdamW."""
    after, _ = tiny.update(grpo, state, setup, batch)
    moments = optax.tree_utils.tree_get_all_with_path(after.opt, "mu")
    return {e: [x for path, x in moments if e in str(path)] for e in setup.experts}


def _same(a, b, rtol=2e-4):
    norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(a)))
    assert norm > 0
    difference = jax.tree.map(lambda x, y: np.square(x - y).sum(), a, b)
    assert np.sqrt(sum(jax.tree.leaves(difference))) <= rtol * norm


@pytest.mark.parametrize("changes", [
    dict(micro_samples=1), dict(micro_samples=8), dict(micro_samples=2, mix_experts=True),
    dict(micro_samples=4, micro_steps=2), dict(micro_samples=3, micro_steps=2),
    dict(micro_samples=5, mix_experts=True),
])  # fmt: skip
def test_gradients_do_not_depend_on_how_micro_batches_are_cut(changes):
    setup = tiny.make_setup(strategy__window=2)
    state, batch = _collect(setup)
    state = _stir(state, setup)
    want = _one_step_gradients(setup, state, batch)
    got = _one_step_gradients(tiny.replace_algorithm(setup, **changes), state, batch)
    assert set(want) == {"high", "low"}
    for expert in want:
        _same(want[expert], got[expert])


def test_a_mixed_update_equals_two_pure_ones():
    setup = tiny.make_setup()
    state, batch = _collect(setup)
    pure, _ = tiny.update(grpo, state, setup, batch)
    state, batch = _collect(setup)
    mixed, _ = tiny.update(grpo, state, tiny.replace_algorithm(setup, mix_experts=True), batch)
    for a, b in zip(jax.tree.leaves(pure.opt), jax.tree.leaves(mixed.opt), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [
    {"data": 8}, {"fsdp": 2, "context": 2, "tensor": 2},
])  # fmt: skip
def test_a_mesh_changes_neither_rollout_nor_update(shape):
    setup = tiny.make_setup()
    state, batch = _collect(setup)
    after, metrics = tiny.update(grpo, state, setup, batch)
    mesh = sharding.make_mesh(shape)
    with sharding.use_mesh(mesh):
        twin = tiny.make_setup()
        state, other = _collect(twin)
        state = states.place(state, mesh)
        np.testing.assert_allclose(other.trajectory.x, batch.trajectory.x, atol=2e-5)
        np.testing.assert_allclose(other.adv_B, batch.adv_B, atol=1e-3)
        # the same advantages, so that the update alone is compared
        other = grpo.Batch(**{**vars(other), "adv_B": jnp.asarray(np.asarray(batch.adv_B))})
        sharded, sharded_metrics = tiny.update(grpo, state, twin, other)
    at = states.shardings(sharded, mesh)
    for name in ("adapters", "opt"):  # and stays split as it was
        for leaf, where in zip(
            *(jax.tree.leaves(getattr(x, name)) for x in (sharded, at)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(where, leaf.ndim), (
                name,
                leaf.shape,
                leaf.sharding,
            )
    for expert in ("high", "low"):
        a, b = metrics[f"grad_norm/{expert}"], sharded_metrics[f"grad_norm/{expert}"]
        np.testing.assert_allclose(float(a), float(b), rtol=1e-3)
        moments = (optax.tree_utils.tree_get_all_with_path(s.opt, "mu") for s in (after, sharded))
        for (path, want), (_, got) in zip(*moments, strict=True):
            for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
                atol = 2e-3 * np.abs(x).max() + 1e-12
                np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=str(path))


def test_rollouts_do_not_depend_on_the_batch_size():
    _, small = _collect(tiny.make_setup(sampling__batch=2))
    _, large = _collect(tiny.make_setup(sampling__batch=8))
    np.testing.assert_allclose(small.trajectory.x, large.trajectory.x, atol=2e-5)


def test_guard_has_ratio_one_at_the_start():
    setup = tiny.make_setup(algorithm__guard=True)
    state, batch = _collect(setup)
    _, metrics = tiny.update(grpo, state, setup, batch)
    assert all(abs(r - 1) <= 1e-6 for r in _ratios(metrics).values())


def test_full_weights_train_without_adapters():
    setup = tiny.make_setup(lora__rank=0, optim__lr=1e-3)
    state, batch = _collect(setup)
    before = jax.tree.map(np.asarray, state.params["student"])
    after, metrics = tiny.update(grpo, state, setup, batch)
    assert not after.adapters and float(metrics["grad_norm/low"]) > 0
    kernel = "blocks/attn1/to_q/kernel"
    for expert in ("high", "low"):
        old = trees.flatten(before[expert])[kernel]
        assert np.any(old != trees.flatten(after.params["student"][expert])[kernel])


def test_an_update_makes_good_transitions_likelier_and_bad_ones_less():
    """The log-probs of stored transitions move with the sign of their advantage, per expert."""
    setup = tiny.make_setup(optim__lr=1e-2, algorithm__clip={"high": 1.0, "low": 1.0})
    state, batch = _collect(setup)
    good = np.arange(8) % 2 == 0
    batch = grpo.Batch(**{**vars(batch), "adv_B": jnp.where(jnp.asarray(good), 1.0, -1.0)})
    data, groups = grpo._replay_data(setup, batch), grpo._slots(setup, batch.steps_W)
    score = lambda state: np.asarray(grpo._rescore(state, setup, batch, data, groups))
    before, step = score(state), state.step
    for _ in range(5):
        state, _ = tiny.update(grpo, state.replace(step=step), setup, batch)
    change_WB = score(state) - before
    for expert, slots in groups.items():
        gain = change_WB[slots][:, good].mean() - change_WB[slots][:, ~good].mean()
        assert gain > 0, (expert, change_WB)
        assert change_WB[slots][:, good].mean() > 0 > change_WB[slots][:, ~good].mean(), expert


def test_a_reward_that_is_not_finite_stops_with_step_phase_and_prompt():
    setup = tiny.make_setup()
    params = tiny.parameters()
    state = grpo.init(
        jax.random.key(0), setup, {"student": {e: params[e] for e in ("high", "low")}}
    )
    ctx, uncond = tiny.contexts()

    def broken(video, prompts):
        scores = np.zeros(len(prompts))
        scores[1] = np.nan
        return {"mean": scores}, {}

    with pytest.raises(FloatingPointError, match="step 0, phase reward: sample 1 .'a'"):
        grpo.collect(state, setup, Item(["a", "b"], ctx), Tools(params["vae"], uncond, broken))


def test_a_batch_of_another_policy_is_refused():
    setup = tiny.make_setup()
    state, batch = _collect(setup)
    state, _ = tiny.update(grpo, state, setup, batch)
    with pytest.raises(ValueError, match="batch of policy 0 given to policy 1"):
        tiny.update(grpo, state, setup, batch)


@pytest.mark.parametrize("changes, text", [
    (dict(algorithm__group_size=1), "config.group_size is 1"),
    (dict(algorithm__updates=3), "do not divide into config.updates"),
    (dict(sampling__batch=3), "config.sampling.batch = 3; set it to a divisor of 8"),
    (dict(algorithm__advantage="grpo"), "config.advantage is 'grpo'"),
    (dict(algorithm__kl_kind="kl"), "config.kl.kind is 'kl'"),
    (dict(sde__kind="ode"), "training needs one of flow"),
    (dict(strategy__window=9), "window"),
    (dict(setup__experts=("low",), strategy__name="high_window"), "picks no step of the trained"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_before_compiling(changes, text):
    with pytest.raises(ValueError, match=text):
        grpo.check(tiny.make_setup(**changes))


def test_a_missing_expert_is_named():
    setup = tiny.make_setup()
    with pytest.raises(ValueError, match="config.experts names 'low'"):
        grpo.init(jax.random.key(0), setup, {"student": {"high": tiny.parameters()["high"]}})


def test_best_of_trains_on_the_extremes_of_each_group_only():
    setup = tiny.make_setup(algorithm__best_of=2, algorithm__micro_samples=2)
    grpo.check(setup)
    state, batch = _collect(setup)
    adv = jnp.asarray([0.0, 3.0, -3.0, 1.0, -4.0, 0.0, 1.0, 2.0])
    batch = grpo.Batch(**{**vars(batch), "adv_B": adv})
    assert grpo._kept(setup.algorithm, adv).tolist() == [1, 2, 4, 7]
    _, got = tiny.update(grpo, state, setup, batch)
    # as if the others had no advantage, with the mean over four samples instead of eight
    state, _ = _collect(setup)
    mute = jnp.asarray([0.0, 3.0, -3.0, 0.0, -4.0, 0.0, 0.0, 2.0])
    plain = tiny.make_setup(algorithm__micro_samples=2)
    _, want = tiny.update(grpo, state, plain, grpo.Batch(**{**vars(batch), "adv_B": mute}))
    for name in ("grad_norm/high", "grad_norm/low"):
        np.testing.assert_allclose(float(got[name]), 2 * float(want[name]), rtol=1e-4)


@pytest.mark.parametrize("best_of, text", [(3, "best_of is 3"), (6, "group_size = 4")])
def test_best_of_must_be_even_and_fit_the_group(best_of, text):
    with pytest.raises(ValueError, match=text):
        grpo.check(tiny.make_setup(algorithm__best_of=best_of))


def test_forwards_are_counted_by_hand():
    # 8 samples, 6 guided steps; one transition per expert: forward and backward (3) of 2 passes
    assert grpo.forwards(tiny.make_setup()) == {"collect": 8 * 6 * 2, "update": 8 * 2 * 2 * 3}
    changed = tiny.make_setup(
        algorithm__kl_beta={"high": 0.0, "low": 0.1}, algorithm__best_of=2,
        sampling__guidance=presets.Guidance(1.0, 3.0),
    )  # fmt: skip
    high = changed.sampling.schedule.high_steps
    want = {"collect": 8 * (high + 2 * (6 - high)), "update": 4 * (1 * 3 + 2 * 4)}
    assert grpo.forwards(changed) == want


@pytest.mark.parametrize("same", [False, True])
def test_a_group_may_start_from_one_noise(same):
    """Before the first SDE step its samples are equal; after it, and across groups, they differ."""
    setup = tiny.make_setup(algorithm__same_noise=same)
    _, batch = _collect(setup)
    x_WB, K = batch.trajectory.x, setup.algorithm.group_size
    first = np.asarray(x_WB[0]).reshape(-1, K, *x_WB.shape[2:])
    assert (np.ptp(first, axis=1).max() < 1e-5) == same
    assert np.abs(first[0] - first[1]).max() > 0.1
    after = np.asarray(batch.trajectory.x_next[0]).reshape(first.shape)
    assert np.abs(np.diff(after, axis=1)).max() > 0.1
