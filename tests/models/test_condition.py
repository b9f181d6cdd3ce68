"""First-frame conditioning against diffusers' WanImageToVideoPipeline: arithmetic, whole runs."""

import dataclasses
import functools
import inspect

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import tiny
from tests.convert import tiny as torch_tiny
from tests.models.torch_params import torch_to_jax
from wanjax import sampler, sampling, schedule
from wanjax.models import clip, condition, presets, vae, wan

FRAMES, S = 5, 6
WAN = dataclasses.replace(tiny.WAN, patch_size=(1, 2, 2), text_len=S)
I2V = dataclasses.replace(
    tiny.MODEL, name="i2v", wan=dataclasses.replace(WAN, in_channels=12), experts=("high", "low")
)
VAE48 = dataclasses.replace(
    tiny.VAE, z_dim=48, dim_mult=(1, 1, 2, 2), temperal_downsample=(False, True, True),
    is_residual=True, scale_factor_spatial=16, latents_mean=(0.3,) * 48, latents_std=(1.5,) * 48,
)  # fmt: skip
TI2V = dataclasses.replace(
    tiny.MODEL, name="ti2v", vae=VAE48, experts=("high",), boundary=None,
    wan=dataclasses.replace(WAN, in_channels=48, out_channels=48),
)  # fmt: skip
SIZES = {"i2v": 16, "ti2v": 32}


@pytest.fixture(scope="module", params=[I2V, TI2V], ids=lambda model: model.name)
def pair(request):
    """(model config, params, diffusers pipeline) of equal random weights."""
    model = request.param
    known = inspect.signature(diffusers.WanTransformer3DModel).parameters
    names = set(known) & set(vars(model.wan))
    build = lambda: diffusers.WanTransformer3DModel(**{n: getattr(model.wan, n) for n in names})
    torch.manual_seed(0)
    towers = [torch_tiny._randomise(build()) for _ in model.experts]
    coder = torch_tiny.torch_vae(model.vae)
    shapes = jax.eval_shape(lambda: wan.init(jax.random.key(0), model.wan))
    params = {
        expert: torch_to_jax(tower, stacks=("blocks",), like=shapes)
        for expert, tower in zip(model.experts, towers, strict=True)
    }
    like = jax.eval_shape(lambda: vae.init(jax.random.key(0), model.vae))
    params["vae"] = torch_to_jax(coder, like=like)
    pipeline = diffusers.WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, vae=coder,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=towers[0],
        transformer_2=(*towers, None)[1], boundary_ratio=model.boundary,
        expand_timesteps=model.name == "ti2v",
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return model, params, pipeline


def _image(model, seed=0):
    size = SIZES[model.name]
    return np.random.default_rng(seed).uniform(-1, 1, (1, size, size, 3)).astype(np.float32)


def _first_frame(params, image, model):
    build = functools.partial(condition.first_frame, frames=FRAMES, model=model)
    return jax.jit(build)({"vae": params["vae"]}, image)


def _torch(x):
    return torch.from_numpy(np.moveaxis(np.asarray(x), -1, 1).copy())


def test_condition_is_that_of_diffusers(pair):
    model, params, pipeline = pair
    image = _image(model)
    size = SIZES[model.name]
    cond = _first_frame(params, image, model)
    with torch.no_grad():
        found = pipeline.prepare_latents(
            _torch(image), 1, model.vae.z_dim, size, size, FRAMES, torch.float32, "cpu", None, None
        )
    want = np.moveaxis(found[1].numpy(), 1, -1)
    got = np.asarray(cond["latents" if model.name == "i2v" else "first"])
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_sampling_from_an_image_is_that_of_diffusers(pair):
    model, params, pipeline = pair
    image, size, steps = _image(model, 1), SIZES[model.name], 4
    steps_of = schedule.make_schedule("euler", steps, 3.0, model.boundary)
    guidance = presets.Guidance(2.0, 3.0)
    plan = dataclasses.replace(
        tiny.make_setup().sampling, schedule=steps_of, guidance=guidance,
        height=size, width=size, frames=FRAMES,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    ctx, uncond = (rng.normal(size=(1, S, 24)).astype(np.float32) for _ in range(2))
    policy = {expert: (params[expert], {}) for expert in model.experts}
    cond = _first_frame(params, image, model)
    key, ids = jax.random.key(2), jnp.arange(1)
    own, slot_I = jnp.zeros(1, int), jnp.full(steps, -1)
    inputs = ctx, uncond, own, key, ids, slot_I, cond
    got, _ = sampling.rollout(policy, *inputs, model=model, plan=plan)
    noise = sampler.initial_noise(key, ids, sampling.latent_shape(model, plan))
    with torch.no_grad():
        want = pipeline(
            image=(_torch(image) + 1) / 2, height=size, width=size, num_frames=FRAMES,
            num_inference_steps=steps, guidance_scale=guidance.high,
            guidance_scale_2=guidance.low if len(model.experts) == 2 else None,
            prompt_embeds=torch.from_numpy(ctx), negative_prompt_embeds=torch.from_numpy(uncond),
            latents=_torch(noise), output_type="latent",
        ).frames  # fmt: skip
    want = np.moveaxis(want.numpy(), 1, -1)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    if model.name == "ti2v":
        np.testing.assert_array_equal(got[:, :1], cond["first"])


def test_clip_tokens_go_beside_the_latents_of_wan21(monkeypatch):
    image = clip.CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8,
    )  # fmt: skip
    model = dataclasses.replace(I2V, image=image)
    key = jax.random.key(1)
    params = {"vae": {}, "image_encoder": jax.jit(clip.init, static_argnums=1)(key, image)}
    latents = jnp.ones((2, 2, 2, 2, 4))
    monkeypatch.setattr(vae, "encode", lambda *args, **kwargs: latents)
    frame = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    cond = condition.first_frame(params, frame, FRAMES, model=model)
    want = clip.encode_image(
        params["image_encoder"], clip.preprocess(frame, config=image), config=image
    )
    assert cond["latents"].shape == (2, 2, 2, 2, 8) and cond["image"].shape == (2, 5, 8)
    np.testing.assert_array_equal(cond["image"], want)


def test_a_text_model_takes_no_image_and_the_presets_say_who_does():
    with pytest.raises(ValueError, match="tiny makes videos from text only"):
        condition.first_frame({}, np.zeros((1, 16, 16, 3)), FRAMES, model=tiny.MODEL)
    kinds = {name: condition.kind(model) for name, model in presets.MODELS.items()}
    assert kinds == {
        "wan2.1_t2v_1.3b": "", "wan2.1_t2v_14b": "", "wan2.2_t2v_a14b": "",
        "wan2.1_i2v_14b": "latents", "wan2.1_flf2v_14b": "latents", "wan2.2_i2v_a14b": "latents",
        "wan2.2_ti2v_5b": "first",
    }  # fmt: skip
