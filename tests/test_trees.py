"""Path-named trees."""

import jax.numpy as jnp
import numpy as np

from wanjax import trees

TREE = {
    "a": {"b.0": jnp.arange(3.0), "c": {"d": jnp.ones((2, 2), jnp.bfloat16)}},
    "e": jnp.int32(1),
}


def test_flatten_names_leaves_by_path_and_unflatten_inverts_it():
    flat = trees.flatten(TREE)
    assert set(flat) == {"a/b.0", "a/c/d", "e"}
    again = trees.flatten(trees.unflatten(flat))
    assert list(again) == list(flat) and all(again[p] is flat[p] for p in flat)


def test_cast_leaves_integers_alone():
    half = trees.cast(TREE, jnp.float16)
    assert half["a"]["c"]["d"].dtype == jnp.float16 and half["e"].dtype == jnp.int32


def test_count_and_map_paths():
    assert trees.count(TREE) == 8
    shapes = trees.map_paths(lambda path, leaf: (path, leaf.shape), TREE)
    assert shapes["a"]["c"]["d"] == ("a/c/d", (2, 2))


def test_lerp_by_hand_keeps_the_dtype():
    a, b = {"x": jnp.array([0.0, 2.0])}, {"x": jnp.array([4.0, 2.0])}
    np.testing.assert_array_equal(trees.lerp(a, b, 0.25)["x"], [1.0, 2.0])
    half = trees.lerp({"x": jnp.zeros(1, jnp.bfloat16)}, {"x": jnp.ones(1)}, 0.5)["x"]
    assert half.dtype == jnp.bfloat16 and float(half[0]) == 0.5


def test_dotted_keeps_empty_mappings_and_lists():
    config = {"a": 1, "b": {"c": {"d": [2]}, "e": {}}}
    assert trees.dotted(config) == {"a": 1, "b.c.d": [2], "b.e": {}}
