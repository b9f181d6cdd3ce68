"""Attention against a float64 softmax: every kernel that a CPU runs, over every form of `context`,
values and gradients."""

import functools
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from wanjax.models import attention
from wanjax.parallel import sharding
from wanjax.plan import chips


def _qkv(rng, L=8, S=8, N=4, K=6):
    draw = lambda length: jnp.asarray(rng.normal(size=(4, length, N, K)), jnp.float32)
    return draw(L), draw(S), draw(S)


def _oracle(q, k, v, last_count=1):
    """The output, and the gradients of sum(out · cos(0, 1, 2, ...)), in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    count = np.ones(k.shape[1])
    count[-1] = last_count
    weights = count * np.exp(np.einsum("blnk,bsnk->bnls", q, k) / np.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnls,bsnk->blnk", weights, v)
    d_out = np.cos(np.arange(out.size)).reshape(out.shape)
    d_weights = np.einsum("blnk,bsnk->bnls", d_out, v)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_logits /= np.sqrt(q.shape[-1])
    dq, dk = (
        np.einsum(e, d_logits, x) for e, x in (("bnls,bsnk->blnk", k), ("bnls,blnk->bsnk", q))
    )
    return out, (dq, dk, np.einsum("bnls,blnk->bsnk", weights, d_out))


def _assert_equals_oracle(qkv, mesh, last_count=1, rtol=1e-5, **kwargs):
    def loss(q, k, v):
        out = attention.attend(q, k, v, last_count=last_count, **kwargs)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    want, want_grad = _oracle(*qkv, last_count)
    devices = jax.devices()[: math.prod(mesh.values())]
    with sharding.use_mesh(sharding.make_mesh(mesh, devices) if mesh else None):
        (_, got), got_grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    for a, b in zip((got, *got_grad), (want, *want_grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.fixture
def interpreted(monkeypatch):
    """Run the TPU kernel on this CPU."""
    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    for module in (splash_attention_kernel, jax.experimental.pallas.ops.tpu.splash_attention):
        monkeypatch.setattr(module, "make_splash_mha", make)


@pytest.mark.parametrize("last_count", [1, 37])
def test_the_last_row_counts_last_count_times(rng, last_count):
    qkv = _qkv(rng, L=5, S=7)
    _assert_equals_oracle(qkv, {}, last_count)
    run, backward = attention._written_out(  # the form of kernels that take no weights on rows
        functools.partial(attention._xla, last_count=1),
        functools.partial(attention._xla_backward, last_count=1),
    )
    out, lse = attention._xla(*qkv, last_count)
    for a, b in zip(run(*qkv, last_count), (out, lse), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
    want = attention._xla_backward(*qkv, out, lse, qkv[0], last_count)
    for a, b in zip(backward(*qkv, out, lse, qkv[0], last_count), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mesh, heads, lengths, form", [
    ({"data": 8}, 3, 13, "auto"),
    ({"context": 2, "data": 4}, 3, 13, "auto"),  # ring 2
    ({"context": 4, "data": 2}, 2, 13, "ring"),
    ({"context": 8}, 2, 13, "ring"),  # six full chunks, one of a single row, one of none
    ({"context": 8}, 2, 16, "ring"),
    ({"context": 2, "tensor": 2, "fsdp": 2}, 4, 9, "ulysses"),
    ({"context": 4, "data": 2}, 2, 13, "auto"),  # Ulysses 2 x ring 2
    ({"context": 8}, 4, 20, "auto"),  # Ulysses 4 x ring 2
    ({"context": 4, "tensor": 2}, 4, 8, "auto"),
])  # fmt: skip
def test_every_form_of_context_equals_dense(rng, mesh, heads, lengths, form):
    qkv = tuple(jnp.tile(x, (2, 1, 1, 1)) for x in _qkv(rng, lengths, lengths, heads))
    _assert_equals_oracle(qkv, mesh, form=form)


def test_heads_are_traded_in_one_piece(rng):
    """q, k, v and the output, each once."""
    qkv = _qkv(rng, N=8)
    _assert_equals_oracle(qkv, dict(context=2))
    with sharding.use_mesh(sharding.make_mesh(dict(context=2), jax.devices()[:2])):
        text = jax.jit(lambda *a: attention.attend(*a)).lower(*qkv).as_text()
    assert len(re.findall(r"stablehlo.all_to_all", text)) == 4


@pytest.mark.parametrize(
    "mesh", [{"context": 4, "data": 2}, {"context": 2, "tensor": 2, "fsdp": 2}]
)
def test_text_keys_are_held_whole_and_any_query_length_is_split(rng, mesh):
    _assert_equals_oracle(_qkv(rng, L=7, S=3), mesh, last_count=5)


@pytest.mark.parametrize("ring", [1, 2, 4, 8])
def test_the_tpu_kernel_in_every_ring_equals_dense(rng, interpreted, ring):
    qkv = tuple(x[:1] for x in _qkv(rng, 11, 11, 1, K=128))
    _assert_equals_oracle(qkv, {"context": ring}, kernel="splash", form="ring", rtol=3e-5)


@pytest.mark.parametrize("L, S", [(300, 300), (600, 130)])
def test_the_tpu_kernel_in_several_tiles_equals_dense(rng, interpreted, monkeypatch, L, S):
    monkeypatch.setattr(attention, "TILES", {"": ((256, 384, 128), (384, 256, 256))})
    qkv = tuple(x[:1] for x in _qkv(rng, L, S, 1, K=128))
    _assert_equals_oracle(qkv, {}, kernel="splash", rtol=3e-5)


def test_tiles_by_hand():
    assert attention._tile(32760, 2048, 128) == (2048, 128)  # 16 tiles, 8 rows of padding
    assert attention._tile(1800, 1024, 512) == (1024, 512)
    assert attention._tile(1300, 1024, 128) == (768, 128)  # two equal ones instead of 1024 and 276
    assert attention._tile(77, 1024, 512) == (128, 128)
    assert attention.describe("fa3") == "fa3"
    kinds = [(64, 128, 128), (32, 128, 64)]
    assert "64 x 128 by 128 and 32 x 128 by 64" in _with_tiles(kinds, attention.describe, "splash")


def _with_tiles(sizes, fn, *args):
    """fn(*args) where chips of this machine's kind have these tiles and others do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILES", {"TPU v6": None, jax.devices()[0].device_kind: sizes})
        return fn(*args)


