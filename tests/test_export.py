"""Export of full weights, which say how they are sampled, and of adapters with dense changes."""

import functools
import json
import os
import pathlib
import re
import shutil

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch

from convert import digest, disk, few_step, layouts, load, lora, save
from convert.lora import adapter as adapters
from convert.lora import read, write
from tests import tiny
from wanjax import export, sample, sampler, sampling, schedule, train, trees
from wanjax import setup as setups
from wanjax.data import text, video
from wanjax.models import lora as lora_layers
from wanjax.models import presets
from wanjax.run import checkpoint
from wanjax.run import disk as run_disk

LEVELS = (1.0, 0.75, 0.5, 0.25)
README = pathlib.Path(__file__).parents[1] / "convert/README.md"
SIZE = ("--prompt", "red circle", "--height", "16", "--width", "16", "--frames", "5", "--seed", "3")


def _setup(model, **changes):
    given = {"schedule__grid": "explicit", "schedule__sigmas": LEVELS, "schedule__steps": 4}
    given |= {"sampling__guidance": presets.Guidance(1.0, 1.0), **changes}
    return tiny.make_setup(model, **given)


def _run(folder, model, note, rank, **trees):
    """A folder that is as much of a DMD2 run as an export reads."""
    (run := folder / "run").mkdir(parents=True)
    config = {"lora": {"rank": rank, "start": []}, "model": {"path": model}, "algorithm": "dmd2"}
    run_disk.write_json(run / "config.json", config)
    run_disk.write_json(run / "sampler.json", note)
    checkpoint.save(run, 7, trees, {})
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(path, params, ModelConfig) of the random two-expert model."""
    path = tiny.save_model(tmp_path_factory.mktemp("base"))
    return path, *setups.load_model(path)


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """The diffusers folder of a run that trained the high expert's full weights."""
    path, params, model = base
    where, high = tmp_path_factory.mktemp("export"), params["high"]
    trained = {"high": jax.tree.map(lambda x: x * 1.25, high)}
    note = sampling.note(_setup(model).sampling)
    run = _run(where, path, note, 0, trained={"high": high}, ema=trained)
    (out,) = export.export(run, "diffusers", where / "student")
    return out


@pytest.mark.parametrize("layout", ["diffusers", "comfyui", "orbax"])
def test_an_export_reads_what_it_writes_and_the_rest_passes_byte_for_byte(
    base, tmp_path, monkeypatch, layout
):
    """No optimizer state, no other average, nothing on a device; from a base of any layout."""
    path, params, model = base
    if layout != "diffusers":
        layouts.write(disk.read(path), tmp_path / layout, layout)
        path = tmp_path / layout
    ema = {"high": jax.tree.map(lambda x: x * 1.25, params["high"])}
    state = {"trained": {"high": params["high"]}, "ema": ema, "moments": {"high": params["high"]}}
    run = _run(tmp_path, str(path), sampling.note(_setup(model).sampling), 0, **state)
    asked, original = [], ocp.args.PyTreeRestore
    spy = lambda item, *args, **given: asked.append(item) or original(item, *args, **given)
    monkeypatch.setattr(ocp.args, "PyTreeRestore", spy)
    monkeypatch.setattr(load, "place", None)
    (out,) = export.export(run, "diffusers", tmp_path / "out")
    monkeypatch.undo()
    leaves = [path for item in asked for path in item if "/" in path]
    assert leaves and all(path.startswith("ema/high/") for path in leaves)
    assert len(asked) == 1 or layout == "orbax"
    same = {n: digest.component(out, n) == digest.component(base[0], n)
            for n in ("vae", "text_encoder", "low", "high")}  # fmt: skip
    assert same == {"vae": True, "text_encoder": True, "low": True, "high": False}
    tiny_kernel = lambda tree: np.asarray(tree["blocks"]["attn1"]["to_q"]["kernel"])
    got = tiny_kernel(setups.load_model(out)[0]["high"])
    np.testing.assert_allclose(got, 1.25 * tiny_kernel(params["high"]), rtol=1e-6)


def _with_solver(folder, out, **changes):
    """A copy of a student's folder (weights linked) that says another sampler."""
    shutil.copytree(folder, out, copy_function=os.symlink)
    for name in ("wanjax.json", "model_index.json", "scheduler/scheduler_config.json"):
        (out / name).unlink()
        (out / name).write_bytes((folder / name).read_bytes())
    (out / "scheduler/few_step.py").unlink()
    note = sampling.note(_setup(tiny.MODEL, **changes).sampling)
    save.write_sampler(out, {"sampler": note, "few_step": export._few_step(note)})
    return out


def _ours(monkeypatch, out, *flags):
    """Frames that `python -m wanjax.sample` shows with these flags alone."""
    shown = []
    monkeypatch.setattr(video, "write_mp4", lambda path, frames, fps: shown.append(frames))
    sample.main([*flags, *SIZE, "--out", str(out)])
    return shown[0]


