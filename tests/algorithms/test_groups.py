"""Scored groups: shares of a step, forwards, and the shapes that the planner gets."""

import jax
import numpy as np
import pytest

from tests import tiny
from wanjax.algorithms import Tools, groups, grpo
from wanjax.data import Item


def test_shares_are_a_partition_that_depends_on_seed_and_version_alone():
    setup = tiny.make_setup(algorithm__updates=2)
    parts = groups.shares(setup, 5, np.arange(8))
    assert [len(p) for p in parts] == [4, 4] and sorted(np.concatenate(parts)) == [*range(8)]
    assert all((np.diff(part) > 0).all() for part in parts)
    again = groups.shares(setup, 5, np.arange(8))
    assert all(map(np.array_equal, parts, again))
    other = groups.shares(setup, 6, np.arange(8))
    assert not all(map(np.array_equal, parts, other))


def test_forwards_of_a_rollout_count_guidance_by_expert():
    """Six steps at shift 3: two of the high expert with guidance, four of the low one."""
    setup = tiny.make_setup()
    high = setup.sampling.schedule.high_steps
    assert groups.rollout_forwards(setup) == 2 * 6
    one = tiny.replace_sampling(setup, guidance=type(setup.sampling.guidance)(3.0, 1.0))
    assert groups.rollout_forwards(one) == 2 * high + (6 - high)


def test_abstract_fields_are_those_of_a_collected_batch():
    setup, params = tiny.make_setup(), tiny.parameters()
    ctx, uncond = tiny.contexts()
    tools = Tools(params["vae"], uncond, tiny.mean_reward)
    student = {e: params[e] for e in setup.model.experts}
    state = grpo.init(jax.random.key(0), setup, {"student": student})
    batch = grpo.collect(state, setup, Item(["a", "b"], ctx), tools)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        shapes = groups.batch_shapes(setup, tools)
    for name, leaf in shapes.items():
        assert getattr(batch, name).shape == leaf.shape, name


@pytest.mark.parametrize("changes, text", [
    (dict(algorithm__group_size=1), "config.group_size is 1"),
    (dict(algorithm__updates=3), "do not divide into config.updates = 3"),
    (dict(sampling__batch=3), "rollouts of config.sampling.batch = 3"),
    (dict(algorithm__advantage="best"), "config.advantage is 'best'"),
])  # fmt: skip
def test_groups_that_do_not_divide_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        groups.check(tiny.make_setup(**changes))
