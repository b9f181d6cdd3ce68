"""scripts/*.sh set up once, then only run; a stub stands in for Python: nothing is installed."""

import os
import pathlib
import shutil
import subprocess

import pytest

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
