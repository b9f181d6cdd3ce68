"""The embedded model: its files, its card, and the same frames in diffusers' own pipeline."""

import functools
import json
import pathlib

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import lora as lora_files
from convert import weights
from convert.lora import adapter, write
from wanjax import sampler, schedule, trees
from wanjax.data import text
from wanjax.models import lora, umt5, vae, wan
from wanjax.rewards import shapes

FOLDER = pathlib.Path(__file__).parents[1] / "wanjax" / "assets" / "tinywan22"
PROMPTS = [
    "a red circle moving left and a blue square moving up on a gray background",
    shapes.prompts("heldout", 2, 1)[0],
]


@pytest.fixture(scope="module")
def tinywan():
    return weights.load("tinywan22")


def _generate(params, config, prompts, noise_BTHWC, steps, adapters=None):
    """Frames in [0, 1] by the sampler on diffusers' UniPC grid."""
    adapters = adapters or dict.fromkeys(config.experts)
    encode = jax.jit(functools.partial(umt5.encode, params["text_encoder"], config=config.text))
    tokenizer = text.load_tokenizer(config.tokenizer)
    ctx, null = (text.encode_prompts(encode, tokenizer, p) for p in (prompts, [""]))
    null = np.broadcast_to(null, ctx.shape)
    guidance = config.sampling.guidance
    experts = {
        name: sampler.cfg(
            lambda x, t, ctx, tree=params[name], lora=adapters[name]: wan.denoise(
                tree, lora, x, t, ctx, config=config.wan
            ),
            getattr(guidance, name),
            ctx,
            null,
        )
        for name in config.experts
    }
    plan = schedule.make_schedule("unipc", steps, config.sampling.shift, config.boundary)
    z = jax.jit(lambda x: sampler.sample(experts, x, plan, solver="unipc"))(noise_BTHWC)
    return (
        np.asarray(jax.jit(functools.partial(vae.decode, config=config.vae))(params["vae"], z)) / 2
        + 0.5
    )


def test_config_is_two_experts_with_a_boundary_and_the_empty_negative_prompt(tinywan):
    params, config = tinywan
    assert config.name == "tinywan22" and config.experts == ("high", "low")
    assert config.boundary == 0.875 and set(params) >= {"high", "low", "vae", "text_encoder"}
    assert config.sampling.negative_prompt == ""
    assert (config.sampling.frames, config.sampling.height, config.sampling.width) == (17, 64, 64)
    plan = schedule.make_schedule("unipc", config.sampling.steps, config.sampling.shift, 0.875)
    assert 3 <= plan.high_steps <= config.sampling.steps - 3  # both experts have work to do


def test_files_are_small_and_the_card_names_them():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) < 16 << 20
    assert sum(path.stat().st_size for path in files) < 16e6
    card = (FOLDER / "README.md").read_text()
    for path in files:
        if path.suffix == ".safetensors":
            assert str(path.relative_to(FOLDER)) in card
    assert "Strict success" in card and "make_tinywan.py" in card
    assert json.loads((FOLDER / "model_index.json").read_text())["boundary_ratio"] == 0.875


def test_tokenizer_knows_every_word_of_the_grammar(tinywan):
    _, config = tinywan
    tokenizer = text.load_tokenizer(config.tokenizer)
    captions = shapes.prompts("heldout", 2, 32)
    ids_BS, mask_BS = text.tokenize(tokenizer, captions)
    assert (mask_BS.sum(1) == [len(c.split()) + 1 for c in captions]).all()
    assert (ids_BS[mask_BS] != tokenizer.token_to_id("<unk>")).all()


def _adapters(params, config):
    """Adapters as large as trained ones."""
    trees_by_expert = {}
    for number, name in enumerate(config.experts):
        key = jax.random.key(number)
        tree = lora.init(key, params[name], rank=4, alpha=8.0)
        draw = lambda path, x, key=key: (
            0.05 * jax.random.normal(key, x.shape) if path.endswith("/b") else x
        )
        trees_by_expert[name] = trees.map_paths(draw, tree)
    return trees_by_expert


def test_experts_differ(tinywan):
    params, _ = tinywan
    high, low = (jax.tree.leaves(params[name]) for name in ("high", "low"))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(high, low, strict=True))


@pytest.mark.parametrize("adapted", ["", "random", "quickstart"])
def test_diffusers_pipeline_gives_the_same_frames(tinywan, tmp_path, adapted):
    """Of the model as it is, and with an exported LoRA on both experts: a large random one, and
    the files that a quickstart run wrote (golden/quickstart)."""
    params, config = tinywan
    steps, guidance = 10, config.sampling.guidance
    noise = np.asarray(jax.random.normal(jax.random.key(7), (2, 5, 8, 8, config.wan.in_channels)))
    adapters, files = {}, []
    if adapted == "random":
        adapters = _adapters(params, config)
        files = write.write(adapter.of_trees(adapters), tmp_path, "diffusers")
    elif adapted:
        files = sorted((pathlib.Path(__file__).parent / "golden/quickstart").glob("*.safetensors"))
        adapters = lora_files.load(files, config)
    ours = _generate(params, config, PROMPTS, jnp.asarray(noise), steps, adapters)
    pipe = diffusers.WanPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    if adapted:
        for path, second in zip(files, (False, True), strict=True):
            where = dict(weight_name=path.name, load_into_transformer_2=second)
            pipe.load_lora_weights(str(path.parent), **where)
        plain = _generate(params, config, PROMPTS, jnp.asarray(noise), steps)
        assert np.abs(ours - plain).max() > 0.1
    theirs = pipe(
        prompt=PROMPTS,
        negative_prompt=["", ""],
        height=64,
        width=64,
        num_frames=17,
        num_inference_steps=steps,
        guidance_scale=guidance.high,
        guidance_scale_2=guidance.low,
        latents=torch.from_numpy(noise.transpose(0, 4, 1, 2, 3).copy()),
        output_type="np",
    ).frames
    assert theirs.shape == ours.shape == (2, 17, 64, 64, 3)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_captions_with_one_object_often_succeed(tinywan):
    params, config = tinywan
    captions = shapes.prompts("train", 1, 24, seed=11)
    noise = jax.random.normal(jax.random.key(8), (24, 5, 8, 8, config.wan.in_channels))
    frames = _generate(params, config, captions, noise, 10)
    score_B, info = shapes.reward(np.clip(frames, 0, 1), captions)
    assert score_B.mean() > 0.85 and info["strict"].mean() > 0.7  # the card: 91 %
    other_B, _ = shapes.reward(np.clip(frames, 0, 1), captions[1:] + captions[:1])
    assert other_B.mean() < score_B.mean() - 0.4
