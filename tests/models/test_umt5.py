"""UMT5 against transformers, and its parameter names against the released checkpoint."""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tests.models import torch_params
from wanjax import trees
from wanjax.models import umt5

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan"
SIZES = dict(
    vocab_size=50,
    d_model=24,
    d_kv=5,
    d_ff=40,
    num_layers=3,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
)
CONFIG = umt5.UMT5Config(**SIZES)


encode = jax.jit(partial(umt5.encode, config=CONFIG))


@pytest.fixture(scope="module")
def params():
    return jax.jit(partial(umt5.init, config=CONFIG))(jax.random.key(1))


def make_torch():
    torch.manual_seed(0)
    model = transformers.UMT5EncoderModel(
        transformers.UMT5Config(**SIZES, attn_implementation="eager")
    ).eval()
    for name, parameter in model.named_parameters():
        if "layer_norm" in name:  # ones at initialisation would hide a scale that is not applied
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def to_jax(model):
    """The text encoder ties encoder.embed_tokens to shared; wanjax keeps only shared."""
    stacked = torch_params.torch_to_jax(model, stacks=("encoder.block",))
    flat = {k.replace("/", "."): v for k, v in trees.flatten(stacked).items()}
    flat.pop("encoder.embed_tokens.embedding", None)
    like = jax.eval_shape(lambda k: umt5.init(k, CONFIG), jax.random.key(0))
    paths = {path: path.replace("/", ".") for path in trees.flatten(like)}
    assert set(paths.values()) == set(flat)
    return trees.unflatten({path: flat[name] for path, name in paths.items()})


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


def batch(rng, lengths, S):
    mask_BS = np.arange(S)[None] < np.array(lengths)[:, None]
    ids_BS = np.where(mask_BS, rng.integers(3, 50, mask_BS.shape), 0)
    return ids_BS.astype(np.int32), mask_BS


@pytest.mark.parametrize("lengths, S", [([9], 9), ([3, 40], 40), ([1, 17, 30], 33)])
def test_encode_and_gradients_match_transformers(rng, lengths, S):
    model = make_torch()
    params = to_jax(model)
    ids_BS, mask_BS = batch(rng, lengths, S)
    weight_BSE = rng.standard_normal((*ids_BS.shape, 24)).astype(np.float32)

    want = model(torch.from_numpy(ids_BS).long(), torch.from_numpy(mask_BS).long())
    want = want.last_hidden_state * torch.from_numpy(mask_BS)[..., None]
    (want * torch.from_numpy(weight_BSE)).sum().backward()

    def loss(params):
        ctx_BSE = umt5.encode(params, ids_BS, mask_BS, config=CONFIG)
        return jnp.sum(ctx_BSE * weight_BSE), ctx_BSE

    got_grad, got = jax.jit(jax.grad(loss, has_aux=True))(params)
    got_grad = trees.flatten(got_grad)
    assert got.dtype == jnp.float32
    assert relative_error(got, want.detach()) <= 1e-5

    for parameter in model.parameters():
        parameter.data = parameter.grad
    want_grad = trees.flatten(to_jax(model))
    errors = {path: relative_error(got_grad[path], want_grad[path]) for path in want_grad}
    assert max(errors.values()) <= 1e-5, errors


def test_rows_beyond_the_mask_are_zero_and_padding_changes_nothing(rng, params):
    ids_BS, mask_BS = batch(rng, [4, 11], 11)
    ctx_BSE = encode(params, ids_BS, mask_BS)
    assert np.all(np.asarray(ctx_BSE)[~mask_BS] == 0)
    assert np.all(np.abs(np.asarray(ctx_BSE)[mask_BS]).max(-1) > 0)

    wide_ids = np.pad(ids_BS, ((0, 0), (0, 21)), constant_values=7)  # junk under the mask
    wide_mask = np.pad(mask_BS, ((0, 0), (0, 21)))
    wide_BSE = encode(params, wide_ids, wide_mask)
    assert np.all(np.asarray(wide_BSE)[:, 11:] == 0)
    np.testing.assert_allclose(wide_BSE[:, :11], ctx_BSE, atol=2e-6)


def test_order_of_tokens_matters(params):
    mask_BS = np.ones((1, 3), bool)
    one = encode(params, np.array([[5, 6, 1]]), mask_BS)
    other = encode(params, np.array([[6, 5, 1]]), mask_BS)
    assert np.abs(np.asarray(one[0, 0] - other[0, 1])).max() > 1e-2


def test_id_outside_the_vocabulary_gives_nan(params):
    mask_BS = np.ones((2, 2), bool)
    ctx_BSE = encode(params, np.array([[5, 50], [5, 49]]), mask_BS)
    assert np.isnan(ctx_BSE[0]).any() and np.isfinite(ctx_BSE[1]).all()


def test_bfloat16_stays_near_float32(rng, params):
    ids_BS, mask_BS = batch(rng, [3, 40], 40)
    want = encode(params, ids_BS, mask_BS)
    got = encode(trees.cast(params, jnp.bfloat16), ids_BS, mask_BS)
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
    assert error <= 0.02


@pytest.mark.parametrize("buckets, distance", [(32, 128), (8, 16), (12, 40), (32, 512)])
def test_relative_buckets_match_transformers(buckets, distance):
    numbers = dict(relative_attention_num_buckets=buckets, relative_attention_max_distance=distance)
    module = transformers.models.umt5.modeling_umt5.UMT5Attention(
        transformers.UMT5Config(**numbers), has_relative_attention_bias=True
    )
    offset = torch.arange(512)[None] - torch.arange(512)[:, None]
    want = module._relative_position_bucket(offset).numpy()
    got = umt5.relative_buckets(512, umt5.UMT5Config(**numbers))
    np.testing.assert_array_equal(got, want)


def test_names_and_shapes_are_those_of_umt5_xxl():
    golden = json.loads((GOLDEN / "keys_text_encoder_umt5_xxl.json").read_text())
    config = umt5.UMT5Config()
    shapes = jax.eval_shape(lambda k: umt5.init(k, config), jax.random.key(0))
    got = {}
    for path, leaf in trees.flatten(shapes).items():
        name = path.replace("/", ".")
        module, kind = name.rsplit(".", 1)
        shape = leaf.shape
        layers = [None]
        if name.startswith("encoder.block."):
            layers, shape = range(shape[0]), shape[1:]
        shape = shape[::-1] if kind == "kernel" else shape
        for i in layers:
            inside = module if i is None else module.replace("block.", f"block.{i}.", 1)
            got[f"{inside}.weight"] = list(shape)
    want = {name: entry["shape"] for name, entry in golden["keys"].items()}
    del want["encoder.embed_tokens.weight"]  # tied to shared.weight
    assert got == want
    assert trees.count(shapes) == golden["num_parameters"] == 5_680_910_336
    for field, value in vars(config).items():
        assert golden["config"][field] == value
