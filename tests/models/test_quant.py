"""One-byte weights: rounding error by column, the model's output error, adapters on top."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import trees
from wanjax.models import lora, quant, wan


def _relative(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name, largest, error", [("int8", 127, 0.01), ("float8", 448, 0.03)])
def test_every_column_uses_the_whole_range(rng, name, largest, error):
    kernel = rng.normal(size=(2, 64, 8)) * np.array([1e-3, 1, 50, 1, 1, 0, 7, 1])
    q, scale = quant.quantise(jnp.asarray(kernel, jnp.float32), name)
    assert q.dtype.itemsize == 1 and q.shape == (2, 64, 8) and scale.shape == (2, 8)
    np.testing.assert_allclose(scale[:, :5], np.abs(kernel).max(1)[:, :5] / largest, rtol=1e-6)
    back = quant.dequantise({"m": {"kernel": q, "scale": scale}}, jnp.float32)["m"]["kernel"]
    for column in (0, 2, 6):
        assert 1e-3 < _relative(back[..., column], kernel[..., column]) < error
    np.testing.assert_array_equal(back[..., 5], 0)


@pytest.mark.parametrize("matmul, name, error", [
    (quant.matmul, "float8", 3e-3),
    (quant.byte_matmul, "float8", 0.028),  # rounding to three mantissa bits alone is 0.0265
    (quant.byte_matmul, "int8", 0.009),  # a step of 3 sigma / 127, uniform: 0.0070
])  # fmt: skip
def test_products_and_their_gradients_are_those_of_the_written_out_weights(
    rng, matmul, name, error
):
    q, scale = quant.quantise(jnp.asarray(rng.normal(size=(256, 64)), jnp.float32), name)
    kernel = quant.dequantise({"m": {"kernel": q, "scale": scale}}, jnp.float32)["m"]["kernel"]
    x = jnp.asarray(rng.normal(size=(4, 5, 256)) * [[[1e-3], [1], [1], [0], [100]]], jnp.bfloat16)
    y, back = jax.vjp(lambda x: matmul(x, q, scale), x)
    want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    for token in (0, 1, 4):  # a small token beside a large one keeps its own precision
        assert _relative(y[:, token], want[:, token]) < error
    np.testing.assert_array_equal(y[:, 3], 0)
    assert y.dtype == jnp.bfloat16
    (dx,) = back(y)
    assert _relative(dx, np.asarray(y, np.float64) @ np.asarray(kernel, np.float64).T) < 0.01


CONFIG = wan.WanConfig(
    num_attention_heads=4, attention_head_dim=32, num_layers=3, ffn_dim=384, in_channels=4,
    out_channels=4, text_dim=24, freq_dim=16, text_len=12, attention="xla",
)  # fmt: skip


@functools.cache
def _inputs():
    """Parameters distributed as wan.init's, an adapter and inputs, drawn by numpy."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)

    def draw(path, leaf):
        if path.endswith("/scale"):
            return jnp.ones(leaf.shape)
        if path.endswith("/bias"):
            return jnp.zeros(leaf.shape)
        fan_in = leaf.shape[-1] if path.endswith("table") else leaf.shape[-2]
        return normal(*leaf.shape) / np.sqrt(fan_in)

    shapes = jax.eval_shape(lambda: wan.init(jax.random.key(0), CONFIG))
    params = trees.map_paths(draw, shapes)
    like = jax.eval_shape(lambda p: lora.init(jax.random.key(0), p, rank=2, alpha=2.0), shapes)
    adapter = trees.map_paths(lambda p, x: normal(*x.shape) / 8 if p[-1] in "ab" else x, like)
    adapter = trees.map_paths(lambda p, x: jnp.ones(3) if p.endswith("scale") else x, adapter)
    return params, adapter, (normal(2, 2, 8, 8, 4), jnp.array([700.0, 20.0]), normal(2, 5, 24))


@functools.cache
def _gradient(name: str):
    """Velocity and LoRA gradient on weights stored so."""
    params, adapter, inputs = _inputs()

    def loss(adapter, params):
        v = wan.denoise(params, adapter, *inputs, config=CONFIG)
        return jnp.square(v).mean(), v

    stored = wan.store(params, name)
    (_, v), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter, stored)
    return v, np.concatenate([np.ravel(a) for a in jax.tree.leaves(gradient)])


def test_which_leaves_take_one_byte():
    flat = trees.flatten(wan.store(_inputs()[0], "float8"))
    assert flat["blocks/attn1/to_q/kernel"].dtype.itemsize == 1
    assert flat["blocks/ffn.net.2/scale"].shape == (3, 128)
    assert flat["proj_out/kernel"].dtype == jnp.bfloat16
    assert flat["blocks/norm2/scale"].dtype == jnp.float32


def test_velocity_and_adapter_gradients_on_one_byte_weights():
    (v, gradient), (want, want_gradient) = _gradient("float8"), _gradient("float32")
    assert 1e-3 < _relative(v, want) < 0.03
    assert 1e-3 < _relative(gradient, want_gradient) < 0.06


FEED_FORWARD = {(128, 384), (384, 128)}


@pytest.mark.parametrize("name, backend, error, direct", [
    ("int8", "cpu", 0.015, set()),
    ("int8", "gpu", 0.02, FEED_FORWARD | {(128, 128)}),
    ("float8", "gpu", 0.03, FEED_FORWARD),
])  # fmt: skip
def test_the_bfloat16_model_on_one_byte_weights(monkeypatch, name, backend, error, direct):
    """A GPU also rounds activations; with float8 those of the feed-forward only."""
    (params, adapter, inputs), seen, matmul = _inputs(), set(), quant.byte_matmul
    monkeypatch.setattr(quant.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(quant, "byte_matmul", lambda *x: seen.add(x[1].shape) or matmul(*x))
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    run = jax.jit(functools.partial(wan.denoise, config=config))
    found = _relative(run(wan.store(params, name), adapter, *inputs), _gradient("float32")[0])
    assert 1e-3 < found < error
    assert seen == direct


def test_merging_writes_a_quantised_base_out():
    params, adapter, _ = _inputs()
    got = lora.merge(wan.store(params, "int8"), adapter)[0]["blocks"]["attn1"]["to_q"]
    want = lora.merge(params, adapter)[0]["blocks"]["attn1"]["to_q"]
    assert set(got) == set(want) and got["kernel"].dtype == jnp.bfloat16
    assert _relative(got["kernel"], want["kernel"]) < 0.015
