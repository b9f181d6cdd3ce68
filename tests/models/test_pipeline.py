"""Blocks split over `stage`, alone and with the other axes, equal the plain model: values and
gradients."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import custom_partitioning

from wanjax.models import attention, blocks, lora, pipeline, wan
from wanjax.parallel import sharding

CONFIG = wan.WanConfig(
    num_attention_heads=2, attention_head_dim=16, num_layers=3, ffn_dim=48, in_channels=4,
    out_channels=4, text_dim=24, freq_dim=16, text_len=12,
)  # fmt: skip


def _mesh(shape):
    return sharding.make_mesh(shape, jax.devices()[: math.prod(shape.values())])


def _toy(params, lora, h, side):
    return h + jnp.tanh(h @ params["w"] + h @ lora["a"]) * side["gate"][:, None]


@pytest.mark.parametrize("mesh, layers, interleave, remat", [
    ({"stage": 2}, 4, 1, "full"),  # in bfloat16, whose all-reduce XLA:CPU compiles only outside
    ({"stage": 4, "data": 2}, 3, 1, "none"),  # one stage has nothing to do
    ({"stage": 2, "data": 2}, 3, 2, "none"),
    ({"stage": 3, "data": 2}, 4, 2, "full"),  # four micro-batches go in groups of three
    ({"stage": 2, "fsdp": 4}, 4, 2, "none"),
    ({"stage": 2, "data": 2}, 3, 2, "offload"),  # the turns are written out
])  # fmt: skip
def test_every_schedule_equals_a_plain_stack(rng, mesh, layers, interleave, remat):
    dtype = jnp.bfloat16 if layers == 4 and interleave == 1 else jnp.float32
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    params, lora = {"w": draw(layers, 6, 6)}, {"a": draw(layers, 6, 6) / 4}
    h, side = draw(8, 5, 6), {"gate": draw(8, 6)}

    def plain(params, lora, h, side):
        out = blocks.run_blocks(_toy, params, lora, h, side)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    def split(params, lora, h, side):
        stacks = (pipeline.stack(t, layers, mesh["stage"], interleave) for t in (params, lora))
        out = pipeline.run_blocks(_toy, *stacks, h, side, layers=layers, remat=remat)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True))
    want = grad(plain)(params, lora, h, side)
    with sharding.use_mesh(_mesh(mesh)):
        got = grad(split)(params, lora, h, side)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.float32(a), np.float32(b)
        error = 0.03 if dtype == jnp.bfloat16 else 2e-6
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


@functools.cache
def _model():
    """Random parameters, adapter, and inputs of four samples with nine tokens of two times."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32)
    shapes = jax.eval_shape(lambda: wan.init(jax.random.key(0), CONFIG))
    params = jax.tree.map(lambda leaf: draw(*leaf.shape), shapes)
    like = jax.eval_shape(lambda p: lora.init(jax.random.key(0), p, rank=2, alpha=4.0), params)
    adapter = jax.tree.map(lambda leaf: draw(*leaf.shape), like)
    x, t = draw(4, 3, 6, 2, 4) * 5, jnp.array([900.0, 30.0, 500.0, 700.0])
    times, index = jnp.stack([t, t * 0], 1), jnp.asarray([1] * 3 + [0] * 6)
    return params, adapter, (x, times, draw(4, 5, 24) * 5, {"time_index": index})


def _run(config, params, adapter, inputs):
    def loss(adapter, params):
        v = wan.denoise(params, adapter, *inputs, config=config)
        return jnp.square(v).mean(), v

    (_, v), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapter, params)
    return v, gradients


@functools.cache
def _plain():
    return _run(CONFIG, *_model())


@pytest.mark.parametrize("number, stages, interleave, enters, leaves", [
    (3, 2, 1, [0, 1, 2, 2], [0, 0, 1, 2]),  # 0 goes in at step 0 and out at step 1, ...
    # 0 and 1 go in, come back for their second chunk, leave at steps 3 and 4; 2 does at step 7
    (3, 2, 2, [0, 1, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 1, 2, 2, 2]),
    (1, 4, 1, [0, 0, 0, 0], [0, 0, 0, 0]),
])  # fmt: skip
def test_the_schedule(number, stages, interleave, enters, leaves):
    micro, chunk, out = pipeline.schedule(number, stages, interleave)
    assert micro[:, 0].tolist() == enters and out.tolist() == leaves
    assert micro.shape == chunk.shape == (len(enters), stages)


