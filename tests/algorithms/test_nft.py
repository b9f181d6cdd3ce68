"""DiffusionNFT on a random two-expert model: the invariants of old, ema, routing and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from tests import tiny
from wanjax import sampler, sampling, schedule, trees
from wanjax import state as states
from wanjax.algorithms import Tools, nft
from wanjax.data import Item
from wanjax.losses import awm, flow
from wanjax.losses import nft as losses
from wanjax.models import presets, wan
from wanjax.parallel import sharding
from wanjax.run import checkpoint


def _setup(**changes):
    changes = {"sampling__guidance": presets.Guidance(1.0, 1.0), **changes}
    setup = tiny.make_setup(**{k: v for k, v in changes.items() if not k.startswith("nft__")})
    fields = dict(group_size=4, prompts_per_step=2, micro_samples=4)
    fields["kl_beta"] = {"high": 1e-4, "low": 1e-4}
    fields |= {k.removeprefix("nft__"): v for k, v in changes.items() if k.startswith("nft__")}
    return tiny.shared(dataclasses.replace(setup, algorithm=tiny.algorithm_config(nft, **fields)))


def awm_settings(**changes):
    """The settings of AWM by configs/default.py with some changed."""
    return awm.Settings(**default.get_config().awm.to_dict() | changes)


def _start(setup):
    params = tiny.parameters()
    return nft.init(jax.random.key(0), setup, {"student": {e: params[e] for e in ("high", "low")}})


def _collect(setup, state):
    ctx, uncond = tiny.contexts()
    vae = tiny.parameters()["vae"]
    return nft.collect(state, setup, Item(["a", "b"], ctx), Tools(vae, uncond, tiny.mean_reward))


def _stir(tree, scale=0.3):
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    moved = [x + scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, moved)


def _equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    same = lambda x, y: np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype
    return all(same(x, y) for x, y in pairs)


@pytest.mark.parametrize("rank", [2, 0])
def test_old_and_ema_start_as_exact_copies(rank):
    setup = _setup(lora__rank=rank)
    state = _start(setup)
    for name in ("old", "ema"):
        assert _equal(states.averaged(state, name), states.trainable(state, setup.training))


def test_experts_in_host_memory_take_the_same_steps():
    setup = _setup(nft__kl_beta={"high": 0.1, "low": 0.1})
    start, found = _start(setup), []
    for params in (start.params, sharding.to_host(start.params)):
        state = start.replace(params=params, opt=jax.tree.map(jnp.copy, start.opt))
        found.append(tiny.update(nft, state, setup, _collect(setup, state)))
    assert _equal(found[0], found[1])


@pytest.mark.parametrize("loss, rank", [("nft", 2), ("awm", 2), ("dpo", 2), ("nft", 0)])
def test_a_restored_state_takes_the_same_step_bit_for_bit(tmp_path, loss, rank):
    """Both experts with moments, old and ema that differ from what is trained; KL with full weights
    is 0 at the start and not after it."""
    own = dict(nft__loss=loss, nft__kl_beta={"high": 0.1, "low": 0.1})
    setup = _setup(lora__rank=rank, **own, nft__micro_samples=2 if loss == "dpo" else 4)
    state, metrics = tiny.update(nft, _start(setup), setup, _collect(setup, _start(setup)))
    for name in ("old", "ema"):
        state = states.average(state, name, _stir(states.averaged(state, name), 0.1))
    checkpoint.save(tmp_path, 1, states.saved(state, setup.training), {})
    fresh = _start(setup)
    tree, _ = checkpoint.restore(tmp_path, 1, states.saved(fresh, setup.training))
    back = states.with_saved(fresh, setup.training, tree)
    assert _equal(states.saved(back, setup.training), states.saved(state, setup.training))
    assert _equal(states.averaged(back, "old"), states.averaged(state, "old"))
    ends = [tiny.update(nft, s, setup, _collect(setup, s)) for s in (state, back)]
    assert _equal(
        states.saved(ends[0][0], setup.training), states.saved(ends[1][0], setup.training)
    )
    assert _equal(ends[0][1], ends[1][1])
    if loss == "nft":
        for expert in ("high", "low"):
            assert metrics[f"nft/kl/{expert}"] == 0 and ends[0][1][f"nft/kl/{expert}"] > 0


REMAT = dataclasses.replace(tiny.MODEL, wan=dataclasses.replace(tiny.WAN, remat="full"))


@pytest.mark.parametrize("loss", nft.LOSSES)
def test_a_step_depends_neither_on_micro_batches_nor_on_the_mesh(loss):
    """Adam's first moments, leaf by leaf, and every mean over samples, for both experts; old and
    the reference are elsewhere than the trained policy."""
    own = dict(nft__loss=loss, nft__kl_beta={"high": 0.1, "low": 0.1}, nft__micro_samples=2)
    state, batch = _start(_setup()), _collect(_setup(), _start(_setup()))
    moved = _stir(states.trainable(state, _setup().training), 0.1)
    state = states.replace_trainable(state, _setup().training, moved)
    state = states.average(state, "old", _stir(moved, 0.1))
    other = "v_rms/", "norm_ratio/", "_std/", "_min/", "_max/", "start/"  # not means over samples

    def step(mesh=None, **changes):
        setup = _setup(**own | changes)
        with sharding.use_mesh(mesh):
            copy = jax.tree.map(jnp.copy, state)
            after, metrics = tiny.update(
                nft, states.place(copy, mesh) if mesh else copy, setup, batch
            )
        moments = [np.asarray(x) for x in jax.tree.leaves(after.opt) if x.ndim > 1]
        return moments, {k: v for k, v in metrics.items() if not any(n in k for n in other)}

    want, means = step()
    for expert in ("high", "low"):
        assert means[f"grad_norm/{expert}"] > 1e-3 and f"{loss}/loss/{expert}" in means
    mesh = sharding.make_mesh(dict(fsdp=2, context=2, tensor=2))
    uneven = dict(nft__micro_samples=1 if loss == "dpo" else 3, nft__mix_experts=True)
    cuts = [uneven, dict(mesh=mesh, nft__micro_steps=2)]
    cuts += [dict(model=REMAT)] if loss == "nft" else []
    for got, found in (step(**cut) for cut in cuts):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * np.abs(b).max() + 1e-12)
        assert found.keys() == means.keys()
        for name, value in means.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


def test_rollouts_follow_old_and_not_the_trained_policy():
    setup = _setup()
    state = _start(setup)
    base = _collect(setup, state).x0_B
    trained = states.replace_trainable(
        state, setup.training, _stir(states.trainable(state, setup.training))
    )
    np.testing.assert_array_equal(_collect(setup, trained).x0_B, base)
    moved = states.average(state, "old", _stir(states.averaged(state, "old")))
    assert not np.allclose(_collect(setup, moved).x0_B, base, atol=1e-3)


def _rollout_inputs(setup, state):
    """Velocities of `old` on the clips of a step, their first noise, its key and their numbers."""
    key, ids = jax.random.fold_in(jax.random.key(setup.seed), int(state.step)), jnp.arange(8)
    ctx, uncond = tiny.contexts()
    policy = states.rollout_params(state, "old")
    model, plan = setup.model, setup.sampling
    velocities = sampling.velocities(
        policy, jnp.repeat(ctx, 4, axis=0), uncond, config=model.wan, plan=plan
    )
    noise = sampler.initial_noise(key, ids, sampling.latent_shape(model, plan))
    return velocities, noise, key, ids


def test_rollouts_take_the_solver_of_the_run():
    setup = _setup(sampling__solver="unipc")
    state = _start(setup)
    state = states.average(state, "old", _stir(states.averaged(state, "old")))
    velocities, noise, _, _ = _rollout_inputs(setup, state)
    got, plan = _collect(setup, state).x0_B, setup.sampling.schedule
    want = sampler.sample(velocities, noise, plan, solver="unipc")
    np.testing.assert_allclose(got, want, atol=2e-5)
    euler = sampler.sample(velocities, noise, plan, solver="euler")
    assert not np.allclose(got, euler, atol=1e-2)


def test_rollouts_may_be_stochastic_and_then_are_those_of_the_sampler():
    setup = _setup(nft__sde=True, strategy__name="window", strategy__window=3)
    nft.check(setup)
    state = _start(setup)
    for epoch in (0, 1):
        state = state.replace(step=jnp.int32(epoch))
        got = _collect(setup, state).x0_B
        velocities, noise, key, ids = _rollout_inputs(setup, state)
        plan, strategy = setup.sampling.schedule, setup.sde.strategy
        steps = schedule.sde_steps(plan, strategy, epoch=epoch, seed=setup.seed)
        want, _ = sampler.rollout(
            velocities, noise, key, ids, plan, schedule.slot_table(plan, steps),
            slots=3, kind="flow", eta=setup.sde.eta, solver="euler",
        )  # fmt: skip
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert not np.allclose(got, _collect(_setup(), state).x0_B, atol=1e-2)
    with pytest.raises(ValueError, match="sde.kind is 'ode'"):
        nft.check(_setup(nft__sde=True, sde__kind="ode"))


def test_evaluation_reads_ema():
    setup = _setup()
    state = _start(setup)
    state = states.average(state, "ema", _stir(states.averaged(state, "ema")))
    policy = states.rollout_params(state, nft.EVALUATED)
    assert _equal(policy["low"][1], states.averaged(state, "ema")["low"])


@pytest.mark.parametrize("kind", [0, 1])
def test_old_and_ema_follow_their_decays(monkeypatch, kind):
    """old after the rollout's last optimizer step, ema after each of the two."""
    setup, trained, follow = _setup(nft__old_decay=kind, nft__updates=2), [], nft._follow

    def spy(state, setup, name, decay):
        if name == "ema":
            trained.append(jax.tree.map(jnp.copy, states.trainable(state, setup.training)))
        return follow(state, setup, name, decay)

    monkeypatch.setattr(nft, "_follow", spy)
    state = _start(setup)
    state = states.average(state, "old", _stir(states.averaged(state, "old")))
    before, ema = states.averaged(state, "old"), states.averaged(state, "ema")
    after, metrics = tiny.update(nft, state, setup, _collect(setup, state))
    decay = float(losses.old_decay(2, kind))
    assert metrics["nft/old_decay"] == decay
    want = trees.lerp(states.trainable(after, setup.training), before, decay)
    assert _equal(states.averaged(after, "old"), want)
    if kind == 0:
        assert _equal(states.averaged(after, "old"), states.trainable(after, setup.training))
    assert len(trained) == 2 and not _equal(*trained)
    for taken, tree in enumerate(trained, 1):
        ema = trees.lerp(tree, ema, min((1 + taken) / (10 + taken), 0.9))
    for got, want in zip(*map(jax.tree.leaves, (states.averaged(after, "ema"), ema)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _written_out(setup, state, batch, expert):
    """Loss and gradient norm of an expert's only micro-batch, from velocities of the model."""
    config, scale = setup.algorithm, getattr(setup.sampling.guidance, expert)
    levels = nft._noised(batch, setup=setup)[expert]
    sigma, t = levels["sigma_UT"][:, 0], levels["t_UT"][:, 0]
    noise = sampler.initial_noise(levels["key"], jnp.arange(8), batch.x0_B.shape[1:])
    x_t = flow.add_noise(batch.x0_B, noise, sigma)

    def velocity(adapter):
        run = lambda text: wan.denoise(
            state.params["student"][expert], adapter, x_t, t, text, config=setup.model.wan
        )
        u = run(jnp.broadcast_to(batch.uncond_1SE, _contexts(setup, batch).shape))
        return u + scale * (run(_contexts(setup, batch)) - u)

    old, ema = (velocity(states.averaged(state, name)[expert]) for name in ("old", "ema"))
    base = velocity({})
    given = dict(adv_clip_max=config.adv_clip_max, kl_beta=config.kl_beta[expert])

    def total(adapter):
        v, adv = velocity(adapter), batch.adv_B
        if config.loss == "awm":
            alone = dataclasses.replace(config.awm, ema_kl_beta=0.0)
            rest = awm.awm_loss(
                v, old, base, None, batch.x0_B, noise, sigma, adv, settings=alone, **given
            )[0]
            return rest + 0.3 * jnp.square(v - ema).mean()
        given_nft = dict(nft_beta=config.beta, mode=config.mode)
        return losses.nft_loss(v, old, base, batch.x0_B, x_t, sigma, adv, **given, **given_nft)[0]

    value, gradient = jax.value_and_grad(total)(states.trainable(state, setup.training)[expert])
    pairs = [x for path, x in trees.flatten(gradient).items() if path[-2:] in ("/a", "/b")]
    return value, np.sqrt(sum(np.square(x).sum() for x in pairs))


@pytest.mark.parametrize("loss, scales", [("nft", (1, 1)), ("nft", (3, 2)), ("awm", (1, 1))])
def test_an_update_is_the_loss_of_trained_old_ema_and_base_velocities(loss, scales):
    """The four policies differ, and so do the experts' penalties and guidance; NFT reads no ema."""
    setup = _setup(
        nft__loss=loss, nft__kl_beta={"high": 0.1, "low": 0.2}, nft__micro_samples=8,
        nft__awm=awm_settings(ema_kl_beta=0.3),
        nft__timesteps=1, nft__train_guidance=True,
        sampling__guidance=presets.Guidance(*map(float, scales)),
    )  # fmt: skip
    state = _start(setup)
    batch = _collect(setup, state)
    state = states.replace_trainable(
        state, setup.training, _stir(states.trainable(state, setup.training), 0.1)
    )
    for name, scale in (("old", 0.2), ("ema", 0.3)):
        state = states.average(state, name, _stir(states.averaged(state, name), scale))
    want = {expert: _written_out(setup, state, batch, expert) for expert in ("high", "low")}
    _, metrics = tiny.update(nft, state, setup, batch)
    for expert, (value, norm) in want.items():
        np.testing.assert_allclose(metrics[f"{loss}/loss/{expert}"], value, rtol=2e-4)
        np.testing.assert_allclose(metrics[f"grad_norm/{expert}"], norm, rtol=1e-3)


def test_constant_rewards_move_nothing_without_kl_and_real_ones_do():
    setup = _setup(nft__kl_beta={"high": 0.0, "low": 0.0})
    state = _start(setup)
    batch = _collect(setup, state)
    flat = nft.Batch(**{**vars(batch), "adv_B": jnp.zeros_like(batch.adv_B)})
    _, metrics = tiny.update(nft, state, setup, flat)
    assert float(metrics["grad_norm/high"]) <= 1e-6 and float(metrics["grad_norm/low"]) <= 1e-6
    state = _start(setup)
    _, metrics = tiny.update(nft, state, setup, batch)
    assert float(metrics["grad_norm/high"]) > 1e-3 and float(metrics["grad_norm/low"]) > 1e-3


@pytest.mark.parametrize("experts", [("high",), ("low",)])
def test_only_the_trained_expert_gets_state_and_gradient(experts):
    setup = _setup(setup__experts=experts)
    state = _start(setup)
    assert set(state.opt) == set(experts) == set(state.adapters["old"])
    before = jax.tree.map(np.asarray, state.params)
    after, metrics = tiny.update(nft, state, setup, _collect(setup, state))
    assert {name.rsplit("/", 1)[1] for name in metrics if name.startswith("grad_norm")} == set(
        experts
    )
    assert _equal(after.params, before)


def test_timesteps_lie_inside_the_expert_that_is_trained():
    setup = _setup(nft__timesteps=2)
    state = _start(setup)
    data = nft._noised(_collect(setup, state), setup=setup)
    assert data["high"]["t_UT"].shape == (8, 2)
    assert float(data["high"]["t_UT"].min()) >= 875.0 > float(data["low"]["t_UT"].max())
    assert float(data["low"]["t_UT"].min()) > 0


def _contexts(setup, batch):
    """One context per sample."""
    return jnp.repeat(batch.ctx_PSE, setup.algorithm.group_size, axis=0)


def _errors(setup, state, batch, expert):
    """Flow-matching error [B] of the trained policy at the levels that an update trains on."""
    data = nft._noised(batch, setup=setup)
    sigma, t = data[expert]["sigma_UT"][:, 0], data[expert]["t_UT"][:, 0]
    ids = jnp.arange(len(t)) * setup.algorithm.timesteps
    noise = sampler.initial_noise(data[expert]["key"], ids, batch.x0_B.shape[1:])
    policy = states.rollout_params(state)[expert]
    run = sampling.velocity(
        policy, _contexts(setup, batch), batch.uncond_1SE, config=setup.model.wan,
        scale=getattr(setup.sampling.guidance, expert), mode=setup.sampling.guidance_mode,
    )  # fmt: skip
    v = run(flow.add_noise(batch.x0_B, noise, sigma), t)
    return np.asarray(flow.flow_error(v, batch.x0_B, noise))


def test_an_update_fits_good_samples_and_unfits_bad_ones():
    """The policy gradient is (2r − 1) times flow matching: errors move against the advantage."""
    setup = _setup(nft__kl_beta={"high": 0.0, "low": 0.0}, nft__timesteps=1, optim__lr=3e-3)
    state = _start(setup)
    batch = _collect(setup, state)
    good = np.arange(8) % 2 == 0
    batch = nft.Batch(**{**vars(batch), "adv_B": jnp.where(jnp.asarray(good), 3.0, -3.0)})
    before = {e: _errors(setup, state, batch, e) for e in ("high", "low")}
    step = state.step
    for _ in range(5):
        state, _ = tiny.update(nft, state.replace(step=step), setup, batch)
    for expert, old in before.items():
        change = _errors(setup, state, batch, expert) - old
        assert change[good].mean() < 0 < change[~good].mean(), (expert, change)


AWM = dict(nft__loss="awm", nft__awm=awm_settings(ema_kl_beta=1.0), nft__old_decay=0)
DPO = dict(nft__loss="dpo", nft__micro_samples=2)


def _repeat_update(rank, **changes):
    """Five updates on one batch with samples 1 and 7 good, 2 and 4 bad; returns
    (setup, states before and after, batch, last metrics)."""
    beta, lr = {"high": 0.0, "low": 0.0}, 3e-3 if rank else 3e-4
    setup = _setup(**changes, nft__kl_beta=beta, nft__timesteps=1, optim__lr=lr, lora__rank=rank)
    first = state = _start(setup)
    adv = jnp.asarray([0.0, 3.0, -3.0, 0.0, -3.0, 0.0, 0.0, 3.0])
    batch = nft.Batch(**{**vars(_collect(setup, state)), "adv_B": adv})
    for _ in range(5):
        state, metrics = tiny.update(nft, state.replace(step=first.step), setup, batch)
    return setup, first, state, batch, metrics


@pytest.mark.parametrize("rank", [2, 0])
def test_awm_fits_good_samples_and_unfits_bad_ones(rank):
    setup, before, after, batch, metrics = _repeat_update(rank, **AWM)
    assert float(metrics["awm/ema_kl/low"]) > 0
    for expert in ("high", "low"):
        change = _errors(setup, after, batch, expert) - _errors(setup, before, batch, expert)
        assert change[batch.adv_B > 0].mean() < 0 < change[batch.adv_B < 0].mean()


def test_dpo_prefers_the_best_sample_of_each_prompt_to_its_worst():
    setup, _, _, batch, metrics = _repeat_update(2, **DPO)
    data = nft._noised(batch, setup=setup)
    assert data["win_U"].tolist() == [1, 7] and data["lose_U"].tolist() == [2, 4]
    assert data["high"]["t_UT"].shape == (2, 1)
    for expert in ("high", "low"):
        assert float(metrics[f"dpo/accuracy/{expert}"]) == 1
        win, lose = (float(metrics[f"dpo/error_change_{n}/{expert}"]) for n in ("win", "lose"))
        assert win < lose


def test_a_dpo_pair_without_spread_has_no_gradient():
    setup = _setup(**DPO)
    state = _start(setup)
    batch = _collect(setup, state)
    flat = nft.Batch(**{**vars(batch), "adv_B": jnp.zeros_like(batch.adv_B)})
    _, metrics = tiny.update(nft, state, setup, flat)
    assert float(metrics["grad_norm/high"]) == float(metrics["grad_norm/low"]) == 0.0
    np.testing.assert_allclose(float(metrics["dpo/loss/high"]), np.log(2), rtol=1e-6)


def test_a_batch_of_another_policy_is_refused():
    setup = _setup()
    state = _start(setup)
    batch = _collect(setup, state)
    with pytest.raises(ValueError, match="batch of policy 0 given to policy 1"):
        tiny.update(nft, state.replace(step=state.step + 1), setup, batch)


@pytest.mark.parametrize("changes, text", [
    (dict(sampling__guidance=presets.Guidance(3.0, 1.0)), "config.nft.train_guidance"),
    (dict(nft__mode="some"), "config.nft.mode is 'some'"),
    (dict(nft__old_decay=7), "config.nft.old_decay is 7"),
    (dict(nft__timesteps=5), "config.nft.timesteps is 5 but expert high has 2"),
    (dict(nft__loss="ppo"), "config.nft.loss is 'ppo'"),
    (dict(nft__loss="awm", nft__awm=awm_settings(weighting="x")), "config.awm.weighting is 'x'"),
])  # fmt: skip
def test_settings_that_cannot_run_are_refused_before_compiling(changes, text):
    with pytest.raises(ValueError, match=text):
        nft.check(_setup(**changes))


def test_forwards_are_counted_by_hand():
    # 8 samples at 2 levels of each expert: new (3), old and, with KL, reference
    setup = _setup(nft__kl_beta={"high": 0.0, "low": 0.1})
    assert nft.forwards(setup) == {"collect": 8 * 6, "update": 8 * 2 * (4 + 5)}
    pairs = nft.forwards(_setup(**DPO))  # both clips of 2 pairs: new (3) and reference
    assert pairs == {"collect": 8 * 6, "update": 2 * 2 * 2 * (4 + 4)}
