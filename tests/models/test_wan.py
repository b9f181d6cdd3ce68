"""The DiT against diffusers' WanTransformer3DModel: float32 forward and gradients per variant."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from tests.models.torch_params import torch_to_jax
from wanjax import trees
from wanjax.models import lora, presets, wan
from wanjax.parallel import sharding

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan"
TINY = dict(
    num_attention_heads=2, attention_head_dim=16, num_layers=2, ffn_dim=48, text_dim=24, freq_dim=16
)
VARIANTS = {
    "t2v": dict(in_channels=4, out_channels=4),
    "i2v_clip": dict(in_channels=9, out_channels=4, image_dim=20, added_kv_proj_dim=32),
    "flf2v": dict(
        in_channels=9, out_channels=4, image_dim=20, added_kv_proj_dim=32, pos_embed_seq_len=14
    ),
    "i2v_a14b": dict(in_channels=9, out_channels=4),
    "temporal_patch": dict(in_channels=4, out_channels=4, patch_size=(2, 2, 2)),
    "no_cross_norm": dict(in_channels=4, out_channels=4, cross_attn_norm=False),
}
IMAGE_ROWS = {"i2v_clip": 7, "flf2v": 14}


def _models(name, text_len=12):
    torch.manual_seed(0)
    config = wan.WanConfig(**TINY, **VARIANTS[name], text_len=text_len)
    fields = dataclasses.asdict(config)
    for key in wan.RUN_FIELDS:
        fields.pop(key)
    model = WanTransformer3DModel(**fields).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model, _params(model, config), config


def _params(model, config):
    like = jax.eval_shape(lambda: wan.init(jax.random.key(0), config))
    return torch_to_jax(model, stacks=("blocks",), like=like)


def _inputs(rng, config, name, batch, size=(2, 6, 4), rows=12):
    x = rng.normal(size=(batch, *size, config.out_channels)).astype(np.float32)
    extra = config.in_channels - config.out_channels
    cond = {}
    if extra:
        cond["latents"] = rng.normal(size=(batch, *size, extra)).astype(np.float32)
    if name in IMAGE_ROWS:
        shape = (batch, IMAGE_ROWS[name], config.image_dim)
        cond["image"] = rng.normal(size=shape).astype(np.float32)
    t = rng.uniform(0, 1000, size=batch).astype(np.float32)
    ctx = rng.normal(size=(batch, rows, config.text_dim)).astype(np.float32)
    return x, t, ctx, cond


def _torch_forward(model, x, t, ctx, cond, name):
    full = np.concatenate([x, cond["latents"]], -1) if "latents" in cond else x
    image = cond.get("image")
    if image is not None and name == "flf2v":  # diffusers takes two images stacked on the batch
        image = image.reshape(2 * image.shape[0], -1, image.shape[-1])
    x_torch = torch.tensor(full).permute(0, 4, 1, 2, 3).requires_grad_()
    out = model(
        x_torch,
        torch.tensor(t),
        torch.tensor(ctx),
        None if image is None else torch.tensor(image),
        return_dict=False,
    )[0]
    return x_torch, out


def _relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name, batch", [("t2v", 1), *((name, 3) for name in VARIANTS)])
def test_forward_and_gradients_equal_diffusers(rng, name, batch):
    rows = 512 if name in IMAGE_ROWS else 12  # diffusers splits image from text at len - 512
    model, params, config = _models(name, text_len=rows)
    x, t, ctx, cond = _inputs(rng, config, name, batch, rows=rows)
    probe = rng.normal(size=x.shape).astype(np.float32)
    x_torch, out = _torch_forward(model, x, t, ctx, cond, name)
    (out * torch.tensor(probe).permute(0, 4, 1, 2, 3)).sum().backward()

    def loss(params, x):
        v = wan.denoise(params, None, x, jnp.asarray(t), ctx, cond, config=config)
        return (v * probe).sum(), v

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, v), (params_grad, x_grad) = grad(params, jnp.asarray(x))
    assert _relative(v, out.detach().permute(0, 2, 3, 4, 1)) <= 1e-5
    channels = config.out_channels
    assert _relative(x_grad, x_torch.grad.permute(0, 2, 3, 4, 1)[..., :channels]) <= 1e-5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else parameter * 0)
    want = trees.flatten(_params(model, config))
    got = trees.flatten(params_grad)
    assert set(got) == set(want)
    total = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in want.values()))
    for path, gradient in got.items():
        difference = np.linalg.norm(np.asarray(gradient, np.float64) - np.asarray(want[path]))
        assert difference <= 1e-5 * max(np.linalg.norm(np.asarray(want[path])), 1e-3 * total), path


def test_left_out_text_rows_count_as_zero_rows(rng):
    model, params, config = _models("t2v", text_len=40)
    x, t, ctx, cond = _inputs(rng, config, "t2v", 2)
    full = np.concatenate([ctx, np.zeros((2, 28, config.text_dim), np.float32)], 1)
    short = wan.denoise(params, None, x, t, ctx, config=config)
    whole = wan.denoise(params, None, x, t, full, config=config)
    assert _relative(short, whole) <= 2e-6
    assert _relative(short, _torch_forward(model, x, t, full, cond, "t2v")[1].detach().permute(
        0, 2, 3, 4, 1)) <= 1e-5  # fmt: skip


def test_per_token_times_equal_diffusers(rng):
    model, params, config = _models("t2v")
    x, t, ctx, _ = _inputs(rng, config, "t2v", 2)
    times = np.stack([t, t * 0], 1)
    index = np.repeat([1, 0], 6)  # the first latent frame is clean
    v = wan.denoise(params, None, x, times, ctx, {"time_index": jnp.asarray(index)}, config=config)
    want = _torch_forward(model, x, times[:, index], ctx, {}, "t2v")[1]
    assert _relative(v, want.detach().permute(0, 2, 3, 4, 1)) <= 1e-5


def test_one_time_per_token_equals_the_scalar_path(rng):
    _, params, config = _models("t2v")
    x, t, ctx, _ = _inputs(rng, config, "t2v", 2)
    cond = {"time_index": jnp.zeros(12, jnp.int32)}
    v = wan.denoise(params, None, x, t[:, None], ctx, cond, config=config)
    assert _relative(v, wan.denoise(params, None, x, t, ctx, config=config)) <= 1e-6


@functools.cache
def _sharded_case():
    """Arguments of a LoRA loss, the jitted loss with its gradient, and both on one device."""
    rng = np.random.default_rng(0)
    _, params, config = _models("t2v")
    x, t, ctx, _ = _inputs(rng, config, "t2v", 8)
    adapter = lora.init(jax.random.key(0), params, rank=2, alpha=4.0)
    adapter = jax.tree.map(lambda a: a + 0.1, adapter)

    def loss(adapter, params):
        v = wan.denoise(params, adapter, x, t, ctx, config=config)
        return jnp.square(v).mean(), v

    grad = lambda *trees: jax.jit(jax.value_and_grad(lambda *a: loss(*a), has_aux=True))(*trees)
    return grad, (adapter, params), grad(adapter, params)


@pytest.mark.parametrize("shape", [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"context": 4, "fsdp": 2},  # Ulysses 2 x ring 2
])  # fmt: skip
def test_sharded_forward_and_gradients_equal_one_device(shape):
    grad, arguments, ((_, want), want_grad) = _sharded_case()
    mesh = sharding.make_mesh(shape)
    place = lambda tree: jax.device_put(tree, sharding.tree_shardings(mesh, tree, wan.logical_axes))
    with sharding.use_mesh(mesh):
        (_, got), got_grad = grad(*(place(tree) for tree in arguments))
    assert _relative(got, want) <= 1e-5
    for a, b in zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mesh, batch, changes, text", [
    ({"data": 4, "fsdp": 2}, 12, {}, r"12 samples .* = 8; .*one of \[1, 2, 3, 4, 6, 12\]"),
    ({"tensor": 4}, 4, {}, r"heads do not divide over mesh.tensor = 4; .*one of \[1, 2\]"),
    ({"context": 4}, 4, dict(context="ulysses"), r"mesh.context = 4 .*one of \[1, 2\]"),
    ({"context": 32}, 4, {}, "more than the 12 tokens .* at most 12"),
    ({"stage": 4}, 4, {}, "mesh.stage.model.interleave = 4 is more than the 2 layers; .*most 2"),
    ({}, 4, dict(interleave=2), "interleave = 2 needs a pipeline"),
    ({}, 4, dict(attention="flash"), "kernel 'flash' is unknown"),
])  # fmt: skip
def test_meshes_that_do_not_fit_are_refused_with_the_legal_sizes(mesh, batch, changes, text):
    config = wan.WanConfig(**TINY, in_channels=4, out_channels=4, **changes)
    with pytest.raises(ValueError, match=text):
        wan.check_mesh(config, mesh, batch, tokens=12)


def test_what_runs_is_said_in_one_line():
    config = presets.MODELS["wan2.2_t2v_a14b"].wan
    mesh = {"context": 16, "stage": 3, "data": 2}
    wan.check_mesh(config, mesh, batch=2, tokens=32_760)
    assert wan.describe(config, mesh) == (
        "attention xla, remat none, context = ulysses 8 x ring 2, stage = 3 x 1 chunks of 14 blocks"
    )
    assert wan.describe(config, {"data": 8}) == "attention xla, remat none"


def test_bfloat16_error_is_as_stated(rng):
    """Relative L2 of the bf16 policy against float32 on the tiny model: about 1e-2, bound 3e-2."""
    _, params, config = _models("t2v")
    x, t, ctx, _ = _inputs(rng, config, "t2v", 2)
    half = dataclasses.replace(config, dtype="bfloat16")
    v = wan.denoise(wan.store(params, jnp.bfloat16), None, x, t, ctx, config=half)
    assert v.dtype == jnp.float32
    error = _relative(v, wan.denoise(params, None, x, t, ctx, config=config))
    assert 1e-4 < error < 3e-2


@pytest.mark.parametrize("name", [
    "wan2.1_t2v_1.3b", "wan2.1_t2v_14b", "wan2.2_t2v_a14b", "wan2.1_i2v_14b", "wan2.1_flf2v_14b",
    "wan2.2_i2v_a14b", "wan2.2_ti2v_5b",
])  # fmt: skip
def test_parameter_shapes_equal_the_released_checkpoints(name):
    golden = json.loads((GOLDEN / f"keys_{name}.json").read_text())
    config = presets.MODELS[name].wan
    shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), config)))
    got = {}
    for path, leaf in shapes.items():
        name_, shape = path.replace("/", "."), leaf.shape
        layers_ = range(config.num_layers) if path.startswith("blocks/") else [None]
        for i in layers_:
            key = name_ if i is None else name_.replace("blocks.", f"blocks.{i}.", 1)
            dims = shape if i is None else shape[1:]
            if key.endswith(".kernel"):
                dims = (dims[-1], dims[-2], *dims[:-2])
            stem, _, last = key.rpartition(".")
            key = f"{stem}.weight" if last in ("kernel", "scale") else key
            got[key] = list(dims)
    assert got == {key: value["shape"] for key, value in golden["keys"].items()}
    assert sum(int(np.prod(s)) for s in got.values()) == golden["num_parameters"]


@pytest.mark.parametrize("change, text", [
    (dict(x=(1, 2, 6, 4, 5)), "input channels"), (dict(ctx=(1, 13, 24)), "text context"),
    (dict(ctx=(1, 12, 23)), "text context"), (dict(x=(1, 2, 5, 4, 4)), "does not divide"),
])  # fmt: skip
def test_wrong_shapes_are_refused(change, text):
    config = wan.WanConfig(**TINY, in_channels=4, out_channels=4, text_len=12)
    params = jax.eval_shape(lambda: wan.init(jax.random.key(0), config))
    shapes = {"x": (1, 2, 6, 4, 4), "ctx": (1, 12, 24), **change}
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(
            lambda p, x, t, c: wan.denoise(p, None, x, t, c, config=config),
            params, jax.ShapeDtypeStruct(shapes["x"], jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
            jax.ShapeDtypeStruct(shapes["ctx"], jnp.float32),
        )  # fmt: skip


def test_features_are_the_outputs_of_diffusers_blocks(rng):
    model, params, config = _models("t2v", text_len=12)
    x, t, ctx, cond = _inputs(rng, config, "t2v", 2, rows=12)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda *args: seen.append(args[2].detach()))
    _torch_forward(model, x, t, ctx, cond, "t2v")
    layers = (0, config.num_layers - 1)
    found = wan.features(params, None, x, t, ctx, config=config, layers=layers)
    for layer, got in zip(layers, found, strict=True):
        assert _relative(got, seen[layer]) <= 1e-5
    with sharding.use_mesh(sharding.make_mesh({"stage": 2}, jax.devices()[:2])):
        with pytest.raises(ValueError, match="config.mesh.stage to 1"):
            wan.features(params, None, x, t, ctx, config=config, layers=layers)
