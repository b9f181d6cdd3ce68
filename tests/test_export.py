"""Export of full weights, which say how they are sampled, and of adapters with dense changes."""

import functools
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import lora
from tests import tiny
from wanjax import checkpoint, export, sample, sampler, schedule, train, trees
from wanjax import state as states
from wanjax.models import lora as lora_layers
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


def test_dense_changes_of_an_imported_adapter_stay_frozen_beside_the_trained_pairs(tmp_path):
    """They are added to the base that is sampled and trained, and come out as they came in."""
    model = tiny.save_model(tmp_path / "model")
    plain, config = sample.load_model(model)
    rng = np.random.default_rng(0)
    dense = {
        "blocks.1.attn1.to_q.bias": rng.normal(size=32).astype(np.float32),
        "blocks.0.norm2.weight": rng.normal(size=32).astype(np.float32),
        "blocks.0.scale_shift_table": rng.normal(size=(1, 6, 32)).astype(np.float32),
    }
    pairs = {expert: lora_layers.init(jax.random.key(1), plain[expert], rank=2, alpha=4.0)
             for expert in config.experts}  # fmt: skip
    pairs = trees.map_paths(lambda path, x: x + 0.1 if path.endswith("/b") else x, pairs)
    adapter = lora.of_trees(pairs)
    adapter.dense = {"high": dense}
    files = lora.write(adapter, tmp_path / "imported", "comfyui")
    with pytest.raises(ValueError, match="3 changes are not low-rank"):
        lora.load(files, config)

    changed, _ = sample.load_model(model, adapters=[(files, None, 2.0)])
    moved = jax.tree.map(lambda a, b: np.asarray(a - b), changed, plain)
    layers = moved["high"]["blocks"]
    want = dict.fromkeys(("attn1/to_q/bias", "norm2/scale", "scale_shift_table"))
    found = {path: leaf for path, leaf in trees.flatten(layers).items() if leaf.any()}
    assert set(found) == set(want), found.keys()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(found["attn1/to_q/bias"][1], 2 * dense["blocks.1.attn1.to_q.bias"])
    close(found["norm2/scale"][0], 2 * dense["blocks.0.norm2.weight"])
    close(found["scale_shift_table"][0].ravel(), 2 * dense["blocks.0.scale_shift_table"].ravel())
    assert not any(leaf.any() for name in moved.keys() - {"high"}
                   for leaf in jax.tree.leaves(moved[name]))  # fmt: skip

    run = tiny.make_config(
        model, tmp_path, steps=1, lora__start=[str(path) for path in files],
        optim__high__lr=0.0, optim__low__lr=0.0,
    )  # fmt: skip
    train.main(run)
    for dialect in ("kohya", ""):
        export.export(tmp_path / "run", dialect, tmp_path / f"again{dialect}")
    assert "diffusion_model." in next((tmp_path / "again").glob("*")).read_bytes().decode("latin1")
    for folder in (tmp_path / name for name in ("run/export", "againkohya", "again")):
        got = lora.read(sorted(folder.glob("*.safetensors")))
        for expert in config.experts:
            deltas, before = got.deltas(expert), adapter.deltas(expert)
            assert set(deltas) == set(before)
            for name, value in before.items():
                np.testing.assert_allclose(deltas[name], value, rtol=1e-6, atol=1e-7)

    # the trainer's first videos are those of the base with both kinds of change
    once, _ = sample.load_model(model, adapters=[(files, None, 1.0)])
    policy = {expert: (once[expert], pairs[expert]) for expert in config.experts}
    setup = train.make_setup(run, config, {})
    encode = sample.make_encoder(config, plain, ["", "red circle", "blue circle"])
    texts, videos = ["red circle", "blue circle"], {}
    for name, tree in (("with", policy), ("without", {e: (plain[e], pairs[e]) for e in pairs})):
        videos[name] = sample.generate(
            setup, tree, plain["vae"], encode(texts), jnp.asarray(encode([""])), seed=run.eval.seed
        )
    score = {name: tiny.brightness(made, texts, None)[0].mean() for name, made in videos.items()}
    evals = json.loads((tmp_path / "run/evals/step_000000.json").read_text())
    assert evals["eval/reward"] == pytest.approx(score["with"], abs=1e-4)
    assert abs(score["with"] - score["without"]) > 1e-3
