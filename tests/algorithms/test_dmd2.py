"""DMD2 on random tiny models: who moves, who does not, and that no answer depends on how the work
is split. The losses themselves and whole steps of the reference are in tests/losses/test_dmd2.py.
"""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import default, dmd2_wan21, dmd2_wan22
from tests import tiny
from wanjax import export, sample, sampler, sampling, schedule, train, trees
from wanjax import setup as setups
from wanjax import state as states
from wanjax.algorithms import Tools, distill, dmd2, phases
from wanjax.data import Item, text, video
from wanjax.losses import flow
from wanjax.models import lora, presets, wan
from wanjax.parallel import sharding
from wanjax.run import alarms, checkpoint, metrics

SMALL = dataclasses.replace(
    tiny.MODEL,
    name="small",
    wan=dataclasses.replace(tiny.WAN, num_layers=1, ffn_dim=32),
    experts=("high",),
    boundary=None,
)
BOTH = ("high", "low")


def _setup(model=tiny.MODEL, roles=None, **changes):
    """Four steps at shift 3: σ 1, .9 for the high expert, .75, .5 for the low one."""
    given = {"sampling__guidance": presets.Guidance(1.0, 1.0), "schedule__steps": 4}
    given |= {k: v for k, v in changes.items() if not k.startswith("dmd2__")}
    setup = tiny.make_setup(model, **given)
    fields = dict(items=2, group_size=2, micro_samples=4, student_every=1, ema_start=1)
    fields["guidance"] = {"high": 4.0, "low": 4.0}
    fields |= {k.removeprefix("dmd2__"): v for k, v in changes.items() if k.startswith("dmd2__")}
    roles = {role: (roles or {}).get(role, model) for role in ("teacher", "critic")}
    critic = roles["critic"].experts
    experts = setup.experts if critic == model.experts else critic
    critics = {e: tiny.adamw(lr=1e-2) for e in experts}
    setup = tiny.replace_training(setup, role="critic", optim=critics)
    own = dict(algorithm=tiny.algorithm_config(dmd2, roles, **fields), roles=roles)
    return tiny.shared(dataclasses.replace(setup, **own))


def _base(model=tiny.MODEL, seed=0):
    params = tiny.parameters(seed, model)
    return {expert: params[expert] for expert in model.experts}


def _start(setup, **roles):
    return dmd2.init(jax.random.key(0), setup, {"student": _base(setup.model), **roles})


def _collect(setup, state, x0=None):
    ctx, uncond = tiny.contexts()
    tools = Tools(tiny.parameters()["vae"], uncond)
    return dmd2.collect(state, setup, Item(["a", "b"], ctx, x0), tools)


def _step(setup, state):
    return tiny.update(dmd2, state, setup, _collect(setup, state))


def _stir(tree, seed, scale=0.1):
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(tree))))
    return jax.tree.map(lambda x: x + scale * jax.random.normal(next(keys), x.shape), tree)


def _equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def _close(a, b, tolerance):
    for (path, x), (_, y) in zip(*(sorted(trees.flatten(t).items()) for t in (a, b)), strict=True):
        scale = np.abs(y).max() + 1e-12
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=path)


# One setup for most tests, since a setup is what compiled programs belong to. The student's turns
# are the odd steps; sequential guidance makes equal scores equal bit for bit.
JOINT = _setup(
    dmd2__guidance={"high": 3.0, "low": 3.0},
    dmd2__student_every=2,
    dmd2__ema_decay=0.75,
    sampling__guidance_mode="sequential",
)


def _moved(setup):
    """A state at step 1 in which student, critic and teacher differ."""
    state = _start(setup).replace(step=jnp.ones((), jnp.int32))
    for role, seed in (("student", 7), ("critic", 8)):
        moved = _stir(states.trainable(state, setup.training, role), seed)
        state = states.replace_trainable(state, setup.training, moved, role)
    return state


@functools.cache
def _stirred():
    """Such a state of JOINT, and its batch."""
    state = _moved(JOINT)
    return state, _collect(JOINT, state)


def _update(setup, state, batch):
    return tiny.update(dmd2, state, setup, batch)


def _only(batch, name):
    return dataclasses.replace(batch, latents={name: batch.latents[name]})


def _contexts(batch):
    """One context per sample."""
    return jnp.repeat(batch.ctx_PSE, 2, axis=0)


@functools.cache
def _updated():
    return _update(JOINT, *_stirred())


def test_a_critic_equal_to_the_teacher_gives_the_student_no_gradient():
    """Without guidance, which a prompt equal to the negative one has; the student is elsewhere."""
    state, batch = _stirred()
    null = jnp.broadcast_to(batch.uncond_1SE, batch.ctx_PSE.shape)
    fresh = states.trainable(_start(JOINT), JOINT.training, "critic")
    equal = states.replace_trainable(state, JOINT.training, fresh, "critic")
    after, metrics = _update(
        JOINT, equal, dataclasses.replace(_only(batch, "student"), ctx_PSE=null)
    )
    for expert in BOTH:
        assert metrics[f"grad_norm/{expert}"] == 0 and metrics[f"dmd2/loss/{expert}"] == 0
        assert _updated()[1][f"grad_norm/{expert}"] > 1e-3
    assert _equal(states.trainable(after, JOINT.training), states.trainable(state, JOINT.training))