def _theirs(monkeypatch, cache, number, names):
    """Frames of a piece of code in convert/README.md, the names in it replaced, from our noise."""
    monkeypatch.setattr(diffusers.utils.dynamic_modules_utils, "HF_MODULES_CACHE", str(cache))
    key, ids, shape = jax.random.key(3), jnp.arange(1), (2, 2, 2, 4)
    draws = iter(range(5))

    def noise(*args, **given):
        drawn = sampler._noise(key, ids, next(draws), shape)
        return torch.from_numpy(np.asarray(drawn).transpose(0, 4, 1, 2, 3).copy())

    size = dict(height=16, width=16, num_frames=5, max_sequence_length=tiny.WAN.text_len)
    call = functools.partialmethod(diffusers.WanPipeline.__call__, latents=noise(), **size)
    monkeypatch.setattr(diffusers.WanPipeline, "__call__", call)
    euler = diffusers.schedulers.scheduling_flow_match_euler_discrete
    monkeypatch.setattr(euler, "randn_tensor", noise)  # of fresh noise a step
    code = re.findall(r"```python\n(.+?)```", README.read_text(encoding="utf-8"), re.DOTALL)[number]
    for name, given in {"PROMPT": "red circle", **names}.items():
        assert f'"{name}' in code
        code = code.replace(f'"{name}', f'"{given}')
    exec(code, scope := {})
    return scope["video"]


def _assert_same_frames(theirs, ours):
    assert theirs.shape == ours.shape == (5, 16, 16, 3)
    assert np.ptp(ours.astype(int)) > 20  # there is something to compare
    # ours are rounded to whole levels of 255; before that they differ by 2e-3 at most
    assert np.abs(theirs * 255 - ours).max() <= 0.5 + 255 * 2e-3


def test_the_folder_holds_the_averaged_weights_and_the_sampler(base, folder):
    params, model = setups.load_model(folder)
    kernel = lambda tree: np.asarray(tree["blocks"]["attn1"]["to_q"]["kernel"])
    np.testing.assert_allclose(kernel(params["high"]), 1.25 * kernel(base[1]["high"]), rtol=1e-6)
    np.testing.assert_array_equal(kernel(params["low"]), kernel(base[1]["low"]))
    note = json.loads((folder / "wanjax.json").read_text())["sampler"]
    assert note == sampling.note(_setup(model).sampling)
    assert note["sigmas"] == [1.0, 0.9, 0.75, 0.5] and note["boundary"] == 0.875
    assert note["guidance"] == {"high": 1.0, "low": 1.0} and note["solver"] == "euler"


@pytest.mark.parametrize("solver", ["euler", "renoise"])
def test_diffusers_runs_a_students_folder_as_wanjax_does(folder, tmp_path, monkeypatch, solver):
    """By the lines of convert/README.md; of fresh noise, both get the same."""
    student = _with_solver(folder, tmp_path / "student", sampling__solver=solver)
    ours = _ours(monkeypatch, tmp_path, "--model", str(student))
    theirs = _theirs(monkeypatch, tmp_path / "modules", 0, {"STUDENT": student})
    _assert_same_frames(theirs, ours)


def test_a_students_sampler_survives_every_layout(folder, tmp_path):
    at = folder
    for layout in ("original", "comfyui", "diffusers"):
        layouts.write(disk.read(at), tmp_path / layout, layout)
        at = tmp_path / layout
    for name in ("wanjax.json", "model_index.json", "scheduler/scheduler_config.json"):
        said = [json.loads((where / name).read_text()) for where in (folder, at)]
        assert said[0] == said[1]
    assert (at / "scheduler/few_step.py").is_file()


@pytest.mark.parametrize("solver", ["euler", "renoise"])
def test_diffusers_runs_a_students_adapters_as_wanjax_does(base, tmp_path, monkeypatch, solver):
    """By the lines of convert/README.md: the files and their base, nothing else."""
    path, params, model = base
    adapters = {
        expert: trees.map_paths(
            lambda path, x: x + 0.1 if path.endswith("/b") else x,
            lora_layers.init(jax.random.key(i), params[expert], rank=2, alpha=4.0),
        )
        for i, expert in enumerate(model.experts)
    }
    changes = dict(sampling__solver=solver, schedule__boundary=0.95)  # the base has 0.875
    note = sampling.note(_setup(model, **changes).sampling)
    run = _run(tmp_path, path, note, 2, trained=adapters)
    files = export.export(run, "diffusers", tmp_path)
    flags = [flag for file in files for flag in ("--lora", str(file))]
    ours = _ours(monkeypatch, tmp_path, "--model", path, *flags)
    theirs = _theirs(monkeypatch, tmp_path, 1, {"BASE": path, "x_": f"{tmp_path}/run_"})
    _assert_same_frames(theirs, ours)


