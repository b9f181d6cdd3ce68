"""scripts/*.sh set up once, then only run; a stub stands in for Python: nothing is installed.
fullsize.sh runs whole, on a tiny model."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from convert import weights
from wanjax import trees
from wanjax.rewards import clip_score
from wanjax.run import metrics

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci/run"]

# Logs its arguments; "-m venv DIR" puts a copy of itself there; "-c" goes to the real Python.
STUB = """#!/bin/bash
if [ "$1" = -c ]; then exec python3 "$@"; fi
if [ "$1" = --version ]; then echo Python 3.14.15; exit; fi
echo "$*" >> calls
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case "$*" in *"$FAIL"*) exit 3;; esac
"""
INSTALL = "-m pip install --disable-pip-version-check --progress-bar off -q -e "
TRAIN = "-m wanjax.train --config configs/quickstart.py"


@pytest.fixture
def project(tmp_path):
    """A copy of the scripts beside a pyproject.toml and a stub interpreter."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    return tmp_path


def run(project, script, *args, cwd=None, fail="nothing"):
    """Run a script; return its exit code, its output and the stub's calls."""
    env = {**os.environ, "PYTHON": str(project / "stub"), "FAIL": fail}
    command = ["bash", str(project / "scripts" / script), *args]
    done = subprocess.run(command, env=env, cwd=cwd or project, capture_output=True, text=True)
    calls = project / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, lines


def test_quickstart_sets_up_once_and_passes_arguments_on(project):
    code, output, calls = run(project, "quickstart.sh")
    assert code == 0 and calls == ["-m venv .venv", INSTALL + ".", TRAIN]
    assert "+ .venv/bin/python " + TRAIN in output
    _, _, calls = run(project, "quickstart.sh", "--config.steps=2", "--dry_run", cwd="/")
    assert calls == [TRAIN + " --config.steps=2 --dry_run"]


def test_a_changed_pyproject_is_installed_again(project):
    run(project, "quickstart.sh")
    (project / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    assert run(project, "quickstart.sh")[2] == [INSTALL + ".", TRAIN]
    assert run(project, "quickstart.sh")[2] == [TRAIN]


def test_test_script_adds_the_dev_extras_which_also_serve_to_run(project):
    run(project, "quickstart.sh")
    checks = [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m pyright",
        "-m pytest -n 2 --dist worksteal",
    ]
    assert run(project, "test.sh")[2] == [INSTALL + ".[dev]", *checks]
    assert run(project, "test.sh", "-k", "vae")[2] == [
        *checks[:-1],
        "-m pytest -n 2 --dist worksteal -k vae",
    ]
    assert run(project, "quickstart.sh")[2] == [TRAIN]


@pytest.mark.parametrize("step", ["ruff check", "ruff format", "pyright", "pytest"])
def test_the_first_failing_check_fails_the_test_script(project, step):
    code, _, calls = run(project, "test.sh", fail=step)
    assert code == 3 and step in calls[-1]


def test_an_interrupted_installation_is_repeated(project):
    code, _, calls = run(project, "quickstart.sh", fail="pip install")
    assert code == 3 and calls[-1] == INSTALL + "."
    assert run(project, "quickstart.sh")[2] == [INSTALL + ".", TRAIN]


def test_an_old_python_is_refused_in_one_line(project):
    (project / "stub").write_text(
        STUB.replace('exec python3 "$@"', "exit 1").replace("3.14.15", "3.9.2")
    )
    code, output, calls = run(project, "quickstart.sh")
    assert code == 1 and calls == []
    assert "needs Python 3.11 or newer" in output and "Python 3.9.2" in output


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_short_strict_and_parse(path):
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert len(text.splitlines()) <= (80 if path.parent.name == "launch" else 60)
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)