def test_the_first_step_alarms_at_a_critic_that_is_not_the_teacher():
    look = lambda found: alarms.watch(default.get_config().alarms.start, 1)(found)
    state = _start(JOINT)
    _, found = _step(JOINT, state)
    assert [found[f"dmd2/critic_gap/{e}"] for e in BOTH] == [0, 0] and not look(found)
    assert not any("critic_gap" in name for name in _updated()[1])  # of step 1
    for changed in (dict(critic=_base(seed=1)), dict(teacher=_base(seed=1))):
        found = distill.critic_gaps(_start(JOINT, **changed))
        pairs = zip(*(jax.tree.leaves(_base(seed=n)["low"]) for n in (0, 1)), strict=True)
        want = max(np.abs(a - b).max() for a, b in pairs)
        np.testing.assert_allclose(found["dmd2/critic_gap/low"], want, rtol=1e-6)
        assert len(look(found)) == 2
    moved = _stir(states.trainable(state, JOINT.training, "critic")["high"], 8)
    found = distill.critic_gaps(
        states.replace_trainable(state, JOINT.training, {"high": moved}, "critic")
    )
    assert found["dmd2/critic_gap/high"] > 0.1 and found["dmd2/critic_gap/low"] == 0
    assert not distill.critic_gaps(_distilled()[1][0])  # another variant


def test_each_pass_moves_its_own_role_and_nothing_else():
    state, batch = _stirred()
    for name, moved, kept in (("student", "default", "critic"), ("critic", "critic", "default")):
        after, _ = _update(JOINT, state, _only(batch, name))
        assert _equal(after.params, state.params)
        assert _equal(after.adapters[kept], state.adapters[kept])
        assert _equal(after.adapters[moved], _updated()[0].adapters[moved])
        for expert in BOTH:
            assert not _equal(after.adapters[moved][expert], state.adapters[moved][expert])


def _noised(expert, name, x_s, sigma_s, noise=2):
    """(t_B, σ, x_t, velocity): clips of a pass at their scored levels, on the path of fixed noise
    (of that purpose) whose derivative by σ is the velocity."""
    _, region = phases.draw(JOINT, 1, expert, name)
    keys, ids = [dmd2._key(JOINT, 1, expert, name, n) for n in (1, noise)], jnp.arange(4)
    u = region.u[0] + (region.u[1] - region.u[0]) * flow.uniform(keys[0], ids)
    t_B = jnp.clip(1000 * schedule.shift_map(u, 3.0), 20, 980)
    noise = sampler.initial_noise(keys[1], ids, x_s.shape[1:])

    def path(s):
        alpha = (1 - s) / (1 - sigma_s)
        return alpha * x_s + jnp.sqrt(s**2 - (alpha * sigma_s) ** 2) * noise

    s = (t_B / 1000)[:, None, None, None, None]
    return t_B, s, *jax.jvp(path, (s,), (jnp.ones_like(s),))


ENDS = pytest.mark.parametrize("expert, sigma_s", [("high", 0.75), ("low", 0.0)])


def _compared(expert, sigma_s, base, critic, x0, x, sigma, ctx, null):
    """(t_B, x_t, g): the student's call x0 on x at σ, noised by way of x_s, and what critic and
    teacher make of that."""
    x_s = x + (sigma_s - sigma) * (x - x0) / sigma
    t_B, s, x_t, _ = _noised(expert, "student", x_s, sigma_s)
    cond, uncond = _denoise(base, {}, x_t, t_B, ctx), _denoise(base, {}, x_t, t_B, null)
    real = x_t - s * (uncond + 3.0 * (cond - uncond))
    fake = x_t - s * _denoise(base, critic, x_t, t_B, ctx)
    return t_B, x_t, (fake - real) / jnp.abs(x0 - real).mean((1, 2, 3, 4), keepdims=True)


@ENDS
def test_student_gradient_is_that_of_its_last_call_alone(expert, sigma_s):
    """An oracle in plain jax: g/N pulled back through one call, in which x and g are constants."""
    state, batch = _stirred()
    exit_step, _ = phases.draw(JOINT, 1, expert, "student")
    sigma = float(JOINT.sampling.schedule.sigmas[exit_step])
    x, base = batch.latents["student"][expert]["x"], state.params["student"][expert]

    @jax.jit
    def oracle(student, critic, ctx, null):
        t = jnp.full(4, 1000 * sigma)
        x0, pull = jax.vjp(lambda a: x - sigma * _denoise(base, a, x, t, ctx), student)
        t_B, _, g = _compared(expert, sigma_s, base, critic, x0, x, sigma, ctx, null)
        return t_B, 0.5 * (g**2).mean(), optax.tree.norm(pull(g / g.size))

    null = jnp.broadcast_to(batch.uncond_1SE, _contexts(batch).shape)
    adapters = (state.adapters[name][expert] for name in ("default", "critic"))
    t_B, loss, norm = oracle(*adapters, _contexts(batch), null)
    low, high = (875, 980) if expert == "high" else (20, 875)
    assert low <= float(t_B.min()) < float(t_B.max()) <= high
    np.testing.assert_allclose(_updated()[1][f"dmd2/loss/{expert}"], loss, rtol=1e-4)
    np.testing.assert_allclose(_updated()[1][f"grad_norm/{expert}"], norm, rtol=1e-4)


@ENDS
def test_critic_regresses_the_velocity_of_the_students_clips(expert, sigma_s):
    state, batch = _stirred()
    base, x_s = state.params["student"][expert], batch.latents["critic"][expert]["x"]
    t_B, _, x_t, target = _noised(expert, "critic", x_s, sigma_s)

    @jax.jit
    def oracle(adapter):
        v = wan.denoise(base, adapter, x_t, t_B, _contexts(batch), config=tiny.WAN)
        return jnp.square(v - target).mean()

    loss, grad = jax.value_and_grad(oracle)(state.adapters["critic"][expert])
    found = (_updated()[1][f"critic/{name}/{expert}"] for name in ("loss", "grad_norm"))
    np.testing.assert_allclose([*found], [loss, optax.tree.norm(grad)], rtol=1e-4)