def test_the_students_scheduler_has_the_levels_in_float32_and_refuses_other_steps(folder):
    made = few_step.FewStepScheduler.from_pretrained(folder / "scheduler")
    made.set_timesteps(4)
    np.testing.assert_array_equal(made.sigmas, np.float32([1.0, 0.9, 0.75, 0.5, 0.0]))
    np.testing.assert_array_equal(made.timesteps, np.float32([1000, 900, 750, 500]))
    with pytest.raises(ValueError, match="is 50 .* pass num_inference_steps=4$"):
        made.set_timesteps(50)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        diffusers.WanPipeline.from_pretrained(folder)


@pytest.mark.parametrize("changes", [
    dict(schedule__sigmas=(1.0, 0.8, 0.7, 0.3)),  # 0.7 at shift 3 is 0.875 less a rounding
    dict(schedule__sigmas=(1.0, 0.5, 0.3, 0.1), schedule__shift=7.0),  # 0.5 at 7 is on 0.875
    dict(schedule__grid="simple", schedule__sigmas=None),
    dict(schedule__grid="unipc", schedule__sigmas=None, schedule__steps=8),  # integer t
])  # fmt: skip
def test_diffusers_takes_the_students_levels_and_experts_of_any_list(folder, tmp_path, changes):
    student = _with_solver(folder, tmp_path / "student", **changes)
    plan = _setup(tiny.MODEL, **changes).sampling.schedule
    made = few_step.FewStepScheduler.from_pretrained(student / "scheduler")
    made.set_timesteps(plan.steps)
    np.testing.assert_allclose(made.sigmas, plan.sigmas, rtol=1e-7)
    np.testing.assert_allclose(made.timesteps, plan.timesteps, rtol=1e-7)
    boundary = json.loads((student / "model_index.json").read_text())["boundary_ratio"]
    assert [bool(t >= boundary * 1000) for t in made.timesteps] == plan.expert.tolist()
    assert boundary == 0.875


def test_levels_survive_the_file_bit_for_bit():
    """Raw 500 at shift 7 is t = 875 exactly, where a rounding would change the expert."""
    plan = schedule.make_schedule("explicit", 4, 7.0, 0.875, LEVELS)
    setup = _setup(tiny.MODEL, schedule__shift=7.0)
    note = json.loads(json.dumps(sampling.note(setup.sampling)))
    again = schedule.make_schedule("explicit", note["steps"], 1.0, note["boundary"], note["sigmas"])
    np.testing.assert_array_equal(again.sigmas, plan.sigmas)
    np.testing.assert_array_equal(again.expert, [1, 1, 1, 0])


def test_dense_changes_of_an_imported_adapter_stay_frozen_beside_the_trained_pairs(tmp_path):
    """They are added to the base that is sampled and trained, and come out as they came in."""
    model = tiny.save_model(tmp_path / "model")
    plain, config = setups.load_model(model)
    rng = np.random.default_rng(0)
    dense = {
        "blocks.1.attn1.to_q.bias": rng.normal(size=32).astype(np.float32),
        "blocks.0.norm2.weight": rng.normal(size=32).astype(np.float32),
        "blocks.0.scale_shift_table": rng.normal(size=(1, 6, 32)).astype(np.float32),
    }
    pairs = {expert: lora_layers.init(jax.random.key(1), plain[expert], rank=2, alpha=4.0)
             for expert in config.experts}  # fmt: skip
    pairs = trees.map_paths(lambda path, x: x + 0.1 if path.endswith("/b") else x, pairs)
    adapter = adapters.of_trees(pairs)
    adapter.dense = {"high": dense}
    files = write.write(adapter, tmp_path / "imported", "comfyui")
    with pytest.raises(ValueError, match="3 changes are not low-rank"):
        lora.load(files, config)

    changed, _ = setups.load_model(model, adapters=[(files, None, 2.0)])
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
        got = read.read(sorted(folder.glob("*.safetensors")))
        for expert in config.experts:
            deltas, before = got.deltas(expert), adapter.deltas(expert)
            assert set(deltas) == set(before)
            for name, value in before.items():
                np.testing.assert_allclose(deltas[name], value, rtol=1e-6, atol=1e-7)

    # the trainer's first videos are those of the base with both kinds of change
    once, _ = setups.load_model(model, adapters=[(files, None, 1.0)])
    policy = {expert: (once[expert], pairs[expert]) for expert in config.experts}
    setup = setups.make(run, config, {})
    encode = text.Encoder(config, ["", "red circle", "blue circle"], plain["text_encoder"])
    texts, videos = ["red circle", "blue circle"], {}
    for name, tree in (("with", policy), ("without", {e: (plain[e], pairs[e]) for e in pairs})):
        videos[name] = sampling.generate(
            tree, plain["vae"], encode(texts), jnp.asarray(encode([""])),
            model=config, plan=setup.sampling, seed=run.eval.seed,
        )  # fmt: skip
    score = {name: tiny.brightness(made, texts, None)[0].mean() for name, made in videos.items()}
    evals = json.loads((tmp_path / "run/evals/step_000000.json").read_text())
    assert evals["eval/reward"] == pytest.approx(score["with"], abs=1e-4)
    assert abs(score["with"] - score["without"]) > 1e-3
