"""Remat policies: equal values and gradients, and which of them run attention twice."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from wanjax.models import attention, blocks, lora, wan
from wanjax.parallel import sharding

CONFIG = wan.WanConfig(
    num_attention_heads=2, attention_head_dim=16, num_layers=2, ffn_dim=48, in_channels=4,
    out_channels=4, text_dim=24, freq_dim=16, text_len=12,
)  # fmt: skip


def _block(params, lora, h, side):
    """softsign, not tanh: XLA:CPU's tanh differs by 200 ulp with the shape of a shard."""
    q, k, v = (h[:, :, None] @ (params[n] + lora[n]) for n in "qkv")
    return jax.nn.soft_sign(h + attention.attend(q, k, v)[:, :, 0]) + side


def _grad(remat):
    def loss(lora, params, h, side):
        return jnp.square(blocks.run_blocks(_block, params, lora, h, side, remat=remat)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 2)))


@pytest.fixture
def operands(rng):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
    weights = lambda: {n: draw(3, 8, 8) for n in "qkv"}
    return weights(), weights(), draw(4, 6, 8), draw(1, 6, 8)


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "context": 4}])
def test_every_policy_gives_equal_values_and_gradients(operands, mesh):
    want = _grad("none")(*operands)
    with sharding.use_mesh(mesh and sharding.make_mesh(mesh)):
        for remat in set(blocks.REMAT) - {"none"}:
            got = _grad(remat)(*operands)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=remat)


@pytest.mark.parametrize("remat, forwards, again", [
    ("none", 2, False), ("full", 4, True), ("save_attention", 3, True), ("offload", 3, True),
    ("save_matmuls", 3, False),
])  # fmt: skip
def test_what_is_kept_is_not_run_again(monkeypatch, remat, forwards, again):
    """Attention calls and dense products of the LoRA gradient as lowered for a GPU; attention to
    text does run again, and every scan body is counted once."""
    for name, answer in (("check_cudnn_version", 91000), ("check_is_flash_attention", None)):
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *_, answer=answer, **__: answer)
    config = dataclasses.replace(CONFIG, dtype="bfloat16", attention="cudnn", remat=remat)
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    params = jax.eval_shape(lambda: wan.init(jax.random.key(0), config))
    adapter = jax.eval_shape(lambda p: lora.init(jax.random.key(0), p, rank=2, alpha=4.0), params)
    inputs = shape(1, 2, 4, 4, 4), shape(1), shape(1, 5, 24)
    run = functools.partial(wan.denoise, config=config)
    grad = jax.jit(jax.grad(lambda lora, params, *x: jnp.square(run(params, lora, *x)).sum()))
    lowered = grad.trace(adapter, params, *inputs).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @__cudnn\S+?(Backward)?\(", lowered)
    assert calls.count("Backward") == 2 and calls.count("") == forwards
    # 10 dense layers of 3 products; 5 more for their gradients, 3 where x is text; 8 outside
    needed = 10 * 3 + (8 * 5 + 2 * 3) + 8
    assert (lowered.count("stablehlo.dot_general") > needed) == again
    assert ("pinned_host" in lowered) == (remat == "offload")


def test_layers_that_are_not_real_change_nothing(operands):
    lora, params, h, side = operands
    real = jnp.array([True, True, False])
    got = blocks.run_blocks(_block, params, lora, h, side, remat="full", real=real)
    first = jax.tree.map(lambda x: x[:2], (params, lora))
    np.testing.assert_allclose(got, blocks.run_blocks(_block, *first, h, side), atol=1e-6)


def test_unknown_policies_are_refused(operands):
    lora, params, h, side = operands
    with pytest.raises(ValueError, match="remat policy 'half' is unknown.*save_attention"):
        blocks.run_blocks(_block, params, lora, h, side, remat="half")