@pytest.mark.parametrize("solver", dmd2.SOLVERS)
def test_critic_clips_end_where_the_next_expert_begins(solver):
    """The low expert's rollout passes the high one's. Fresh noise goes by way of x0, also at the
    end of an expert's steps, which is then x0 itself."""
    (state, batch), plan, ids = _stirred(), JOINT.sampling.schedule, jnp.arange(4)
    if solver == "renoise":
        own = dataclasses.replace(JOINT.sampling, solver=solver)
        batch = _collect(tiny.shared(dataclasses.replace(JOINT, sampling=own)), state)
    policy = states.rollout_params(state)
    for expert, steps in (("high", range(2)), ("low", range(4))):
        exit_step, _ = phases.draw(JOINT, 1, expert, "critic")
        assert exit_step > 0
        key = dmd2._key(JOINT, 1, expert, "critic", 0)
        x = sampler.initial_noise(key, ids, sampling.latent_shape(JOINT.model, JOINT.sampling))
        for i in range(exit_step + 1):
            name = schedule.expert_name(plan, i)
            run = _velocity(*policy[name], _contexts(batch), batch.uncond_1SE)
            v, sigma = run(x, jnp.full(4, plan.timesteps[i])), plan.sigmas[i]
            if solver == "euler":
                end = plan.sigmas[steps.stop] if i == exit_step else plan.sigmas[i + 1]
                x = x + (end - sigma) * v
                continue
            x = x - sigma * v
            if i < exit_step:
                draws = [jax.random.fold_in(jax.random.fold_in(key, n), i + 1) for n in ids]
                noise = jnp.stack([jax.random.normal(k, x.shape[1:]) for k in draws])
                x = (1 - plan.sigmas[i + 1]) * x + plan.sigmas[i + 1] * noise
        np.testing.assert_allclose(batch.latents["critic"][expert]["x"], x, atol=1e-4)


def _velocity(params, adapter, ctx, null):
    del null
    return lambda x, t: _denoise(params, adapter, x, t, ctx)


_denoise = jax.jit(functools.partial(wan.denoise, config=tiny.WAN))


def test_cadence_and_average_follow_the_student():
    state, _ = _stirred()
    state = jax.tree.map(jnp.copy, state).replace(step=jnp.zeros((), jnp.int32))
    for step in range(4):
        before = jax.tree.map(np.asarray, state.adapters)
        state, metrics = tiny.update(dmd2, state, JOINT, _collect(JOINT, state))
        student = step % 2 == 1
        assert ("dmd2/loss/high" in metrics) == student and "critic/loss/low" in metrics
        assert _equal(state.adapters["default"], before["default"]) != student
        assert not _equal(state.adapters["critic"], before["critic"])
        if step == 1:  # the first update: a copy
            assert _equal(state.adapters["ema"], state.adapters["default"])
        elif step == 3:
            want = trees.lerp(state.adapters["default"], before["ema"], 0.75)
            assert _equal(state.adapters["ema"], want)
        else:
            assert _equal(state.adapters["ema"], before["ema"])


def test_the_second_stage_starts_from_the_frozen_student_of_the_first():
    joint, batch = _stirred()
    setup = _setup(setup__experts=("low",), dmd2__student_every=2)
    state = _start(setup)
    assert set(state.opt) == set(state.role_opt["critic"]) == {"low"}
    first = {"high": joint.adapters["default"]["high"], "low": joint.adapters["default"]["low"]}
    state = states.start_from(state, setup.training, first).replace(step=jnp.ones((), jnp.int32))
    staged = _collect(setup, state)
    assert set(staged.latents["student"]) == {"low"}
    for name in ("student", "critic"):
        got, want = (b.latents[name]["low"]["x"] for b in (staged, batch))
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert set(states.averaged(state, "ema")) == {"low"}
    policy = states.rollout_params(state, "ema")
    assert _equal(policy["high"][1], first["high"]) and _equal(policy["low"][1], first["low"])
    with pytest.raises(ValueError, match="config.lora.rank"):
        states.start_from(
            state, setup.training, {"low": trees.map_paths(lambda _, a: a[:1], first["low"])}
        )


def test_a_shared_base_gives_what_full_copies_give():
    """The critic's adapter merged into a copy of its own, and a teacher of its own."""
    state, batch = _stirred()
    merged = {e: lora.merge(_base()[e], state.adapters["critic"][e])[0] for e in BOTH}
    copies = _start(JOINT, teacher=_base(), critic=merged).replace(step=state.step)
    copies = states.replace_trainable(copies, JOINT.training, state.adapters["default"])
    assert set(state.params) == {"student"} and set(copies.params) == {
        "student", "teacher", "critic",
    }  # fmt: skip
    _, metrics = _update(JOINT, copies, batch)
    for name in ("dmd2/loss", "dmd2/norm", "grad_norm", "critic/loss"):
        for expert in BOTH:
            want = _updated()[1][f"{name}/{expert}"]
            np.testing.assert_allclose(metrics[f"{name}/{expert}"], want, rtol=1e-3)


HIGH = dict(
    setup__experts=("high",), sampling__guidance_mode="sequential", dmd2__student_every=2,
    dmd2__guidance={"high": 3.0, "low": 3.0},
)  # fmt: skip


def _high_alone(setup):
    """The high expert's part of the common state."""
    joint, _ = _stirred()
    state = _start(setup).replace(step=joint.step)
    for role, name in (("student", "default"), ("critic", "critic")):
        part = jax.tree.map(jnp.copy, {"high": joint.adapters[name]["high"]})
        state = states.replace_trainable(state, setup.training, part, role)
    return state


