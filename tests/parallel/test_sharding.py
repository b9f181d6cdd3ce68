"""The mesh and the table of logical axes."""

import jax
import jax.numpy as jnp
import pytest
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
