"""The training state: roles and adapters beside the student, what is saved, and what is told."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from wanjax import state as states
from wanjax import trees
from wanjax.parallel import sharding

BOTH = ("high", "low")


def _setup(rank):
    setup = tiny.make_setup(lora__rank=rank, lora__targets=(r"blocks/attn1/to_q",))
    roles = {"teacher": tiny.MODEL, "critic": tiny.MODEL}
    setup = tiny.replace_training(setup, role="critic", optim={"high": tiny.adamw()})
    return dataclasses.replace(setup, roles=roles)


def _base(seed=0):
    params = tiny.parameters(seed)
    return {expert: params[expert] for expert in BOTH}


def _state(setup, **roles):
    state = states.init(jax.random.key(0), setup.training, _base(), keep_reference=False)
    for role in ("teacher", "critic"):
        state = states.with_role(jax.random.key(1), state, setup.training, role, roles.get(role))
    return state


def _equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_with_adapters_roles_share_the_base_and_a_trained_one_adds_its_adapter():
    setup = _setup(2)
    state = _state(setup)
    assert set(state.params) == {"student"} and set(state.adapters) == {"default", "critic"}
    assert states.base(state, "teacher") is state.params["student"]
    assert set(state.adapters["critic"]) == set(state.role_opt["critic"]) == {"high"}
    assert not _equal(state.adapters["critic"]["high"], state.adapters["default"]["high"])
    policy = states.role_params(state, "critic")
    assert policy["high"][1] is state.adapters["critic"]["high"] and policy["low"][1] == {}
    assert states.role_params(state, "teacher")["high"][1] == {}


def test_what_is_trained_is_split_over_the_mesh_and_stays_the_same():
    state = _state(_setup(2))
    state = states.average(state, "ema", state.adapters["default"])
    mesh = sharding.make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    placed = states.place(state, mesh)
    assert _equal(placed, state)
    module = lambda tree: tree["high"]["blocks"]["attn1"]["to_q"]
    ways = lambda x: x.size // x.addressable_shards[0].data.size
    for name in ("default", "critic", "ema"):
        low_rank = module(placed.adapters[name])
        assert (ways(low_rank["a"]), ways(low_rank["b"]), ways(low_rank["scale"])) == (4, 8, 1)
    for opt in (placed.opt, placed.role_opt["critic"]):
        big = [x for x in jax.tree.leaves(opt["high"]) if x.ndim == 3]
        assert big and {ways(x) for x in big} <= {4, 8}
    where = states.shardings(placed, mesh).params["student"]
    kernel = jax.device_put(module(placed.params["student"])["kernel"], module(where)["kernel"])
    assert ways(kernel) == 8


def test_with_full_weights_roles_have_copies_or_the_weights_given():
    setup = _setup(0)
    state = _state(setup, teacher=_base(1))
    assert _equal(state.params["teacher"], _base(1)) and _equal(state.params["critic"], _base())
    moved = {"high": jax.tree.map(lambda x: x + 1, state.params["critic"]["high"])}
    after = states.replace_trainable(state, setup.training, moved, "critic")
    assert _equal(states.trainable(after, setup.training, "critic"), moved)
    assert _equal(after.params["student"], state.params["student"])
    assert set(states.trainable(after, setup.training)) == set(BOTH)


@pytest.mark.parametrize("rank", [2, 0])
def test_saving_covers_every_trained_role_and_its_optimizer(rank):
    setup = _setup(rank)
    fresh = _state(setup)
    state = states.average(fresh, "ema", states.trainable(fresh, setup.training))
    stir = lambda tree: jax.tree.map(lambda x: x + 1, tree)
    for role in ("student", "critic"):
        state = states.replace_trainable(
            state, setup.training, stir(states.trainable(state, setup.training, role)), role
        )
        state = states.replace_optimizers(state, stir(states.optimizers(state, role)), role)
    state = states.average(state, "ema", stir(states.averaged(state, "ema")))
    state = state.replace(step=jnp.int32(5))
    saved = states.saved(state, setup.training)
    again = states.with_saved(fresh, setup.training, saved)
    assert jax.tree.structure(again) == jax.tree.structure(state) and _equal(again, state)
    flat = trees.flatten(saved)
    assert any(path.startswith("roles/critic/trained/high") for path in flat)
    assert not any(
        "teacher" in path or path.startswith("roles/critic/trained/low") for path in flat
    )


def test_an_adapter_to_start_from_is_trained_or_kept():
    setup = tiny.make_setup(
        lora__rank=2, lora__targets=(r"blocks/attn1/to_q",), setup__experts=("low",)
    )
    state = _state(setup)
    state = states.average(state, "ema", states.trainable(state, setup.training))
    both = tiny.make_setup(lora__rank=2, lora__targets=(r"blocks/attn1/to_q",))
    start = states.init(jax.random.key(9), both.training, _base(), keep_reference=False).adapters[
        "default"
    ]
    state = states.start_from(state, setup.training, start)
    assert _equal(states.trainable(state, setup.training), {"low": start["low"]})
    assert _equal(states.averaged(state, "ema"), {"low": start["low"]})
    for name in ("default", "ema"):
        assert _equal(states.rollout_params(state, name)["high"][1], start["high"])


def test_the_table_tells_who_is_trained_and_who_shares():
    setup = _setup(2)
    table = states.describe(_state(setup), setup.training, setup.roles).splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in table}
    assert rows["adapters/critic/high"] == rows["adapters/default/low"] == "trained"
    assert rows["params/student/high"] == "frozen" and rows["params/teacher"] == "student's"
    setup = _setup(0)
    full = states.describe(_state(setup), setup.training, setup.roles).splitlines()
    rows = {line.split()[0]: line.split()[-1] for line in full}
    assert rows["params/critic/high"] == rows["params/student/low"] == "trained"
    assert rows["params/critic/low"] == rows["params/teacher/high"] == "frozen"
