"""CLIP towers against transformers, preprocessing against its image processor."""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.models import torch_params
from wanjax import trees
from wanjax.models import clip

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan"
SIZES = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=3,
    image_size=28,
    patch_size=7,
)
CONFIG = clip.CLIPVisionConfig(**SIZES)


def make_torch(hidden_act):
    torch.manual_seed(0)
    model = transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(
            **SIZES, hidden_act=hidden_act, attn_implementation="eager", initializer_factor=3.0
        )
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def to_jax(model):
    like = jax.eval_shape(lambda k: clip.init(k, CONFIG), jax.random.key(0))
    return torch_params.torch_to_jax(model, stacks=("encoder.layers",), like=like)


def relative_error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("B, hidden_act", [(1, "gelu"), (2, "quick_gelu"), (3, "gelu")])
def test_penultimate_tokens_and_gradients_match_transformers(rng, B, hidden_act):
    model = make_torch(hidden_act)
    config = clip.CLIPVisionConfig(**SIZES, hidden_act=hidden_act)
    params = to_jax(model)
    pixels_BHWC = rng.standard_normal((B, 28, 28, 3)).astype(np.float32)
    weight_BSE = rng.standard_normal((B, 17, 24)).astype(np.float32)

    pixels = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2)
    want = model(pixels, output_hidden_states=True).hidden_states[-2]
    (want * torch.from_numpy(weight_BSE)).sum().backward()

    def loss(params):
        x_BSE = clip.encode_image(params, pixels_BHWC, config=config)
        return jnp.sum(x_BSE * weight_BSE), x_BSE

    got_grad, got = jax.jit(jax.grad(loss, has_aux=True))(params)
    got_grad = trees.flatten(got_grad)
    assert got.dtype == jnp.float32 and got.shape == (B, 17, 24)
    assert relative_error(got, want.detach()) <= 1e-5

    for parameter in model.parameters():
        missing = parameter.grad is None  # the last layer and post_layernorm: must be zero here
        parameter.data = torch.zeros_like(parameter) if missing else parameter.grad
    for path, want in trees.flatten(to_jax(model)).items():
        # A key bias has no gradient in exact arithmetic (softmax ignores it): its rounding residue
        # is compared with the query bias instead.
        scale = np.abs(want).max()
        if path.endswith("k_proj/bias"):
            scale = np.abs(got_grad[path.replace("k_proj", "q_proj")]).max()
        assert np.abs(got_grad[path] - want).max() <= 1e-5 * scale, path


@pytest.mark.parametrize("H, W", [(40, 40), (61, 97), (97, 33), (20, 31)])
def test_preprocess_matches_the_image_processor(rng, H, W):
    # Away from black and white, where the processor also clips between its two passes.
    noise = Image.fromarray(rng.integers(40, 216, (9, 13, 3), dtype=np.uint8))
    image = np.asarray(noise.resize((W, H), Image.BICUBIC))
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    want = transformers.CLIPImageProcessorPil(**size)(images=Image.fromarray(image))
    want = np.asarray(want["pixel_values"])[0].transpose(1, 2, 0)

    got = clip.preprocess(image[None].astype(np.float32) / 127.5 - 1, config=CONFIG)[0]
    grey_levels = np.abs(got - want) * np.array(clip.STD) * 255
    # The processor rounds to 8 bits after each of two resize passes; this one never does.
    assert grey_levels.max() <= 1.5 and grey_levels.mean() <= 0.5


def test_preprocess_matches_float_antialiased_bicubic_and_crops_the_centre(rng):
    x_BHWC = rng.uniform(-1, 1, (2, 60, 100, 3)).astype(np.float32)
    want = torch.nn.functional.interpolate(
        torch.from_numpy(x_BHWC).permute(0, 3, 1, 2),
        size=(28, 46),  # 46.67 rounded down
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    want = want.permute(0, 2, 3, 1).numpy()[:, :, 9:37].clip(-1, 1)
    got = np.asarray(clip.preprocess(x_BHWC, config=CONFIG))
    got = got * np.array(clip.STD) + np.array(clip.MEAN)
    np.testing.assert_allclose(got, (want + 1) / 2, atol=2e-5)


def test_wrong_image_size_is_an_error_that_names_preprocess():
    params = jax.jit(partial(clip.init, config=CONFIG))(jax.random.key(0))
    with pytest.raises(ValueError, match=r"28x35 pixels .* image_size is 28; call clip.preprocess"):
        clip.encode_image(params, np.zeros((1, 28, 35, 3), np.float32), config=CONFIG)


TEXT = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=9,
    hidden_act="quick_gelu",
)
# Rows of start 48, words, end 49, padding; the second has two ends, the third a word above the end.
IDS_BS = np.array(
    [
        [48, 5, 7, 49, 49, 49, 49, 49, 49],
        [48, 3, 49, 2, 1, 49, 0, 0, 0],
        [48, 47, 46, 45, 44, 43, 42, 41, 49],
    ],
    np.int32,
)


