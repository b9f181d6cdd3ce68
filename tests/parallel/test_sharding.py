"""The mesh and the table of logical axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tiny
from wanjax import trees
from wanjax.models import wan
from wanjax.parallel import sharding


def test_a_free_axis_takes_the_rest_and_axes_are_auto():
    mesh = sharding.make_mesh({"data": -1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "context": 1, "tensor": 2, "stage": 1}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize("shape, text", [
    ({"model": 2}, "'model' is unknown"), ({"data": 3}, "has 3 places but 8 devices"),
    ({"data": -1, "fsdp": -1}, "at most one -1"), ({"data": 0}, "at most one -1"),
    ({"data": -1, "fsdp": 16}, "has 16 places but 8 devices"),
])  # fmt: skip
def test_impossible_meshes_are_refused(shape, text):
    with pytest.raises(ValueError, match=text):
        sharding.make_mesh(shape)


def test_spec_follows_the_table_and_refuses_a_collision():
    assert sharding.spec("batch", "tokens", None) == P(("data", "fsdp"), "context", None)
    with pytest.raises(ValueError, match="'fsdp' serves two dimensions"):
        sharding.spec("batch", "embed")


def test_constrain_without_a_mesh_returns_the_array_itself():
    x = jnp.ones((2, 2))
    assert sharding.constrain(x, "batch", None) is x
    assert sharding.mesh_shape() == {}


def test_weights_are_split_where_they_divide_and_whole_elsewhere():
    mesh = sharding.make_mesh({"fsdp": 2, "context": 2, "tensor": 2})
    params = jax.eval_shape(lambda: wan.init(jax.random.key(0), tiny.WAN))
    flat = trees.flatten(sharding.tree_shardings(mesh, params, wan.logical_axes))
    embed = ("fsdp", "context")
    assert flat["blocks/attn1/to_q/kernel"].spec == P("stage", embed, "tensor")
    assert flat["blocks/attn1/to_out.0/kernel"].spec == P("stage", "tensor", embed)
    assert flat["blocks/ffn.net.2/kernel"].spec == P("stage", "tensor", embed)
    assert flat["blocks/norm2/scale"].spec == P("stage", None)
    assert flat["patch_embedding/kernel"].spec == P(None, None, None, None, None)
    placed = jax.device_put(jnp.zeros((2, 32, 32)), flat["blocks/attn1/to_q/kernel"])
    assert placed.addressable_shards[0].data.shape == (2, 8, 16)


def test_weights_on_the_host_keep_their_split_and_come_back_inside_jit():
    mesh = sharding.make_mesh({"fsdp": 8})
    at = jax.NamedSharding(mesh, P("fsdp"))
    tree = {"a": jax.device_put(jnp.arange(16.0), at), "b": jnp.ones(3, jnp.int8)}
    host = sharding.to_host(tree)
    assert {x.sharding.memory_kind for x in host.values()} == {"pinned_host"}
    assert host["a"].sharding.spec == P("fsdp")
    back = sharding.to_device(host)
    assert {x.sharding.memory_kind for x in back.values()} == {"device"}
    inside = jax.jit(lambda tree: sharding.to_device(tree)["a"] * 2)(host)
    assert inside.sharding.memory_kind == "device"
    for x in (back["a"], inside / 2):
        assert x.sharding.is_equivalent_to(at, 1)
        assert (x == tree["a"]).all()


def test_a_backend_without_host_memory_keeps_the_arrays(monkeypatch):
    bare = type("Device", (), {"addressable_memories": lambda self: []})()
    monkeypatch.setattr(sharding.jax, "devices", lambda: [bare])
    x = jnp.ones(2)
    assert sharding.to_host({"x": x})["x"] is x


def test_every_row_belongs_to_one_device_and_its_own_values_come_with_it():
    mesh = sharding.make_mesh({"data": 2, "context": 4})
    x = jnp.arange(24.0).reshape(8, 3)
    for spec in (P(), P("data"), P(sharding.AXES), P(None, None)):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        rows, values = sharding.own_rows(placed, 5)
        assert rows.tolist() == [0, 1, 2, 3, 4]
        np.testing.assert_array_equal(values, x[:5])
    rows, values = sharding.own_rows(np.asarray(x), 2)
    assert rows.tolist() == [0, 1] and values.shape == (2, 3)


def test_rows_of_other_processes_are_left_to_them(monkeypatch):
    """As if the second half of the devices belonged to another process."""
    mesh = sharding.make_mesh({"data": 2, "context": 4})
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P(sharding.AXES)))

    class Mine:
        def __init__(self, shards):
            self.shape, self.dtype, self.sharding = x.shape, x.dtype, x.sharding
            self.is_fully_addressable, self.addressable_shards = False, shards

    monkeypatch.setattr(sharding.jax, "Array", (jax.Array, Mine))
    for half in (slice(0, 4), slice(4, 8)):
        rows, values = sharding.own_rows(Mine(x.addressable_shards[half]), 7)
        want = [row for row in range(8)[half] if row < 7]
        assert rows.tolist() == want
        np.testing.assert_array_equal(values, np.asarray(x)[want])
    rows, values = sharding.own_rows(Mine([]), 7)
    assert rows.size == 0 and values.shape == (0, 2)


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_split_rows_gives_every_device_its_share(count, rng):
    mesh = sharding.make_mesh({"data": 2, "context": 2, "tensor": 2})
    x = rng.normal(size=(count, 5)).astype(np.float32)
    seen = []

    def function(scale, part):
        seen.append(part.shape)
        return part * scale

    with sharding.use_mesh(mesh):
        got = jax.jit(lambda x: sharding.split_rows(function, jnp.float32(2), x))(x)
    assert seen == [(-(-count // 8), 5)] and len(got) == -(-count // 8) * 8
    np.testing.assert_array_equal(got[:count], 2 * x)
    assert not got[count:].any() and len(got.sharding.device_set) == 8


def test_in_place_results_take_layout_and_memory_of_what_they_replace():
    """Two arrays of one shape in two layouts, which jax alone would pair by shape."""
    mesh = sharding.make_mesh({"data": 2, "tensor": 4})
    where = [NamedSharding(mesh, P("tensor")), NamedSharding(mesh, P(None, "data"))]
    step = sharding.InPlace(
        1, lambda pair, x, *, k: ([a + k * x for a in pair], x), static_argnames="k"
    )
    pair = [jax.device_put(jnp.full((4, 4), float(i)), at) for i, at in enumerate(where)]
    with sharding.use_mesh(mesh):
        for k in (1, 2):
            old = pair
            pair, _ = step(old, jnp.ones((4, 4)), k=k)
            assert all(a.is_deleted() for a in old)
            assert [a.sharding for a in pair] == where
    np.testing.assert_array_equal(pair[1], np.full((4, 4), 4.0))
    alone = [jnp.zeros(3)]
    (moved,), _ = step(alone, jnp.ones(3), k=1)
    assert alone[0].is_deleted() and moved.tolist() == [1, 1, 1]