def _same_high_step(after, metrics, tolerance):
    for name in ("default", "critic"):
        got, want = (s.adapters[name]["high"] for s in (after, _updated()[0]))
        _close(got, want, tolerance)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, _updated()[1][name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_the_first_stage_alone_in_unequal_micro_batches_takes_the_same_step():
    setup = _setup(**HIGH, dmd2__micro_samples=3)
    state = _high_alone(setup)
    assert set(state.opt) == set(state.role_opt["critic"]) == {"high"}
    after, metrics = _update(setup, state, _stirred()[1])
    metrics = {k: v for k, v in metrics.items() if "x0_std" not in k}  # not a mean over samples
    _same_high_step(after, metrics, 2e-3)


def test_eight_devices_take_the_same_step_as_one():
    setup = _setup(**HIGH)
    state = _high_alone(setup)
    mesh = sharding.make_mesh(dict(data=2, fsdp=2, tensor=2))
    with sharding.use_mesh(mesh):
        place = sharding.tree_shardings(mesh, state.params["student"]["high"], wan.logical_axes)
        placed = {"high": jax.device_put(state.params["student"]["high"], place)}
        params = {"student": {**state.params["student"], **placed}}
        after, metrics = _step(setup, state.replace(params=params))
    _same_high_step(after, metrics, 2e-3)


@functools.cache
def _distilled():
    """A one-expert student of another size below the two-expert teacher: states after each of three
    warm and three further steps, with metrics."""
    setup = _setup(
        SMALL, {"teacher": tiny.MODEL}, dmd2__warm_steps=3, dmd2__warm_substeps=2, lora__rank=0,
        optim__lr=1e-3,
    )  # fmt: skip
    states_, metrics = [_start(setup, teacher=_base())], []
    for step in range(6):
        at = step if step >= 3 else 0  # the same pairs in each warm step
        state = states_[-1].replace(step=jnp.int32(at))
        after, found = _update(setup, state, _collect(setup, state))
        states_.append(after)
        metrics.append(found)
    return setup, states_, metrics


def test_warm_start_lowers_the_regression_on_teacher_pairs_and_leaves_the_critic():
    setup, found, metrics = _distilled()
    losses = [float(m["warm/loss/high"]) for m in metrics[:3]]
    assert losses[0] > losses[1] > losses[2]
    assert _equal(found[3].params["critic"], found[0].params["critic"])
    assert _equal(found[3].params["ema"], found[3].params["student"])


def test_a_small_student_learns_from_a_large_two_expert_teacher():
    setup, found, metrics = _distilled()
    assert trees.count(found[0].params["teacher"]) > 2 * trees.count(found[0].params["student"])
    served = {phases.draw(setup, step, "high", "student")[1].teacher for step in range(3, 6)}
    assert served == {"high", "low"}
    for before, after, values in zip(found[3:-1], found[4:], metrics[3:], strict=True):
        assert _equal(after.params["teacher"], before.params["teacher"])
        assert not _equal(after.params["student"], before.params["student"])
        assert not _equal(after.params["critic"], before.params["critic"])
        assert np.isfinite(values["dmd2/loss/high"]) and values["dmd2/loss/high"] > 0
    table = states.describe(found[0], setup.training, setup.roles)
    for row in ("params/student/high", "params/critic/high"):
        assert any(line.startswith(row) and line.endswith("trained") for line in table.split("\n"))
    assert any("params/teacher/low" in r and r.endswith("frozen") for r in table.split("\n"))


# both experts with adapters; the high one's pairs end at σ_s = 0.75, where the low one begins
WARM = _setup(
    dmd2__warm_steps=2, dmd2__warm_substeps=2, dmd2__guidance={"high": 3.0, "low": 2.0}
)  # fmt: skip


@functools.cache
def _warm():
    """A state of WARM whose student has moved, and its batch."""
    state = _start(WARM)
    moved = _stir(states.trainable(state, WARM.training), 7)
    state = states.replace_trainable(state, WARM.training, moved)
    return state, _collect(WARM, state)


def test_pairs_lie_on_the_teachers_own_trajectory():
    setup, found, _ = _distilled()
    alone = setup, _collect(setup, found[0])
    for (setup, batch), expert, end in (
        (alone, "high", 8), ((WARM, _warm()[1]), "high", 4), ((WARM, _warm()[1]), "low", 8),
    ):  # fmt: skip
        exit_step, _ = phases.draw(setup, 0, expert, "warm")
        fine = phases.teacher_schedule(setup)
        assert fine.steps == 8 and set(fine.expert) == {0, 1}
        np.testing.assert_allclose(fine.sigmas[::2], setup.sampling.schedule.sigmas, atol=1e-12)
        x = sampler.initial_noise(
            dmd2._key(setup, 0, expert, "warm", 0),
            jnp.arange(4),
            sampling.latent_shape(setup.model, setup.sampling),
        )
        null, teacher = jnp.broadcast_to(batch.uncond_1SE, _contexts(batch).shape), _base()
        for i in range(end):
            if i == 2 * exit_step:
                np.testing.assert_allclose(batch.latents["warm"][expert]["x"], x, atol=1e-4)
            name, t = schedule.expert_name(fine, i), jnp.full(4, fine.timesteps[i])
            cond, uncond = (_denoise(teacher[name], {}, x, t, c) for c in (_contexts(batch), null))
            v = uncond + setup.algorithm.guidance[name] * (cond - uncond)
            x = x + (fine.sigmas[i + 1] - fine.sigmas[i]) * v
        np.testing.assert_allclose(batch.latents["warm"][expert]["end"], x, atol=1e-3)


def test_warm_start_regresses_each_expert_to_the_end_of_its_own_steps():
    """Loss and gradient of both adapters against an oracle, then who moves and that losses fall."""
    state, batch = _warm()
    assert set(batch.latents) == {"warm"} and dmd2._passes(WARM, 2) == ["student", "critic"]

    @jax.jit
    def oracle(adapter, base, pair, sigma, sigma_s):
        t_B = jnp.full(4, 1000 * sigma)
        v = wan.denoise(base, adapter, pair["x"], t_B, _contexts(batch), config=tiny.WAN)
        return jnp.square(pair["x"] + (sigma_s - sigma) * v - pair["end"]).mean()

    after, metrics = _update(WARM, state, batch)
    for expert, sigma_s in (("high", 0.75), ("low", 0.0)):
        exit_step, _ = phases.draw(WARM, 0, expert, "warm")
        rest = state.params["student"][expert], batch.latents["warm"][expert]
        sigma = WARM.sampling.schedule.sigmas[exit_step]
        loss, grad = jax.value_and_grad(oracle)(
            state.adapters["default"][expert], *rest, sigma, sigma_s
        )
        np.testing.assert_allclose(metrics[f"warm/loss/{expert}"], loss, rtol=1e-4)
        np.testing.assert_allclose(metrics[f"grad_norm/{expert}"], optax.tree.norm(grad), rtol=1e-4)
        assert not _equal(after.adapters["default"][expert], state.adapters["default"][expert])
    assert _equal(after.params, state.params)
    assert _equal(after.adapters["critic"], state.adapters["critic"])
    assert _equal(after.adapters["ema"], after.adapters["default"])
    _, later = tiny.update(dmd2, after.replace(step=state.step), WARM, batch)
    assert all(later[f"warm/loss/{e}"] < metrics[f"warm/loss/{e}"] for e in BOTH)


def test_texts_may_have_other_rows_than_the_negative_prompt():
    """Rows that are missing are rows of zeros."""
    (state, _), (ctx, uncond), vae = _warm(), tiny.contexts(), tiny.parameters()["vae"]
    for short in (dict(ctx=ctx[:, :3]), dict(uncond=uncond[:, :3])):
        padded = {name: jnp.pad(a, ((0, 0), (0, 2), (0, 0))) for name, a in short.items()}
        found = []
        for rows in (short, padded):
            texts = dict(ctx=ctx, uncond=uncond) | rows
            tools = Tools(vae, texts["uncond"])
            batch = dmd2.collect(state, WARM, Item(["a", "b"], texts["ctx"]), tools)
            found.append((batch.latents, batch.ctx_PSE, batch.uncond_1SE))
        assert _equal(*found)


def test_fresh_noise_and_real_latents():
    """SDE form: the anchor is x0 itself. Data: clips are real ones at the level of the exit."""
    x0 = jax.random.normal(
        jax.random.key(5), (2, *sampling.latent_shape(JOINT.model, JOINT.sampling))
    )
    setup = _setup(dmd2__rollout="data_latent", sampling__solver="renoise", setup__experts=("low",))
    batch = _collect(setup, _start(setup), x0)
    exit_step, _ = phases.draw(setup, 0, "low", "student")
    key = dmd2._key(setup, 0, "low", "student", 0)
    noise = sampler.initial_noise(key, jnp.arange(4), x0.shape[1:])
    sigma = setup.sampling.schedule.sigmas[exit_step]
    want = (1 - sigma) * jnp.repeat(x0, 2, axis=0) + sigma * noise
    np.testing.assert_allclose(batch.latents["student"]["low"]["x"], want, atol=1e-6)
    assert phases.phase(setup, "high").sigma_s == 0 and phases.phase(JOINT, "high").sigma_s == 0.75
    with pytest.raises(ValueError, match="config.data.path"):
        _collect(setup, _start(setup))


def test_draws_cover_every_exit_and_never_leave_the_expert():
    for expert, steps, (low, high) in (("high", {0, 1}, (875, 1000)), ("low", {2, 3}, (0, 875))):
        draws = [phases.draw(JOINT, step, expert, "student") for step in range(40)]
        assert {exit_step for exit_step, _ in draws} == steps
        assert draws[3] == phases.draw(JOINT, 3, expert, "student")
        t = [1000 * schedule.shift_map(u, 3.0) for _, region in draws for u in region.u]
        assert low <= round(min(t), 9) and round(max(t), 9) <= high
        assert {region.teacher for _, region in draws} == {expert}


@pytest.mark.parametrize("changes, text", [
    (dict(sampling__guidance=presets.Guidance(3.0, 1.0)), "config.dmd2.guidance"),
    (dict(sampling__solver="unipc"), "config.sampling.solver is 'unipc'"),
    (dict(dmd2__rollout="backward"), "config.dmd2.rollout is 'backward'"),
    (dict(dmd2__t_hi=1000.0), "config.dmd2.t_lo and t_hi"),
    (dict(sampling__batch=3), "config.sampling.batch = 3"),
    (dict(schedule__steps=1), "expert low has none of the 1 steps"),
    (dict(schedule__steps=1, setup__experts=("high",)), "give both experts steps"),
    (dict(roles={"teacher": presets.MODELS["wan2.2_ti2v_5b"]}), "config.roles.teacher.path"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_before_compiling(changes, text):
    with pytest.raises(ValueError, match=text):
        dmd2.check(_setup(**changes))
    dmd2.check(JOINT)


def test_several_updates_a_step_are_refused():
    config = default.get_config()
    config.updates = 2
    with pytest.raises(ValueError, match="config.updates is 2"):
        dmd2.make_config(config, {"teacher": tiny.MODEL, "critic": tiny.MODEL})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def _config(model, workdir, **changes):
    """Three steps of staged distillation of the high expert, the student moving at the second."""
    c = tiny.make_config(model, workdir, algorithm="dmd2", experts=("high",), **changes)
    c.sampling.grid, c.sampling.sigmas = "explicit", (1.0, 0.75, 0.5, 0.25)
    c.sampling.solver, c.sampling.shift = "euler", 3.0
    c.lora.targets = (r"blocks/attn1/to_q", r"blocks/ffn\.net\.2")
    c.guidance.high = c.guidance.low = 1.0
    c.group_size, c.micro_samples, c.sampling.batch = 4, 8, 8
    c.eval.prompts, c.save_every, c.keep_last = "", 1, 9
    c.dmd2.student_every, c.dmd2.ema_start = 2, 1
    c.optim.high.lr = c.roles.critic.optim.high.lr = 1e-2
    return c


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    return train.main(_config(model, tmp_path_factory.mktemp("whole")))


def _arrays(run):
    tree, _ = checkpoint.restore(run, 3, checkpoint.abstract(run, 3))
    return {path: np.asarray(leaf) for path, leaf in tree.items()}


def test_a_run_continued_from_its_first_checkpoint_ends_with_the_same_bits(whole, model, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(run / f"checkpoints/step_{step:08d}")
    shutil.rmtree(run / "export")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    assert train.main(_config(model, tmp_path)) == run
    want, got = _arrays(whole), _arrays(run)
    parts = ("trained/high", "opt/high", "ema/high", "roles/critic/trained", "roles/critic/opt")
    for part in parts:
        assert any(path.startswith(part) for path in want), part
    assert set(want) == set(got)
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)
    for name in ("dmd2/loss/high", "critic/loss/high"):
        pick = lambda run, name=name: [r[name] for r in metrics.read(run) if name in r]
        assert pick(run) == pick(whole) and len(pick(run)) == (1 if "dmd2" in name else 3)


def test_an_exported_student_is_sampled_as_it_was_trained(whole, model, tmp_path, capsys):
    """The file alone tells steps, levels, solver and guidance; the frames are the run's own."""
    (file,) = export.export(whole, "comfyui", tmp_path / "lora")
    size = ["--height", "16", "--width", "16", "--frames", "5", "--prompt", "red circle"]
    size += ["--mesh", "data=1"]  # as below, bit for bit
    sample.main(["--model", model, "--lora", str(file), "--out", str(tmp_path / "out"), *size])
    shown = capsys.readouterr().out
    assert "grid explicit, 4 steps" in shown
    assert ["2", "0.750000", "750.000", "low", "1", "ODE"] in map(str.split, shown.splitlines())
    params, loaded = setups.load_model(model)
    tree = trees.unflatten(_arrays(whole))["ema"]["high"]
    config = _config(model, tmp_path)
    config.sampling.batch = 1
    setup = setups.make(config, loaded, {"teacher": loaded, "critic": loaded})
    encode = text.Encoder(loaded, ["", "red circle"], params["text_encoder"])
    policy = {"high": (params["high"], tree), "low": (params["low"], {})}
    null = jnp.asarray(encode([""]))
    frames = sampling.generate(
        policy, params["vae"], encode(["red circle"]), null,
        model=setup.model, plan=setup.sampling, seed=0,
    )  # fmt: skip
    video.write_mp4(tmp_path / "want.mp4", frames[0], loaded.sampling.fps)
    assert (tmp_path / "want.mp4").read_bytes() == (tmp_path / "out/000.mp4").read_bytes()


def test_dry_run_prints_the_roles_and_the_step_list(model, tmp_path, capsys):
    train.main(_config(model, tmp_path), dry_run=True)
    shown = capsys.readouterr().out.splitlines()
    row = lambda start: next(line for line in shown if line.startswith(start))
    assert row("params/teacher").endswith("the student's")
    assert row("adapters/critic/high").endswith("trained")
    assert row("params/student/low").endswith("frozen")
    assert [line.split()[2] for line in shown[-5:-1]] == [
        "1000.000",
        "900.000",
        "750.000",
        "500.000",
    ]


@pytest.mark.parametrize("preset", ["", "high", "low"])
def test_recipes_have_known_keys_and_the_split_they_name(preset):
    known = default.get_config().to_dict()
    setups.check_keys(dmd2_wan21.get_config("14b").to_dict(), known)
    config = dmd2_wan22.get_config(preset)
    setups.check_keys(config.to_dict(), known)
    model = presets.MODELS["wan2.2_t2v_a14b"]
    setup = setups.make(config, model, {"teacher": model, "critic": model})
    dmd2.check(setup)
    assert setup.sampling.schedule.expert.tolist() == [1, 1, 0, 0]
    assert setup.algorithm.guidance == {"high": 4.0, "low": 3.0}


# ---- the GAN head ----

GAN = _setup(
    dmd2__student_every=2,
    dmd2__gan_weight=0.5,
    dmd2__gan_critic_weight=1.0,
    dmd2__gan_penalty=0.1,
    dmd2__divergence="js",
    setup__experts=("low",),
)


def _clips(seed=3):
    shape = (2, *sampling.latent_shape(GAN.model, GAN.sampling))
    return 2 + 0.1 * jax.random.normal(jax.random.key(seed), shape)


def _critic_steps(state, steps):
    """State and metrics after critic passes on fixed real clips."""
    history = []
    for _ in range(steps):
        batch = _only(_collect(GAN, state, _clips()), "critic")
        state, metrics = tiny.update(dmd2, state, GAN, batch)
        history.append(metrics)
        state = state.replace(step=jnp.zeros((), jnp.int32))
    return state, history


def test_gan_head_learns_to_tell_clips_apart_and_then_moves_the_student():
    start = _start(GAN)
    heads = lambda state: state.adapters["critic"]["low"][distill.HEAD]
    state, history = _critic_steps(jax.tree.map(jnp.copy, start), 25)
    first, last = history[0], history[-1]
    np.testing.assert_allclose(first["critic/gan_loss/low"], 2 * np.log(2), rtol=1e-6)
    assert first["critic/gan_penalty/low"] == 0
    assert last["critic/gan_loss/low"] < 0.3 and last["critic/gan_accuracy/low"] > 0.9
    assert not _equal(heads(state), heads(start))
    assert _equal(state.running, {"high": jnp.ones(10), "low": jnp.ones(10)})
    # the student's turn: the head stays, the ratios of its clips are small and remembered
    batch = _collect(GAN, state.replace(step=jnp.ones((), jnp.int32)), _clips())
    state = state.replace(step=jnp.ones((), jnp.int32))
    after, metrics = _update(GAN, state, _only(batch, "student"))
    assert _equal(heads(after), heads(state))
    assert metrics["dmd2/ratio/low"] < 1 and metrics["dmd2/gan/low"] > np.log(2)
    assert after.running["low"].min() < 1 and _equal(after.running["high"], jnp.ones(10))


def _gan(**changes):
    return dataclasses.replace(GAN, algorithm=dataclasses.replace(GAN.algorithm, **changes))


@functools.cache
def _students_turn():
    """State with a head that tells clips apart a little, and the batch of its student's pass."""
    state, _ = _critic_steps(_start(GAN), 3)
    state = state.replace(step=jnp.ones((), jnp.int32))
    return state, _only(_collect(GAN, state, _clips()), "student")


def test_gan_gradient_is_added_to_the_students_and_fools_the_head():
    state, batch = _students_turn()
    moved = []
    for weight in (1e-9, 0.5, 1e4):
        after, metrics = _update(_gan(gan_weight=weight), state, batch)
        moved.append((after, metrics))
    assert not _equal(moved[0][0].adapters, moved[1][0].adapters)
    assert moved[0][1]["grad_norm/low"] != moved[1][1]["grad_norm/low"]
    again = moved[2][0].replace(step=state.step)  # the last step was the GAN's alone
    _, metrics = _update(_gan(gan_weight=1e4), again, batch)
    assert metrics["dmd2/gan/low"] < moved[2][1]["dmd2/gan/low"]


def test_the_divergence_weights_a_clip_by_its_ratio():
    """Of one clip: reverse KL has weight 1, KL r, and the loss the square of it."""
    state, batch = _students_turn()
    batch = dataclasses.replace(
        batch, latents=jax.tree.map(lambda x: x[:1], batch.latents), ctx_PSE=batch.ctx_PSE[:1]
    )
    found = {k: _update(_gan(divergence=k), state, batch)[1] for k in ("rkl", "kl")}
    r, plain = (float(found["rkl"][f"dmd2/{name}/low"]) for name in ("ratio", "loss"))
    assert abs(r - 1) > 0.01 and plain > 0
    np.testing.assert_allclose(found["kl"]["dmd2/loss/low"], r**2 * plain, rtol=1e-4)


# heads on the critics of both experts; metrics come per micro-batch, of two clips
HEADS = _setup(
    dmd2__rollout="data_latent",
    dmd2__guidance={"high": 3.0, "low": 3.0},
    dmd2__micro_samples=2,
    dmd2__gan_weight=0.1,
    dmd2__gan_critic_weight=2.0,
    dmd2__gan_penalty=3.0,
    dmd2__divergence="js",
)


@functools.cache
def _heads():
    """A state of HEADS in which student, critic, heads and running means are anywhere, and its
    batch."""
    running = dict.fromkeys(BOTH, jnp.linspace(0.5, 2.0, 10))
    state = _moved(HEADS).replace(running=running)
    return state, _collect(HEADS, state, _clips())


def _taken(expert, name):
    """(gradient of an expert's pass without the scales, its metrics, running means after it)."""
    state, batch = _heads()
    role = "student" if name == "student" else "critic"
    copy = jax.tree.map(jnp.copy, state)
    after, metrics = dmd2._take(copy, HEADS, batch, expert, name)
    moments = optax.tree_utils.tree_get(states.optimizers(after, role)[expert], "mu")
    norm = max(1.0, *(v for k, v in metrics.items() if "grad_norm" in k))  # clipped to 1
    return jax.tree.map(lambda m: norm * m / 0.1, moments), metrics, after.running


def _assert_gradient(got, want):
    want = [x for path, x in trees.flatten(want).items() if not path.endswith("/scale")]
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * np.abs(b).max())


def _head_logits(base, critic, x_t, t_B, ctx):
    """Logits [B, L] of a critic's head on its last block, the only one tapped of two."""
    head = critic[distill.HEAD]
    (h,) = wan.features(base, critic, x_t, t_B, ctx, config=tiny.WAN, layers=(1,))
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
    h = jax.nn.silu(h @ head["hidden"]["kernel"][0] + head["hidden"]["bias"][:, None])
    return h @ head["out"]["kernel"][0] + head["out"]["bias"][0]


@ENDS
def test_gan_gradient_and_ratio_weights_are_those_of_the_heads_logits(expert, sigma_s):
    """Both parts of the student's gradient, in which each clip has its own js weight, then loss and
    ratio pair by pair, and the running means that ratios are divided by."""
    state, batch = _heads()
    exit_step, _ = phases.draw(JOINT, 1, expert, "student")
    sigma = float(JOINT.sampling.schedule.sigmas[exit_step])
    x, base = batch.latents["student"][expert]["x"], state.params["student"][expert]

    @jax.jit
    def oracle(student, critic, ctx, null):
        t = jnp.full(4, 1000 * sigma)
        x0, pull = jax.vjp(lambda a: x - sigma * _denoise(base, a, x, t, ctx), student)

        def gan(x0):
            t_B, x_t, g = _compared(expert, sigma_s, base, critic, x0, x, sigma, ctx, null)
            logit_BL = _head_logits(base, critic, x_t, t_B, ctx)
            return jnp.log1p(jnp.exp(-logit_BL)).mean(), (t_B, logit_BL, g)

        push, (t_B, logit_BL, g) = jax.grad(gan, has_aux=True)(x0)
        ratio_B = jnp.exp(logit_BL.mean(1)) / jnp.linspace(0.5, 2.0, 10)[(t_B // 100).astype(int)]
        g = g * (ratio_B / (1 + ratio_B)).reshape(4, 1, 1, 1, 1)
        return t_B, logit_BL, ratio_B, g, *pull(g / g.size), *pull(0.1 * push)

    null = jnp.broadcast_to(batch.uncond_1SE, _contexts(batch).shape)
    adapters = (state.adapters[name][expert] for name in ("default", "critic"))
    t_B, logit_BL, ratio_B, g, scores, gan = oracle(*adapters, _contexts(batch), null)
    gradient, metrics, running = _taken(expert, "student")
    _assert_gradient(gradient, jax.tree.map(jnp.add, scores, gan))
    assert 0.1 < optax.tree.norm(gan) / optax.tree.norm(scores) < 10
    assert np.ptp(ratio_B) > 0.1 and np.abs(logit_BL.mean(1)).max() < 5
    found = [metrics[f"dmd2/{name}/{expert}"] for name in ("ratio", "loss", "gan")]
    want = ratio_B, 0.5 * jnp.square(g).mean((1, 2, 3, 4)), np.log1p(np.exp(-logit_BL)).mean(1)
    np.testing.assert_allclose(found, np.reshape(want, (3, 2, 2)).mean(2), rtol=2e-4)
    mean_N = np.linspace(0.5, 2.0, 10)
    for n in range(10):  # the mean of a bin's own ratios goes into its running mean
        if any(own := (t_B // 100) == n):
            mean_N[n] = 0.99 * mean_N[n] + 0.01 * np.exp(logit_BL.mean(1))[own].mean()
    np.testing.assert_allclose(running[expert], mean_N, rtol=1e-5)


@ENDS
def test_critic_gradient_has_the_gan_loss_and_the_penalty_on_real_clips(expert, sigma_s):
    """Real clips by way of σ_s at the levels of the made ones, and R1 as the squared change of
    their logits when they get 0.1·ε."""
    state, batch = _heads()
    base, made = state.params["student"][expert], batch.latents["critic"][expert]
    t_B, _, x_t, target = _noised(expert, "critic", made["x"], sigma_s)
    draw = lambda purpose: sampler.initial_noise(
        dmd2._key(JOINT, 1, expert, "critic", purpose), jnp.arange(4), x_t.shape[1:]
    )
    real_s = (1 - sigma_s) * made["real"] + sigma_s * draw(3)
    _, _, real_t, _ = _noised(expert, "critic", real_s, sigma_s, noise=4)
    clips = x_t, real_t, real_t + 0.1 * draw(5)

    @jax.jit
    def oracle(critic):
        v = _denoise(base, critic, x_t, t_B, _contexts(batch))
        fake, real, shaken = (_head_logits(base, critic, x, t_B, _contexts(batch)) for x in clips)
        gan = jnp.log1p(jnp.exp(fake)).mean() + jnp.log1p(jnp.exp(-real)).mean()
        loss, penalty = jnp.square(v - target).mean(), jnp.square(real - shaken).mean()
        return loss + 2.0 * (gan + 3.0 * penalty), (loss, gan, penalty)

    want, values = jax.grad(oracle, has_aux=True)(state.adapters["critic"][expert])
    gradient, metrics, _ = _taken(expert, "critic")
    _assert_gradient(gradient, want)
    found = [metrics[f"critic/{n}/{expert}"].mean() for n in ("loss", "gan_loss", "gan_penalty")]
    np.testing.assert_allclose(found, values, rtol=1e-4)


def test_gan_does_not_depend_on_micro_batches_and_resumes():
    state, _ = _critic_steps(_start(GAN), 2)
    state = state.replace(step=jnp.ones((), jnp.int32))
    batch = _collect(GAN, state, _clips())
    split = dataclasses.replace(GAN, algorithm=dataclasses.replace(GAN.algorithm, micro_samples=3))
    (one, _), (two, _) = (_update(setup, state, batch) for setup in (GAN, split))
    _close(one.running, two.running, 1e-6)
    _close(one.adapters, two.adapters, 1e-3)
    kept = states.saved(one, GAN.training)
    again = states.with_saved(_start(GAN), GAN.training, kept)
    assert _equal(again, one)


def test_gan_with_full_weights_trains_the_critics_own_tree():
    setup = tiny.replace_training(GAN, rank=0)
    state = _start(setup)
    batch = _only(_collect(setup, state, _clips()), "critic")
    after, metrics = _update(setup, state, batch)
    assert metrics["critic/gan_loss/low"] > 0
    assert not _equal(
        after.params["critic"]["low"][distill.HEAD], state.params["critic"]["low"][distill.HEAD]
    )
    assert _equal(after.params["student"], state.params["student"])


def test_gan_needs_clips_and_known_words():
    with pytest.raises(ValueError, match="set config.data.path to cached clips"):
        _collect(GAN, _start(GAN))
    wrong = dataclasses.replace(GAN.algorithm, divergence="tv")
    with pytest.raises(ValueError, match="config.dmd2.divergence is 'tv'"):
        dmd2.check(dataclasses.replace(GAN, algorithm=wrong))


def test_gan_head_is_refused_under_a_pipeline_before_anything_runs():
    with sharding.use_mesh(sharding.make_mesh({"stage": 2, "data": 4})):
        with pytest.raises(ValueError, match="mesh.stage = 2 splits them; set config"):
            _start(GAN)
