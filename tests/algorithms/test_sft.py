"""Supervised fine-tuning on a random two-expert model: levels, dropout, validation, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from wanjax import sampler, schedule, settings
from wanjax import state as states
from wanjax.algorithms import Tools, sft
from wanjax.data import Item
from wanjax.losses import flow
from wanjax.models import wan
from wanjax.parallel import sharding

B, S = 8, 5
I2V = dataclasses.replace(tiny.MODEL, wan=dataclasses.replace(tiny.WAN, in_channels=12))


def _setup(model=tiny.MODEL, **changes):
    own = {"clips": B, "micro_samples": B}
    own |= {k.removeprefix("sft__"): v for k, v in changes.items() if k.startswith("sft__")}
    rest = {k: v for k, v in changes.items() if not k.startswith("sft__")}
    setup = tiny.make_setup(model, **rest)
    rewards = settings.RewardConfig({}, "stop")
    config = tiny.algorithm_config(sft, **own)
    return tiny.shared(dataclasses.replace(setup, algorithm=config, rewards=rewards))


def _start(setup):
    params = tiny.parameters(0, setup.model)
    return sft.init(jax.random.key(0), setup, {"student": {e: params[e] for e in ("high", "low")}})


@pytest.fixture(scope="module")
def item():
    ctx, _ = tiny.contexts(B, S)
    x0 = 0.5 + 0.1 * np.random.default_rng(1).normal(size=(B, 2, 2, 2, 4)).astype(np.float32)
    return Item([f"clip {n}" for n in range(B)], np.asarray(ctx), x0)


TOOLS = Tools({}, tiny.contexts(B, S)[1])
BOTH = _setup(sft__weighting="bell", sft__micro_samples=4, sft__bins=2, sft__caption_dropout=0.5)
LOW = _setup(setup__experts=("low",), sft__timesteps=2, sft__caption_dropout=0.0)


def _metrics(setup, item, steps=1):
    state = _start(setup)
    for _ in range(steps):
        state, metrics = tiny.update(sft, state, setup, sft.collect(state, setup, item, TOOLS))
    return state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("setup", [
    BOTH, _setup(setup__experts=("low",), lora__rank=0, optim__lr=1e-3),
], ids=["adapters", "full weights"])  # fmt: skip
def test_training_lowers_the_validation_loss_of_each_expert(item, setup):
    state = _start(setup)
    before = sft.validate(state, setup, item, TOOLS)
    for _ in range(6):
        state, metrics = tiny.update(sft, state, setup, sft.collect(state, setup, item, TOOLS))
    after = sft.validate(state, setup, item, TOOLS)
    for expert in setup.experts:
        name = f"eval/loss/{expert}"
        assert after[name].mean() < 0.95 * before[name].mean(), (before[name], after[name])
        assert {f"sft/{n}/{expert}" for n in ("loss", "error", "t")} <= set(metrics)
    assert int(state.step) == 6 and ("reference" not in state.params)


def test_experts_in_host_memory_take_the_same_step(item):
    start, found = _start(BOTH), []
    for params in (start.params, sharding.to_host(start.params)):
        state = start.replace(params=params, opt=jax.tree.map(jnp.copy, start.opt))
        errors = sft.validate(state, BOTH, item, TOOLS)
        found.append((tiny.update(sft, state, BOTH, sft.collect(state, BOTH, item, TOOLS)), errors))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_the_trained_expert_moves_and_is_measured(item):
    state = _start(LOW)
    assert set(state.opt) == {"low"}
    after, metrics = tiny.update(sft, state, LOW, sft.collect(state, LOW, item, TOOLS))
    assert {n.rsplit("/", 1)[1] for n in metrics} == {"low"}
    pairs = zip(*(jax.tree.leaves(s.adapters["default"]["low"]) for s in (state, after)),
                strict=True)  # fmt: skip
    assert not all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("changes", [
    dict(sft__micro_samples=2, sft__micro_steps=2), dict(sft__mix_experts=True),
    dict(sft__micro_samples=3, sft__micro_steps=2),
], ids=["small", "mixed", "unequal"])  # fmt: skip
def test_updates_do_not_depend_on_how_micro_batches_are_cut(item, changes):
    whole = BOTH if "sft__mix_experts" in changes else LOW
    own = {k.removeprefix("sft__"): v for k, v in changes.items()}
    cut = tiny.replace_algorithm(whole, **own)
    _, want = _metrics(whole, item)
    _, got = _metrics(cut, item)
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=name)


def test_eight_devices_take_the_step_of_one(item):
    state, want = _metrics(LOW, item)
    with sharding.use_mesh(sharding.make_mesh(dict(data=8))):
        spread, got = _metrics(LOW, item)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=name)
    trained = (jax.tree.leaves(states.trainable(s, LOW.training)) for s in (spread, state))
    for a, b in zip(*trained, strict=True):
        # Adam turns a gradient of 1e-9 of either sign into a whole step
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-4) < 0.01


@pytest.mark.parametrize("density", flow.DENSITIES)
def test_levels_lie_inside_the_expert_and_cover_its_density(item, density):
    setup = _setup(sft__timesteps=4, sft__density=flow.Density(density))
    batch = sft.collect(_start(setup), setup, item, TOOLS)
    data = sft._noised(batch, setup=setup)
    for expert, (lo, hi) in (("high", (875.0, 1000.0)), ("low", (0.0, 875.0))):
        t = np.asarray(data[expert]["t_BT"])
        assert t.shape == (B, 4) and lo <= t.min() and t.max() < hi
        edges = flow.quantile(
            jnp.linspace(0, 1, 4 * B + 1)[1:-1],
            setup.algorithm.density,
            shift=3.0,
            t_lo=lo,
            t_hi=hi,
        )
        inside = np.searchsorted(np.asarray(edges), np.sort(t.ravel()), side="right")
        np.testing.assert_array_equal(inside, np.arange(4 * B))  # one level in each part
    later = sft._noised(dataclasses.replace(batch, version=1), setup=setup)
    assert not np.array_equal(later["low"]["t_BT"], data["low"]["t_BT"])


def test_the_loss_is_flow_matching_at_the_drawn_levels(item):
    """By hand: the velocity of the expert at x_t against noise − x0, weighted by the bell."""
    setup, state = BOTH, _start(BOTH)
    batch = sft.collect(state, setup, item, TOOLS)
    data = sft._noised(batch, setup=setup)["high"]
    t = data["t_BT"][:, 0]
    noise = sampler.initial_noise(data["key"], jnp.arange(B), item.x0_PTHWC.shape[1:])
    sigma = np.asarray(t, np.float64).reshape(B, 1, 1, 1, 1) / 1000
    x_t = jnp.asarray((1 - sigma) * item.x0_PTHWC + sigma * np.asarray(noise), jnp.float32)
    params, adapter = states.rollout_params(state)["high"]
    denoise = jax.jit(functools.partial(wan.denoise, config=setup.model.wan))
    v = denoise(params, adapter, x_t, t, batch.ctx_BSE)
    error = ((np.asarray(v, np.float64) - (noise - item.x0_PTHWC)) ** 2).mean((1, 2, 3, 4))
    _, metrics = tiny.update(sft, state, setup, batch)
    want = (flow.bell_weight(np.asarray(t), 3.0) * error).mean()
    np.testing.assert_allclose(float(metrics["sft/loss/high"]), want, rtol=1e-4)
    np.testing.assert_allclose(float(metrics["sft/error/high"]), error.mean(), rtol=1e-4)


def test_captions_are_dropped_by_seed_step_and_clip(item):
    setup, state = BOTH, _start(BOTH)
    uncond = np.asarray(TOOLS.uncond_1SE[0])
    gone = lambda batch: np.array([np.array_equal(row, uncond) for row in batch.ctx_BSE])
    steps = [gone(sft.collect(state.replace(step=state.step + n), setup, item, TOOLS))
             for n in range(40)]  # fmt: skip
    assert 0.4 < np.mean(steps) < 0.6 and len({tuple(row) for row in steps}) > 30
    again = sft.collect(state.replace(step=state.step + 7), setup, item, TOOLS)
    np.testing.assert_array_equal(gone(again), steps[7])
    assert float(again.metrics["data/caption_dropped"]) == steps[7].mean()
    kept = ~steps[7]
    np.testing.assert_array_equal(np.asarray(again.ctx_BSE)[kept], item.ctx_PSE[kept])
    assert gone(sft.collect(state, _setup(sft__caption_dropout=1.0), item, TOOLS)).all()
    assert not gone(sft.collect(state, LOW, item, TOOLS)).any()


def test_validation_is_the_error_at_fixed_levels_and_noise(item):
    setup, state = BOTH, _start(BOTH)
    found = sft.validate(state, setup, item, TOOLS)
    assert set(found) == {
        "eval/loss/high", "eval/t875-937.5/high", "eval/t937.5-1000/high",
        "eval/loss/low", "eval/t0-437.5/low", "eval/t437.5-875/low",
    }  # fmt: skip
    assert all(value.shape == (B,) for value in found.values())
    again = sft.validate(state.replace(step=state.step + 3), setup, item, TOOLS)
    assert all(np.array_equal(again[name], found[name]) for name in found)
    mean = (found["eval/t0-437.5/low"] + found["eval/t437.5-875/low"]) / 2
    np.testing.assert_allclose(found["eval/loss/low"], mean, rtol=1e-6)
    ids = jnp.arange(B)
    noise = sampler.initial_noise(sft._key(setup, 0, -1), ids, item.x0_PTHWC.shape[1:])
    x_t = flow.add_noise(item.x0_PTHWC, noise, 0.90625)
    v, _, _ = jax.jit(sft._predict, static_argnames="config")(
        states.rollout_params(state)["high"], item.x0_PTHWC, noise, jnp.full(B, 906.25),
        item.ctx_PSE, None, config=setup.model.wan,
    )  # fmt: skip
    want = flow.flow_error(v, item.x0_PTHWC, noise)
    np.testing.assert_allclose(found["eval/t875-937.5/high"], want, rtol=1e-4)
    assert np.isfinite(x_t).all()


def test_a_first_frame_is_an_input_and_not_scored(item):
    """With cond["first"] frame 0 of x0 and its noise do not matter; of an I2V model, cond does."""
    setup = _setup(setup__experts=("high",))
    first = {"first": item.x0_PTHWC[:, :1]}
    other = np.array(item.x0_PTHWC)
    other[:, :1] += 3.0
    state, found = _start(setup), []
    for x0 in (item.x0_PTHWC, other):
        given = Item(item.texts, item.ctx_PSE, x0, first)
        found.append(sft.validate(state, setup, given, TOOLS)["eval/loss/high"])
    np.testing.assert_array_equal(*found)
    rng = np.random.default_rng(2)
    setup = _setup(I2V, setup__experts=("high",))
    state = _start(setup)
    for _ in range(2):
        cond = {"latents": rng.normal(size=(B, 2, 2, 2, 8)).astype(np.float32)}
        given = Item(item.texts, item.ctx_PSE, item.x0_PTHWC, cond)
        found.append(sft.validate(state, setup, given, TOOLS)["eval/loss/high"])
    assert (found[2] != found[3]).all()


def test_a_step_takes_the_first_frame_as_an_input(item):
    """Moments after a step: with cond["first"] frame 0 of x0 changes nothing; of an I2V model cond
    does."""

    def moments(setup, x0, cond):
        state = _start(setup)
        given = Item(item.texts, item.ctx_PSE, x0, cond)
        state, _ = tiny.update(sft, state, setup, sft.collect(state, setup, given, TOOLS))
        return [np.asarray(x) for x in jax.tree.leaves(state.opt) if x.ndim > 1]

    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    setup = _setup(setup__experts=("high",))
    other, first = np.array(item.x0_PTHWC), {"first": item.x0_PTHWC[:, :1]}
    other[:, :1] += 3.0
    steps = [moments(setup, x0, first) for x0 in (item.x0_PTHWC, other)]
    assert same(*steps) and any(x.any() for x in steps[0])
    moved = {"first": first["first"] + 1.0}
    assert not same(steps[0], moments(setup, item.x0_PTHWC, moved))
    rng, setup = np.random.default_rng(2), _setup(I2V, setup__experts=("high",))
    conds = ({"latents": rng.normal(size=(B, 2, 2, 2, 8)).astype(np.float32)} for _ in range(2))
    assert not same(*(moments(setup, item.x0_PTHWC, cond) for cond in conds))


def test_texts_alone_and_batches_of_another_policy_are_refused(item):
    setup, state = LOW, _start(LOW)
    with pytest.raises(ValueError, match="config.data.path are texts alone"):
        sft.collect(state, setup, Item(item.texts, item.ctx_PSE), TOOLS)
    batch = sft.collect(state, setup, item, TOOLS)
    with pytest.raises(ValueError, match="batch of policy 0 given to policy 1"):
        tiny.update(sft, state.replace(step=state.step + 1), setup, batch)


@pytest.mark.parametrize("changes, text", [
    (dict(sft__weighting="cosine"), "config.sft.weighting is 'cosine'"),
    (dict(sft__density=flow.Density("beta")), "config.sft: timestep density is 'beta'"),
    (dict(sft__density=flow.Density("mode", scale=3.0)), "config.sft: scale of timestep density"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_before_compiling(changes, text):
    with pytest.raises(ValueError, match=text):
        sft.check(_setup(**changes))


def test_a_single_expert_serves_all_times():
    model = dataclasses.replace(tiny.MODEL, experts=("high",), boundary=None)
    setup = _setup(model)
    assert sft._range(setup, "high") == (0.0, 1000.0)
    assert schedule.expert_name(setup.sampling.schedule, 5) == "high"
