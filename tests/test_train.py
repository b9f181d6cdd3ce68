"""The trainer: config errors before anything compiles, exact resume from any interruption,
artefacts."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from convert import lora as convert_lora
from convert import weights
from tests import tiny
from wanjax import export, paths, sample, train, trees
from wanjax import setup as setups
from wanjax.algorithms import grpo, nft, sft
from wanjax.data import __main__ as data_command
from wanjax.data import latents
from wanjax.run import checkpoint, metrics


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def whole(model, tmp_path_factory):
    """The run that nothing interrupts."""
    return train.main(tiny.make_config(model, tmp_path_factory.mktemp("whole")))


def _lines(run):
    keep = lambda record: {
        name: value for name, value in record.items() if not name.startswith(("time/", "perf/"))
    }
    return [keep(record) for record in metrics.read(run)]


def _arrays(run, step=3):
    """Every array of a checkpoint by its path."""
    folder = run / f"checkpoints/step_{step:08d}"
    leaves = json.loads((folder / "MANIFEST.json").read_text())["body"]["leaves"]
    abstract = {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in leaves.items()}
    tree, _ = checkpoint.restore(run, step, abstract)
    return {path: np.asarray(leaf) for path, leaf in tree.items()}


def _same_run(a, b):
    assert _lines(a) == _lines(b)
    arrays_a, arrays_b = _arrays(a), _arrays(b)
    assert set(arrays_a) == set(arrays_b) and arrays_a
    for path, array in arrays_a.items():
        np.testing.assert_array_equal(array, arrays_b[path], err_msg=path)
    results = [json.loads((run / "evals/step_000003.json").read_text()) for run in (a, b)]
    assert results[0] == results[1]


@pytest.mark.parametrize("phase, step", [
    ("collect", 0), ("update", 1), ("checkpoint", 1), ("commit", 1), ("collect", 2),
    ("checkpoint", 2),
])  # fmt: skip
def test_a_run_interrupted_in_any_phase_ends_with_the_same_bits(
    whole, model, tmp_path, monkeypatch, phase, step
):
    config = tiny.make_config(model, tmp_path)
    owner, name = {
        "collect": (grpo, "collect"),
        "update": (grpo, "update"),
        "checkpoint": (checkpoint.Saver, "save"),
        "commit": (checkpoint, "_commit"),
    }[phase]
    original, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > (step if phase in ("collect", "update") else step - 1):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.main(config)
    _same_run(train.main(config), whole)


def test_experts_in_host_memory_train_to_the_same_bits(whole, model, tmp_path, monkeypatch):
    kinds, collect = set(), grpo.collect

    def spy(state, *args):
        kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(state.params["student"]))
        return collect(state, *args)

    monkeypatch.setattr(grpo, "collect", spy)
    _same_run(train.main(tiny.make_config(model, tmp_path, model__offload=True)), whole)
    assert kinds == {"pinned_host"}


@pytest.mark.slow
def test_sigkill_at_random_instants_ends_with_the_same_bits(whole, model, tmp_path):
    """Kill -9 a real process three times, then let it finish."""
    script = (
        "import sys; from tests import tiny; from wanjax import train; "
        "train.main(tiny.make_config(sys.argv[1], sys.argv[2]))"
    )
    root = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", script, model, str(tmp_path)]
    run, killed = tmp_path / "run", 0
    for wanted in (1, 2, 3):  # lines in metrics.jsonl at which the kill comes
        process = subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.DEVNULL)
        deadline = time.time() + 240
        while process.poll() is None and time.time() < deadline:
            if len(metrics.read(run)) >= wanted:
                break
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait(timeout=60)
    assert killed >= 2
    subprocess.run(command, env=env, cwd=root, check=True, stdout=subprocess.DEVNULL, timeout=240)
    _same_run(run, whole)


def test_a_finished_run_has_all_its_artefacts(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert {"reward_before", "reward_after", "seconds", "report", "steps"} <= set(summary)
    assert {"collect", "update", "eval", "checkpoint"} <= set(summary["seconds"])
    names = {path.name for path in (whole / "export").iterdir()}
    assert any("high_noise" in n for n in names) and any("low_noise" in n for n in names)
    assert "<video" in (whole / "report.html").read_text()
    for step in (0, 3):
        assert (whole / f"samples/step_{step:06d}/000.mp4").stat().st_size > 0
    assert [line["step"] for line in metrics.read(whole)] == [0, 1, 2]
    assert "grid simple" in (whole / "schedule.txt").read_text()


def test_starting_a_finished_run_again_changes_nothing(whole, model):
    before = (whole / "metrics.jsonl").read_bytes()
    train.main(tiny.make_config(model, whole.parent))
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_an_output_folder_of_another_config_is_refused(whole, model):
    config = tiny.make_config(model, whole.parent, optim__high__lr=5e-2)
    with pytest.raises(ValueError, match=r"optim.high.lr: 0.01 -> 0.05"):
        train.main(config)


def test_an_adapter_to_start_from_is_checked_before_weights(model, whole, tmp_path, monkeypatch):
    files = tuple(str(f) for f in sorted((whole / "export").glob("*.safetensors")))
    monkeypatch.delattr(weights, "load")
    with pytest.raises(ValueError, match="set config.lora.rank and targets to those it was"):
        train.main(tiny.make_config(model, tmp_path, lora__start=files, lora__rank=4))


def test_dry_run_writes_nothing(model, tmp_path, capsys):
    train.main(tiny.make_config(model, tmp_path), dry_run=True)
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    model, tmp_path, monkeypatch
):
    original = grpo.update

    def broken(state, setup, batch):
        state, values = original(state, setup, batch)
        return state, {**values, "grpo/loss/high": np.nan} if batch.version == 2 else values

    monkeypatch.setattr(grpo, "update", broken)
    with pytest.raises(FloatingPointError, match="step 2, phase update: grpo/loss/high is nan"):
        train.main(tiny.make_config(model, tmp_path))
    assert checkpoint.latest_good(tmp_path / "run") == 2


def test_the_command_line_reports_errors_in_one_line(model, tmp_path):
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "wanjax.train", "--config", "configs/quickstart.py"]
    for flags, text in (
        (["--config.sampling.shfit=3"], "shfit"),
        ([f"--config.model.path={tmp_path}/none", "--dry_run"], "none"),
    ):
        done = subprocess.run(
            [*command, *flags], cwd=root, capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0 and text in done.stderr, done.stderr


@pytest.mark.parametrize("dialect", ["diffusers", "comfyui", "kohya", "diffsynth"])
def test_a_run_exports_its_adapters_in_every_dialect(whole, model, tmp_path, dialect):
    paths = export.export(whole, dialect, tmp_path)
    assert len(paths) == 2 and all("run_" in path.name for path in paths)
    _, config = setups.load_model(model)
    again = convert_lora.load(paths, config)
    tree = _arrays(whole)
    for expert in ("high", "low"):
        for path, leaf in trees.flatten(again[expert]).items():
            if not path.endswith("scale"):
                want = tree[f"trained/{expert}/{path}"]
                np.testing.assert_allclose(leaf, want, rtol=1e-6, atol=1e-7)


def test_exporting_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        export.export(tmp_path, "diffusers", tmp_path)


# ------------------------------------------------------------------------------ places


@pytest.mark.slow
def test_a_run_in_a_store_ends_as_a_local_one_though_interrupted(
    whole, model, bucket, tmp_path, monkeypatch, capsys
):
    """Killed in its last step; what it leaves in the store is all that the next start has."""
    config = tiny.make_config(model, bucket / "runs")
    original = grpo.collect

    def interrupted(state, *args):
        if int(state.step) == 2:
            raise KeyboardInterrupt
        return original(state, *args)

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.main(config)
    run = train.main(config)
    assert str(run) == f"{bucket}/runs/run" and "resume   step 2 of" in capsys.readouterr().out
    _same_run(run, whole)
    names = lambda folder: {name.split("/")[0] for name in paths.files(folder)}
    assert names(run) == {path.name for path in whole.iterdir()}
    for name in ("samples/step_000003/000.mp4", "export/lora_high_noise.safetensors"):
        assert (run / name).read_bytes()[:64] == (whole / name).read_bytes()[:64]
    assert "<video" in (run / "report.html").read_text()
    for out in (tmp_path, run / "more"):
        files = export.export(run, "comfyui", out)
        again = convert_lora.load(files, setups.load_model(model)[1])
        for path, leaf in trees.flatten(again["high"]).items():
            if not path.endswith("scale"):
                np.testing.assert_allclose(leaf, _arrays(whole)[f"trained/high/{path}"], rtol=1e-6)
    assert paths.files(run / "more").keys() == paths.files(tmp_path).keys()


def test_a_home_folder_is_one_in_workdir(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny.make_config(model, "~/runs")
    assert train.main(config, dry_run=True) == tmp_path / "runs/run"


# ------------------------------------------------------------------------------ NFT


def _nft_config(model, workdir):
    own = dict(guidance__high=1.0, guidance__low=1.0, lora__targets=tiny.TARGETS)
    return tiny.make_config(model, workdir, algorithm="nft", **own)


@pytest.fixture(scope="module")
def nft_run(model, tmp_path_factory):
    """(NFT run that nothing interrupts, workdir with its disk as the last step began)."""
    folder, collect = tmp_path_factory.mktemp("nft"), nft.collect

    def spy(state, *args):
        if int(state.step) == 2:
            tiny.settle(folder / "run", 2)
            shutil.copytree(folder / "run", folder / "killed" / "run")
        return collect(state, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nft, "collect", spy)
        return train.main(_nft_config(model, folder)), folder / "killed"


def test_a_killed_nft_run_ends_with_the_same_bits(nft_run, model, capsys):
    """In its third step, whose rollouts follow old; trained, old and ema all differ by then."""
    run, folder = nft_run
    kept, names = _arrays(folder / "run", 2), ("trained", "old", "ema")
    moved = [p.removeprefix("trained/") for p in kept if p.startswith("trained/")]
    assert {path.split("/")[0] for path in moved} == {"high", "low"}
    for path in (path for path in moved if not path.endswith("/scale")):
        for one, other in itertools.combinations(names, 2):
            assert (kept[f"{one}/{path}"] != kept[f"{other}/{path}"]).any(), path
    again = train.main(_nft_config(model, folder))
    assert "resume   step 2 of" in capsys.readouterr().out
    _same_run(again, run)


def test_an_nft_run_exports_its_evaluation_average(nft_run, model, tmp_path):
    """By the trainer at its end and by the command alike; neither trained nor old."""
    run, _ = nft_run
    _, config = setups.load_model(model)
    arrays = _arrays(run)
    for files in (sorted((run / "export").iterdir()), export.export(run, "comfyui", tmp_path)):
        again = convert_lora.load(files, config)
        for expert in ("high", "low"):
            for path, leaf in trees.flatten(again[expert]).items():
                if path.endswith("scale"):
                    continue
                of = lambda name, path=f"{expert}/{path}": arrays[f"{name}/{path}"]
                np.testing.assert_allclose(leaf, of("ema"), rtol=1e-6, atol=1e-7)
                assert not np.allclose(leaf, of("trained"), 1e-2), path
                assert not np.allclose(leaf, of("old"), 1e-2)


# ------------------------------------------------------------------------------ clips


@pytest.fixture(scope="session")
def cached(model, tmp_path_factory):
    """A cache of clips of two codecs, 1 to 81 frames, 16 and 24 fps, made by the command."""
    folder = tmp_path_factory.mktemp("clips")
    clips = tiny.write_clips(folder / "clips")
    command = ["cache", str(clips), "--model", model, "--fps", "keep"]
    command += ["--frames", "1", "--frames", "5", "--frames", "49"]
    data_command.main([*command, "--size", "16x16", "--out", str(folder / "cache")])
    return folder / "cache"


def _sft_config(model, workdir, cache, **changes):
    shares = sorted(int(clip.digest[:8], 16) / 2**32 for clip in latents.read(cache).clips)
    assert len(shares) == 6
    own = dict(
        algorithm="sft", data__path=str(cache), data__batch=8, prompts="",
        data__holdout=(shares[0] + shares[1]) / 2,  # one clip
        eval__prompts="", micro_samples=8, sampling__batch=8, steps=2, save_every=1,
    )  # fmt: skip
    config = tiny.make_config(model, workdir, **own | changes)
    del config.reward["tests.tiny:brightness"]
    return config


def test_clips_become_adapters_and_videos_and_an_interrupted_run_has_the_same_bits(
    model, cached, tmp_path, monkeypatch
):
    run = train.main(_sft_config(model, tmp_path / "whole", cached))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["loss_after"] != summary["loss_before"] and "reward_after" not in summary
    evaluation = json.loads((run / "evals/step_000002.json").read_text())
    assert {"eval/loss/high", "eval/loss/low", "eval/t875-906.25/high"} <= set(evaluation)
    assert (run / "samples/step_000002/000.mp4").stat().st_size > 0
    page = (run / "report.html").read_text()
    assert "<video" in page and "validation loss" in page and "held-out clips went" in page
    assert "sft/loss/low" in metrics.read(run)[-1]

    files = sorted((run / "export").iterdir())
    assert len(files) == 2
    flags = [flag for file in files for flag in ("--lora", str(file))]
    sizes = ["--height", "16", "--width", "16", "--frames", "5", "--steps", "2"]
    out = tmp_path / "samples"
    sample.main(["--model", model, "--prompt", "red", "--out", str(out), *sizes, *flags])
    assert (out / "000.mp4").stat().st_size > 0

    config = _sft_config(model, tmp_path / "cut", cached)
    original, calls = sft.update, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sft, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.main(config)
    again = train.main(config)
    assert _lines(again) == _lines(run)
    want = _arrays(run, 2)
    for path, array in _arrays(again, 2).items():
        np.testing.assert_array_equal(array, want[path], err_msg=path)
    assert json.loads((again / "evals/step_000002.json").read_text()) == evaluation


@pytest.mark.parametrize("changes, text", [
    (dict(data__path=""), "config.data.path is empty"),
    (dict(data__path="none"), "none holds no cached clips"),
    (dict(data__holdout=1.5), "config.data.holdout 1.5"),
    (dict(data__first_frame=True), "config.data.first_frame is on"),
    (dict(data__batch=6), "a batch of 6 samples does not divide over mesh.data"),
    (dict(sft__density="beta"), "config.sft: timestep density is 'beta'"),
    (dict(algorithm="grpo", prompts="shapes:train:1"), "config.reward is empty"),
])  # fmt: skip
def test_errors_of_data_come_before_compiling(model, cached, tmp_path, changes, text):
    config = _sft_config(model, tmp_path, cached, **changes)
    with pytest.raises(ValueError, match=text) as error:
        train.main(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