def test_written_out_turns_keep_no_copies_of_the_batch():
    """Where turns are written out, XLA makes a copy of the whole batch a turn of each masked
    update, so their gradient has none."""
    params, h = {"w": jnp.ones((4, 6, 6))}, jnp.ones((8, 5, 6))
    side, run = {"gate": jnp.ones((8, 6))}, functools.partial(pipeline.run_blocks, _toy, layers=4)

    def loss(params, remat):
        stacks = (pipeline.stack(t, 4, 2, 1) for t in (params, {"a": params["w"]}))
        return run(*stacks, h, side, remat=remat).sum()

    with sharding.use_mesh(_mesh({"stage": 2})):
        updates = {
            remat: str(jax.make_jaxpr(jax.grad(functools.partial(loss, remat=remat)))(params))
            for remat in ("full", "offload")
        }
    assert {remat: "scatter" in text for remat, text in updates.items()} == {
        "full": True, "offload": False,
    }  # fmt: skip


@pytest.mark.parametrize("mesh, changes", [
    ({"stage": 2, "fsdp": 2}, dict(interleave=2)),
    ({"stage": 2, "context": 2, "tensor": 2}, dict(remat="save_attention")),  # a ring inside
])  # fmt: skip
def test_the_model_in_stages_equals_one_device(mesh, changes):
    params, adapter, inputs = _model()
    mesh = _mesh(mesh)
    place = lambda tree: jax.device_put(tree, sharding.tree_shardings(mesh, tree, wan.logical_axes))
    with sharding.use_mesh(mesh):
        got = _run(dataclasses.replace(CONFIG, **changes), place(params), place(adapter), inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(_plain()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_staged_weights_are_split_over_the_stages():
    params = _model()[0]
    config, mesh = dataclasses.replace(CONFIG, interleave=2), _mesh({"stage": 2})
    with sharding.use_mesh(mesh):
        staged = wan.stage(params, config)
        assert wan.stage(staged, config) is staged
    placed = jax.device_put(staged, sharding.tree_shardings(mesh, staged, wan.logical_axes))
    kernel = placed["stages"]["attn1"]["to_q"]["kernel"]
    assert kernel.shape == (2, 2, 1, 32, 32)
    assert kernel.addressable_shards[0].data.shape == (1, 2, 1, 32, 32)
    np.testing.assert_array_equal(kernel[0, 1, 0], params["blocks"]["attn1"]["to_q"]["kernel"][2])


def _partitioned(fn, operands: str, results: str):
    """fn as GPU kernels are bound: XLA asks a callback how it may be split."""
    op = custom_partitioning.custom_partitioning(fn)

    def partition(mesh, arguments, result):
        place = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
        return mesh, fn, place(result), place(arguments)

    op.def_partition(partition=partition, sharding_rule=f"{operands} -> {results}")
    return lambda *args, last_count: op(*args)


@pytest.mark.parametrize("mesh", [{"stage": 2}, {"stage": 2, "context": 2}])
def test_stages_run_kernels_that_bring_their_own_partitioning(monkeypatch, mesh):
    """cuDNN and FlashAttention-3 do; a region of which only some axes are manual breaks them."""
    forward, backward = attention.KERNELS["xla"]
    kernels = (
        _partitioned(lambda *a: forward(*a, 1), "b l n k, b s n k, b s n k", "b l n k, b n l"),
        _partitioned(
            lambda *a: backward(*a, 1),
            "b l n k, b s n k, b s n k, b l n k, b n l, b l n k", "b l n k, b s n k, b s n k",
        ),
    )  # fmt: skip
    params, adapter, inputs = _model()
    inputs = (*inputs[:2], jnp.pad(inputs[2], ((0, 0), (0, 7), (0, 0))), inputs[3])  # no counts
    want = _run(CONFIG, params, adapter, inputs)
    monkeypatch.setitem(attention.KERNELS, "own", kernels)
    config = dataclasses.replace(CONFIG, attention="own")
    with sharding.use_mesh(_mesh(mesh)):
        got = _run(config, params, adapter, inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-4, atol=2e-5)
