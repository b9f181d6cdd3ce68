"""Export of full weights: the folder says how it is sampled; diffusers gives the same frames."""

import functools
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import tiny
from wanjax import checkpoint, export, sample, sampler, schedule
from wanjax import state as states
from wanjax.models import presets

LEVELS = (1.0, 0.75, 0.5, 0.25)


def _setup(model, **changes):
    given = {"schedule__grid": "explicit", "schedule__sigmas": LEVELS, "schedule__steps": 4}
    given |= {"sampling__guidance": presets.Guidance(1.0, 1.0), **changes}
    return states.sampling_setup(model, tiny.make_setup(model, **given).sampling)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The diffusers folder of a run that trained the high expert's full weights."""
    where = tmp_path_factory.mktemp("export")
    path = tiny.save_model(where)
    params, model = sample.load_model(path)
    note = sample.sampler_note(_setup(model))
    run = where / "run"
    run.mkdir()
    config = {"lora": {"rank": 0, "start": []}, "model": {"path": path}}
    checkpoint.write_json(run / "config.json", config)
    checkpoint.write_json(run / "sampler.json", note)
    trained = {"high": jax.tree.map(lambda x: x * 1.25, params["high"])}
    checkpoint.save(run, 7, {"trained": {"high": params["high"]}, "ema": trained}, {})
    (out,) = export.export(run, "diffusers", where / "student")
    return out


def test_the_folder_holds_the_averaged_weights_and_the_sampler(folder):
    params, model = sample.load_model(folder)
    base = tiny.parameters(0, tiny.MODEL)
    kernel = lambda tree: np.asarray(tree["blocks"]["attn1"]["to_q"]["kernel"])
    np.testing.assert_allclose(kernel(params["high"]), 1.25 * kernel(base["high"]), rtol=1e-6)
    np.testing.assert_array_equal(kernel(params["low"]), kernel(base["low"]))
    note = json.loads((folder / "wanjax.json").read_text())["sampler"]
    assert note == sample.sampler_note(_setup(model))
    assert note["sigmas"] == [1.0, 0.9, 0.75, 0.5] and note["boundary"] == 0.875
    assert note["guidance"] == {"high": 1.0, "low": 1.0} and note["solver"] == "euler"


def test_diffusers_gives_the_same_frames_under_the_levels_of_the_note(folder):
    params, model = sample.load_model(folder)
    setup = _setup(model, sampling__batch=1)
    note = json.loads((folder / "wanjax.json").read_text())["sampler"]
    ctx, null = tiny.contexts(1, 40)
    policy = {expert: (params[expert], {}) for expert in model.experts}
    ours = sample.generate(setup, policy, params["vae"], np.asarray(ctx), null, seed=3)
    noise = sampler.initial_noise(jax.random.key(3), jnp.arange(1), states.latent_shape(setup))

    pipe = diffusers.WanPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None)
    pipe.set_progress_bar_config(disable=True)
    plain = pipe.scheduler.set_timesteps
    pipe.scheduler.set_timesteps = functools.partial(plain, sigmas=note["sigmas"])
    theirs = pipe(
        prompt_embeds=torch.from_numpy(np.array(ctx)),
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=note["steps"],
        guidance_scale=1.0,
        latents=torch.from_numpy(np.asarray(noise).transpose(0, 4, 1, 2, 3).copy()),
        output_type="np",
    ).frames
    assert theirs.shape == ours.shape == (1, 5, 16, 16, 3)
    assert np.ptp(ours) > 20  # there is something to compare
    assert np.abs(np.round(theirs * 255) - ours).max() <= 1


def test_a_student_with_fresh_noise_gets_the_scheduler_that_renoises(folder, tmp_path):
    for name in ("wanjax.json", "model_index.json", "scheduler/scheduler_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    note = sample.sampler_note(_setup(tiny.MODEL, sampling__solver="renoise"))
    export._set_sampler(tmp_path, note)
    made = diffusers.FlowMatchLCMScheduler.from_pretrained(tmp_path / "scheduler")
    made.set_timesteps(sigmas=note["sigmas"])
    x, v = torch.ones(1, 3), torch.full((1, 3), 0.5)
    got = made.step(v, made.timesteps[1], x, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1, 3, generator=torch.Generator().manual_seed(0))
    want = 0.25 * (x - 0.9 * v) + 0.75 * noise
    np.testing.assert_allclose(got.prev_sample, want, rtol=1e-6)


def test_levels_survive_the_file_bit_for_bit():
    """Raw 500 at shift 7 is t = 875 exactly, where a rounding would change the expert."""
    plan = schedule.make_schedule("explicit", 4, 7.0, 0.875, LEVELS)
    setup = _setup(tiny.MODEL, schedule__shift=7.0)
    note = json.loads(json.dumps(sample.sampler_note(setup)))
    again = schedule.make_schedule("explicit", note["steps"], 1.0, note["boundary"], note["sigmas"])
    np.testing.assert_array_equal(again.sigmas, plan.sigmas)
    np.testing.assert_array_equal(again.expert, [1, 1, 1, 0])