def make_random(*arguments):
    """Run scripts/make_random_model.py; return its exit code and its output."""
    command = [sys.executable, str(ROOT / "scripts/make_random_model.py"), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_random_models_load_and_depend_on_the_seed_alone(tmp_path):
    found = {}
    for name, *more in [("a",), ("b",), ("c", "--seed", 1), ("d", "--dtype", "bfloat16")]:
        code, output = make_random("--model", tmp_path / name, "--small", "--layers", 3, *more)
        assert code == 0, output
        params, config = weights.load(tmp_path / name, dtype="float32")
        found[name] = trees.flatten(params)
        assert config.name == "wan2.2_t2v_a14b" and config.boundary == 0.875
        assert config.experts == ("high", "low") and config.sampling.shift == 12.0
    kernels = [p for p in found["a"] if p.endswith("/kernel") and "/blocks/" in f"/{p}"]
    assert len(kernels) == 20  # of ten layers in each expert
    for path in kernels:
        a = np.asarray(found["a"][path])
        fan_in = a.shape[-2]
        assert len(a) == 3 and abs(a.std() * fan_in**0.5 - 1) < 0.1 and abs(a.mean()) < 0.02
        np.testing.assert_array_equal(a, found["b"][path])
        assert np.abs(a - found["c"][path]).max() > 0.1
        # e4m3 has three bits after the point, and steps of 2^-9 near zero
        np.testing.assert_allclose(a, found["d"][path], rtol=2**-4, atol=2**-10)
    code, output = make_random("--model", tmp_path / "a", "--small")
    assert code == 1 and output.splitlines()[-1].startswith("make_random_model: ")
    assert "not empty" in output


def test_a_random_tower_scores_videos_and_texts_apart(tmp_path, rng):
    code, output = make_random("--tower", tmp_path / "tower", "--small")
    assert code == 0, output
    reward = clip_score.pickscore(str(tmp_path / "tower"))
    video = rng.integers(0, 256, (4, 2, 32, 32, 3), dtype=np.uint8)
    score_B, _ = reward(video, ["a red cat", "a red cat", "a dog", "Ä"], None)
    # |cos| <= 1 and the scale of PickScore is 100 / 26
    assert np.abs(score_B).max() <= 100 / 26 and np.diff(np.sort(score_B)).min() > 1e-4


@pytest.mark.slow
def test_fullsize_is_killed_resumed_exported_and_sampled_on_a_tiny_model(tmp_path):
    """Also: the same command again runs nothing but the table."""
    tiny = {
        "group_size": 4, "micro_samples": 4, "sampling.steps": 6, "guidance.high": 1.0,
        "guidance.low": 1.0, "model.remat": "none", "lora.targets": "('blocks/attn1/to_q',)",
    }  # fmt: skip
    tiny |= dict.fromkeys([f"model.{x}dtype" for x in ("", "param_", "vae_", "text_")], "float32")
    flags = [f"--config.{key}={value}" for key, value in tiny.items()]
    command = ["bash", str(ROOT / "scripts/fullsize.sh"), str(tmp_path), *flags]
    one_device = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    env = {
        **os.environ, "PYTHON": sys.executable, "MODEL_ARGS": "--small --layers 1",
        "SIZE": "32x32", "XLA_FLAGS": one_device,
    }  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = [line.split()[:2] for line in (tmp_path / "stages.txt").read_text().splitlines()]
    wanted = ["train", "resume", "export", "sample"]
    assert stages == [["make", "model"], ["make", "tower"], *(["grpo", stage] for stage in wanted)]
    assert "| grpo | resume |" in (tmp_path / "fullsize.md").read_text()
    assert "Killed" in (tmp_path / "grpo-train.log").read_text()
    lines = metrics.read(tmp_path / "runs/grpo")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["reward/std"] > 1e-3 and line["grad_norm/high"] > 0 for line in lines)
    assert (tmp_path / "samples/grpo/000.mp4").stat().st_size > 0
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert again.returncode == 0 and "+ " not in again.stdout and "| grpo |" in again.stdout


def test_fullsize_says_in_one_line_which_stage_failed(tmp_path):
    (tmp_path / "stub").write_text("#!/bin/bash\necho one\necho the disk is full >&2\nexit 3\n")
    (tmp_path / "stub").chmod(0o755)
    env = {**os.environ, "PYTHON": str(tmp_path / "stub")}
    command = ["bash", str(ROOT / "scripts/fullsize.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "make model ended with exit code 3: the disk is full" in done.stderr
    assert not (tmp_path / "out/stages.txt").exists()
    done = subprocess.run(command[:2], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "expected a folder" in done.stderr