@pytest.mark.parametrize("eos", [2, 3])  # the old rule (the largest id of a row), the exact one
def test_embeddings_and_logits_match_transformers(rng, eos):
    torch.manual_seed(1)
    both = dict(attn_implementation="eager", initializer_factor=3.0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=dict(**TEXT, eos_token_id=eos, bos_token_id=48, pad_token_id=0),
            vision_config=SIZES,
            projection_dim=12,
            **both,
        )
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    config = clip.CLIPConfig(
        vision=clip.CLIPVisionConfig(**SIZES, hidden_act="quick_gelu"),
        text=clip.CLIPTextConfig(**TEXT, eos_token_id=eos),
        projection_dim=12,
    )
    like = jax.eval_shape(lambda: clip.init_clip(jax.random.key(0), config))
    stacks = ("vision_model.encoder.layers", "text_model.encoder.layers")
    params = torch_params.torch_to_jax(model, stacks=stacks, like=like)
    pixels_BHWC = rng.standard_normal((2, 28, 28, 3)).astype(np.float32)
    ids_BS = IDS_BS if eos != 3 else np.where(IDS_BS == 7, 3, IDS_BS)

    with torch.no_grad():
        want = model(
            input_ids=torch.from_numpy(ids_BS).long(),
            pixel_values=torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2),
        )
        text_only = model.text_projection(
            model.text_model(input_ids=torch.from_numpy(ids_BS).long()).pooler_output
        )
    image_BD = jax.jit(partial(clip.embed_image, config=config))(params, pixels_BHWC)
    embed = jax.jit(partial(clip.embed_text, config=config))
    text_BD = np.asarray(embed(params, ids_BS))
    assert relative_error(text_BD, text_only) <= 1e-5
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    assert relative_error(unit(image_BD), want.image_embeds) <= 1e-5
    assert relative_error(unit(text_BD), want.text_embeds) <= 1e-5
    logits = np.exp(params["logit_scale"]) * unit(text_BD) @ unit(image_BD).T
    assert relative_error(logits, want.logits_per_text) <= 1e-5

    other = ids_BS.copy()
    other[0, 4:] = 11  # after the end: no influence
    np.testing.assert_array_equal(embed(params, other)[0], text_BD[0])
    other[0, 1] = 8
    assert np.abs(embed(params, other)[0] - text_BD[0]).max() > 1e-3


def test_unknown_activation_is_an_error_that_names_the_file():
    config = clip.CLIPVisionConfig(**SIZES, hidden_act="swish")
    with pytest.raises(ValueError, match=r"'swish' .* image_encoder/config.json"):
        clip.init(jax.random.key(0), config)


def test_names_and_shapes_are_those_of_vit_h14():
    golden = json.loads((GOLDEN / "keys_image_encoder_clip_vit_h14.json").read_text())
    config = clip.CLIPVisionConfig()
    shapes = jax.eval_shape(lambda k: clip.init(k, config), jax.random.key(0))
    got = {}
    for path, leaf in trees.flatten(shapes).items():
        name, shape = path.replace("/", "."), leaf.shape
        layers = [None]
        if name.startswith("encoder.layers."):
            layers, shape = range(shape[0]), shape[1:]
        if name.endswith(".kernel"):
            shape = shape[::-1] if len(shape) == 2 else (shape[3], shape[2], *shape[:2])
        for kind in ("kernel", "scale", "embedding"):
            name = name.removesuffix(f".{kind}") + ".weight" if name.endswith(f".{kind}") else name
        for i in layers:
            key = name if i is None else name.replace("layers.", f"layers.{i}.", 1)
            got[key] = list(shape)
    assert got == {name: entry["shape"] for name, entry in golden["keys"].items()}
    assert trees.count(shapes) == golden["num_parameters"] == 630_766_080
    for field, value in vars(config).items():
        assert golden["config"][field] == value