def test_rows_beyond_length_are_nobodys_keys(rng):
    q, k, v = _qkv(rng)
    got = attention.attend(q, k, v, length=5)
    np.testing.assert_allclose(got, _oracle(q, k[:, :5], v[:, :5])[0], atol=3e-6)
    with sharding.use_mesh(sharding.make_mesh({"context": 4, "data": 2})):
        split = jax.jit(functools.partial(attention.attend, form="ring", length=5))(q, k, v)
    np.testing.assert_allclose(split, got, atol=3e-6)


def test_auto_gives_ulysses_what_divides_the_heads_and_the_ring_the_rest():
    form = lambda heads, context, tensor=1, name="auto": attention.context_form(
        heads, {"context": context, "tensor": tensor}, name
    )
    assert form(40, 8) == (8, 1) and form(40, 16) == (8, 2) and form(12, 8) == (4, 2)
    assert form(3, 4) == (1, 4) and form(40, 4, tensor=8) == (1, 4)
    assert form(40, 4, name="ring") == (1, 4) and form(40, 1) == (1, 1)


@pytest.mark.parametrize("kwargs, text", [
    (dict(kernel="flash"), "kernel 'flash' is unknown"),
    (dict(kernel="fa3"), "needs bfloat16, head dim 128 and the extra wanjax.fa3.; found float32"),
    (dict(form="both"), "form 'both' is unknown"),
    (dict(form="ulysses"), "3 heads do not divide over mesh.context = 2.*one of .1, 3."),
])  # fmt: skip
def test_kernels_and_forms_that_cannot_run_are_refused(rng, kwargs, text):
    q, k, v = _qkv(rng, N=3)
    with sharding.use_mesh(sharding.make_mesh({"context": 2, "data": 4})):
        with pytest.raises(ValueError, match=text):
            attention.attend(q, k, v, **kwargs)
    with sharding.use_mesh(sharding.make_mesh({"tensor": 2, "data": 4})):
        with pytest.raises(ValueError, match="3 heads do not divide over mesh.tensor = 2"):
            attention.attend(q, k, v)


