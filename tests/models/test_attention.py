"""Attention against a float64 softmax, equal rows counted once, and Ulysses over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import sharding
from wanjax.models import attention


def _qkv(rng, L=8, S=8, N=4):
    draw = lambda length: jnp.asarray(rng.normal(size=(4, length, N, 6)), jnp.float32)
    return draw(L), draw(S), draw(S)


def _oracle(q, k, v, last_count=1):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k = np.concatenate([k] + [k[:, -1:]] * (last_count - 1), 1)
    v = np.concatenate([v] + [v[:, -1:]] * (last_count - 1), 1)
    logits = np.einsum("blnk,bsnk->bnls", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnls,bsnk->blnk", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("last_count", [1, 2, 37])
def test_the_last_row_counts_as_often_as_told(rng, last_count):
    q, k, v = _qkv(rng, L=5, S=7)
    got = attention.attend(q, k, v, last_count=last_count)
    np.testing.assert_allclose(got, _oracle(q, k, v, last_count), atol=2e-6)
    repeated = attention._repeat_last(k, v, last_count)  # the form of kernels without a bias
    np.testing.assert_allclose(attention.attend(q, *repeated), got, atol=2e-6)


@pytest.mark.parametrize("shape", [
    {"context": 4, "data": 2}, {"context": 2, "tensor": 2, "data": 2}, {"fsdp": 4, "tensor": 2},
])  # fmt: skip
@pytest.mark.parametrize("cross", [False, True])
def test_meshes_change_neither_values_nor_gradients(rng, shape, cross):
    q, k, v = _qkv(rng, L=8, S=3 if cross else 8)
    last = 5 if cross else 1

    def loss(q, k, v):
        out = attention.attend(q, k, v, last_count=last)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    want = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    with sharding.use_mesh(sharding.make_mesh(shape)):
        got = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    np.testing.assert_allclose(want[0][1], _oracle(q, k, v, last), atol=2e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_divide_and_unknown_kernels_are_refused(rng):
    q, k, v = _qkv(rng, N=3)
    with sharding.use_mesh(sharding.make_mesh({"context": 2, "data": 4})):
        with pytest.raises(ValueError, match=r"3 heads do not divide over tensor\*context = 2"):
            attention.attend(q, k, v)
    with pytest.raises(ValueError, match="kernel 'flash' is unknown"):
        attention.attend(q, k, v, kernel="flash")
