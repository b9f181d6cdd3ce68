"""The contract of an algorithm: every module keeps it, nothing outside reads more of a module, and
CONTRIBUTING's steps make one that trains, resumes, exports and can be planned."""

import ast
import inspect
import json
import pathlib

import numpy as np
import pytest

from tests import tiny
from tests.algorithms import toy
from wanjax import algorithms, export, train
from wanjax import setup as setups
from wanjax.algorithms import grpo
from wanjax.plan import compile
from wanjax.run import checkpoint, metrics

ROOT = pathlib.Path(__file__).parents[2]


def _names(protocol):
    return {name: own for name, own in vars(protocol).items() if not name.startswith("_")}


REQUIRED, EXTRAS = _names(algorithms.Algorithm), _names(algorithms.Extras)
CONTRACT = set(REQUIRED) | set(EXTRAS)


def breaches(module):
    """How a module fails the contract."""
    found = [f"{module.__name__} lacks {name}" for name in REQUIRED if not hasattr(module, name)]
    for name, wanted in {**REQUIRED, **EXTRAS}.items():
        own = getattr(module, name, None)
        if isinstance(wanted, property) or own is None:
            continue
        want = [p for p in inspect.signature(wanted).parameters if p != "self"]
        if (got := [*inspect.signature(own).parameters]) != want:
            found.append(f"{module.__name__}.{name} takes {got}, the contract says {want}")
    return found


def test_contributing_names_the_whole_contract():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in REQUIRED if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", setups.ALGORITHMS)
def test_every_algorithm_keeps_the_contract(name):
    assert breaches(setups.ALGORITHMS[name]) == []


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_an_algorithm_without_a_name_or_with_another_signature_is_found(name, monkeypatch):
    if name in REQUIRED:
        monkeypatch.delattr(grpo, name)
        assert breaches(grpo) == [f"wanjax.algorithms.grpo lacks {name}"]
        monkeypatch.undo()
    if not isinstance((REQUIRED | EXTRAS)[name], property):
        monkeypatch.setattr(grpo, name, lambda anything: None, raising=False)
        assert f"grpo.{name} takes ['anything']" in "".join(breaches(grpo))


def reads(source):
    """Names beyond the contract that a source reads of an algorithm's module."""
    tree, aliases, found = ast.parse(source), {"algorithm"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "wanjax.algorithms":
            known = {a.name: a.asname or a.name for a in node.names}
            aliases |= {alias for name, alias in known.items() if name in setups.ALGORITHMS}
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("wanjax.algorithms.")
            if module in setups.ALGORITHMS:
                found += [f"{module}.{a.name}" for a in node.names if a.name not in CONTRACT]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in aliases and node.attr not in CONTRACT:
                found.append(f"{node.value.id}.{node.attr}")
    return found


def test_nothing_outside_reads_more_of_an_algorithm_than_the_contract():
    for folder in ("wanjax", "convert", "configs", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.name != "algorithms":
                assert reads(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize("source, found", [
    ("from wanjax.algorithms import grpo\ngrpo._rollout()", "grpo._rollout"),
    ("from wanjax.algorithms import dmd2 as d\nx = d.SOLVERS", "d.SOLVERS"),
    ("from wanjax.algorithms.nft import _noised", "nft._noised"),
    ("algorithm = setup.ALGORITHMS[name]\nalgorithm.LOSSES", "algorithm.LOSSES"),
])  # fmt: skip
def test_a_name_beyond_the_contract_is_found(source, found):
    assert reads(source) == [found]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def registered(monkeypatch):
    """The toy in ALGORITHMS, which is all that CONTRIBUTING asks for beside the module."""
    monkeypatch.setitem(setups.ALGORITHMS, "toy", toy)
    assert breaches(toy) == []


def _lines(run):
    machine = ("time/", "perf/")
    return [{k: v for k, v in r.items() if not k.startswith(machine)} for r in metrics.read(run)]


def test_an_algorithm_added_as_contributing_says_trains_resumes_and_exports(
    registered, model, tmp_path
):
    config = dict(algorithm="toy", lora__targets=tiny.TARGETS, steps=2, save_every=1, keep_last=9)
    config |= dict(prompts_per_step=8, group_size=2)  # eight best clips for eight devices
    whole = train.main(tiny.make_config(model, tmp_path / "whole", **config))
    train.main(tiny.make_config(model, tmp_path / "cut", **config | {"steps": 1}))
    resumed = train.main(tiny.make_config(model, tmp_path / "cut", **config))
    assert _lines(resumed) == _lines(whole) and len(_lines(whole)) == 2
    states = [checkpoint.restore(r, 2, checkpoint.abstract(r, 2))[0] for r in (whole, resumed)]
    for path, array in states[0].items():
        np.testing.assert_array_equal(states[1][path], array, err_msg=path)
    assert all(f"toy/loss/{expert}" in _lines(whole)[0] for expert in ("high", "low"))
    assert json.loads((whole / "summary.json").read_text())["steps"] == 2
    assert len(export.export(whole, "diffusers", tmp_path / "out")) == 2


def test_the_planner_compiles_the_programs_of_an_added_algorithm(registered, model, tmp_path):
    config = tiny.make_config(model, tmp_path, algorithm="toy", lora__targets=tiny.TARGETS)
    plan = compile.make_plan(config, "cpu:1")
    step = {name for name, phase in plan["phases"].items() if phase["calls"]}
    assert step == {"rollout", "decode", "update high", "update low"}
    assert plan["fits"] and all(plan["phases"][name]["flops"] > 0 for name in step - {"decode"})


def test_settings_that_the_added_algorithm_refuses_come_before_weights(registered, model, tmp_path):
    config = tiny.make_config(model, tmp_path, algorithm="toy", group_size=1)
    with pytest.raises(ValueError, match="config.group_size is 1"):
        train.main(config)