def _cudnn_calls(kernel, monkeypatch):
    """cuDNN's calls in the derivative of this kernel, lowered for a GPU."""
    for name, answer in (("check_cudnn_version", 91000), ("check_is_flash_attention", None)):
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *_, answer=answer, **__: answer)
    shape = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    loss = lambda *qkv: attention.attend(*qkv, kernel=kernel).astype(jnp.float32).sum()
    lowered = (
        jax.jit(jax.grad(loss, (0, 1, 2)))
        .trace(shape, shape, shape)
        .lower(lowering_platforms=("cuda",))
    )
    return re.findall(r"custom_call @(__cudnn\S+?)\(", lowered.as_text())


@pytest.fixture
def wheel(monkeypatch):
    """flash-attn3-jax stood in for by the xla kernel with the signatures of its two functions."""

    def forward(q, k, v, softmax_scale, is_causal, window_size):
        assert (softmax_scale, is_causal, window_size) == (1 / math.sqrt(128), False, (-1, -1))
        return attention._xla(q, k, v, 1)

    module = types.ModuleType("flash_attn3_jax")
    module.__spec__ = types.SimpleNamespace()
    module.flash_hlo = types.SimpleNamespace(_flash_mha_fwd_hlo=forward)
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", module)
    return module


@pytest.mark.parametrize("rows", [8, 1000, 1024, 1041])
def test_flash_attention_3_gets_its_arguments_in_order(rng, wheel, monkeypatch, rows):
    calls = []

    def ffi_call(name, results, *, input_layouts, output_layouts):
        def run(d_out, q, k, v, out, lse, *absent, **static):
            calls.append((name, results, static))
            assert len(input_layouts) == 6 + len(absent) and not any(x.size for x in absent)
            assert len(output_layouts) == len(results)
            buffers = [jnp.zeros(x.shape, x.dtype) for x in results[3:]]
            return [*attention._xla_backward(q, k, v, out, lse, d_out, 1), *buffers]

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    qkv = tuple(x.astype(jnp.bfloat16) for x in _qkv(rng, rows, 9, K=128, N=2))
    assert attention.resolve("auto", jnp.bfloat16, 128) == "xla"  # no Hopper here
    loss = lambda kernel: (
        lambda *a: attention.attend(*a, last_count=3, kernel=kernel).astype(jnp.float32).var()
    )
    out = attention.attend(*qkv, last_count=3, kernel="fa3")
    np.testing.assert_allclose(out, _oracle(*qkv, 3)[0], rtol=0.05, atol=0.05)
    got, want = (jax.value_and_grad(loss(name), (0, 1, 2))(*qkv) for name in ("fa3", "xla"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert jnp.linalg.norm(a - b) <= 0.02 * jnp.linalg.norm(b)
    ((name, results, static),) = calls
    assert name == "flash_mha_bwd" and [x.dtype for x in results[3:]] == ["float32"] * 2
    for buffer in results[3:]:  # its tiles have 80 rows, the last one is written whole
        assert buffer.shape[2] >= -(-rows // 80) * 80
    assert (static["max_seqlen_q_val"], static["max_seqlen_k_val"]) == (rows, 11)
    assert static["softmax_scale_val"] == 1 / math.sqrt(128) and not static["deterministic"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops=true")
    jax.grad(loss("fa3"))(*qkv)
    assert calls[1][2]["deterministic"]


def test_cudnn_lowers_to_one_forward_and_one_backward_call(monkeypatch):
    calls = _cudnn_calls("cudnn", monkeypatch)
    assert calls == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_splash_tiles_fit_the_vmem_of_every_chip(topology):
    """XLA:TPU compiles forward and backward of two samples per chip; runs where wanjax[plan] is
    installed."""
    pytest.importorskip("libtpu")
    _, devices = chips.devices_of(topology)
    mesh = sharding.make_mesh({"data": len(devices)}, devices)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shape = (2 * len(devices), 8192, 10, 128)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
    loss = lambda *qkv: attention.attend(*qkv, kernel="splash").astype(jnp.float32).sum()
    with sharding.use_mesh(mesh), jax.default_matmul_precision("default"):  # bfloat16 on TPU
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
