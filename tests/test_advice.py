"""What a message says to change is accepted when the run continues.

Each message is made by the code that gives it, read for the keys it names, and followed on a run
that has a checkpoint.
"""

import ast
import fnmatch
import json
import math
import pathlib
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

import wanjax
from configs import default
from tests import tiny
from wanjax import report, rewards, setup, train, trees
from wanjax.algorithms import grpo
from wanjax.data import prompts
from wanjax.models import wan
from wanjax.plan import __main__ as plan
from wanjax.plan import advice
from wanjax.rewards import http
from wanjax.run import alarms, checkpoint, guard, metrics

KEYS = trees.dotted(default.get_config().to_dict())
VIDEO = np.zeros((1, 1, 2, 2, 3), np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run of two steps, with a checkpoint after each."""
    config = tiny.make_config(model, tmp_path_factory.mktemp("whole"), steps=2, save_every=1)
    return train.main(config)


@pytest.fixture
def started(whole, model, tmp_path):
    """The config of a run of two steps that was stopped after one."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000002")
    for name in ("evals/step_000002.json", "summary.json"):
        (tmp_path / "run" / name).unlink()
    return tiny.make_config(model, tmp_path, steps=2, save_every=1)


def _set(config, changes: dict):
    """The config with dotted keys changed."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    return config


def _start(run_dir, config) -> None:
    """What a start asks before it works: is the run continued with this config?"""
    setup.check(config.to_dict())
    assert guard.claim(
        run_dir, config.to_dict(), config.resume, default.get_config().to_dict(),
        allow=config.allow_changes,
    )  # fmt: skip
    lines = prompts.load_prompts(config.prompts)
    stream = prompts.PromptStream(lines, config.prompts_per_step, config.seed)
    manifest = run_dir / f"checkpoints/step_{checkpoint.latest_good(run_dir):08d}/MANIFEST.json"
    saved = json.loads(manifest.read_text())["body"]["meta"]["data"]
    assert stream.resume(saved, config.allow_changes) == saved["step"]


def _named(message: str) -> set[str]:
    """The keys that a message names, without those of flags that it writes out."""
    return {key.rstrip(".") for key in re.findall(r"(?<!--)config\.(\w[\w.]*)", message)}


def _flags(message: str) -> dict:
    """{key: value} of the flags that a message writes out."""
    return {key: ast.literal_eval(v) for key, v in re.findall(r"--config\.([\w.]+)=(\w+)", message)}


def _said(call, *args, **kwargs) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  (each is matched by its keys)
        call(*args, **kwargs)
    return str(error.value)


def slow(video_BTHWC, prompts, meta):
    """A reward that gives no answer in time."""
    time.sleep(0.5)


def _full_disk(folder, monkeypatch) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
        return _said(checkpoint._make_room, folder, {"w": np.zeros(9)})


def _messages(tmp_path, monkeypatch) -> list[tuple[str, list[dict]]]:
    """(message, changes that follow it, one way each) of all that a run may say once it began."""
    lost = {name: (7, {name: math.nan}) for name in ("loss/low", "loss", "critic/loss/high")}
    scored = rewards.combine(["tests.test_advice:slow"], 0.01)
    alarm = alarms.watch({"reward/mean": (0.0, 1.0)}, 1)({"reward/mean": 2.0})[0]
    gathers, reduces = ({"collectives": {k: {"bytes": 1}}} for k in ("all-gather", "all-reduce"))
    claimed = _said(guard.claim, tmp_path / "run", {}, False)
    rates = {f"optim.{expert}.lr": 1e-3 for expert in ("high", "low")}
    return [
        (_said(train._check_finite, lost["loss/low"], 1), [{"optim.low.lr": 1e-3}, {"seed": 1}]),
        (_said(train._check_finite, lost["loss"], 0), [rates, {"seed": 1}]),
        (
            _said(train._check_finite, lost["critic/loss/high"], 1),
            [{"roles.critic.optim.high.lr": 1e-5}, {"seed": 1}],
        ),
        (_said(scored, VIDEO, ["a"]), [{"reward_deadline": 1200.0}]),
        (_full_disk(tmp_path / "run/checkpoints", monkeypatch), [{"keep_last": 1}]),
        (_said(checkpoint.prune, tmp_path / "run", 0), [{"keep_last": 1}]),
        (alarm, [{"alarms.patience": 5}, {"alarms.action": "off"}]),
        (plan._relief("rollout", gathers), [{"sampling.batch": 4}]),
        (plan._relief("update", gathers), [{"micro_samples": 2}]),
        (plan._relief("update", reduces), [{"mesh.context": 1}, {"mesh.tensor": 1}]),
        (_said(wan.check_mesh, tiny.WAN, {"data": 3}, 8, 64), [{"mesh.data": 4}]),
        (_said(wan.check_mesh, tiny.WAN, {"context": 8}, 8, 4), [{"mesh.context": 4}]),
        (_said(wan.check_mesh, tiny.WAN, {"stage": 3}, 8, 64), [{"mesh.stage": 2}]),
        (claimed, [{"resume": True}]),
    ]


@pytest.mark.slow
def test_every_message_of_a_run_can_be_followed(started, tmp_path, monkeypatch):
    for message, ways in _messages(tmp_path, monkeypatch):
        told = tuple(f"{name}." for name in _named(message) - {"name"})  # another name, another run
        followed = [f"{key}." for changes in ways for key in changes]
        assert all(key.startswith(told) for key in followed), message
        assert all(any(key.startswith(name) for key in followed) for name in told), message
        for changes in ways:
            _start(tmp_path / "run", _set(started, changes | _flags(message)))


@pytest.mark.slow
def test_what_the_planner_suggests_is_accepted_or_the_refusal_says_how(started, tmp_path):
    """The planner knows of no run; one-byte weights are the only change of its that needs more."""
    refused = {}
    for changes in advice._candidates(started):
        try:
            _start(tmp_path / "run", _set(started, changes))
        except ValueError as error:
            refused |= changes
            _start(tmp_path / "run", _set(started, changes | _flags(str(error))))
    assert refused == {"model.param_dtype": "float8"}


@pytest.mark.slow
@pytest.mark.parametrize("key, value", [("seed", 1), ("prompts_per_step", 1), ("clip.low", 1.0)])
def test_a_refusal_can_be_followed(started, tmp_path, key, value):
    message = _said(_start, tmp_path / "run", _set(started, {key: value}))
    assert f"{key}: " in message
    _start(tmp_path / "run", _set(started, {key: value} | _flags(message)))
    _start(tmp_path / "run", started)  # "set these keys back"


@pytest.mark.slow
def test_other_prompts_at_the_same_place_are_refused_and_can_be_accepted(started, tmp_path):
    """config.allow_changes, as the message says, or the old file at another place."""
    other = tmp_path / "other.txt"
    other.write_text("blue\nred\n")
    message = _said(_start, tmp_path / "run", _set(started, {"prompts": str(other)}))
    assert "prompts of this run have changed" in message
    _start(tmp_path / "run", _set(started, {"prompts": str(other)} | _flags(message)))
    shutil.copy(started.prompts, other)
    _start(tmp_path / "run", _set(started, {"prompts": str(other)}))


def test_a_judge_may_get_more_time_in_the_rewards_name(tmp_path):
    message = _said(http._ask, "http://127.0.0.1:9", b"", 1, deadline=0.1, retries=0, wait=0)
    assert message.endswith("raise deadline and retries in the reward's name")
    name = "http?url=http://127.0.0.1:9&{}frames=all".format
    guard.claim(tmp_path / "run", {"reward": {name("deadline=60&"): 1.0}}, True)
    assert guard.claim(tmp_path / "run", {"reward": {name("deadline=300&retries=9&"): 1.0}}, True)


@pytest.mark.slow
def test_after_a_nan_the_run_goes_on_as_its_message_says(started, tmp_path, monkeypatch):
    update = grpo.update

    def broken(*args):
        state, values = update(*args)
        return state, values | {"grpo/loss/low": math.nan}

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "update", broken)
        message = _said(train.main, started)
    assert "step 1, phase update: grpo/loss/low is nan; checkpoint 1 is kept" in message
    run = train.main(_set(started, {"optim.low.lr": 1e-3, "seed": 1} | _flags(message)))
    records = metrics.read(run)
    assert [record["lr/low"] for record in records] == pytest.approx([1e-2, 1e-3])
    notes = [(n["step"], n["key"], n["old"], n["new"]) for n in guard.changes(run)]
    assert sorted(notes) == [(1, "optim.low.lr", 0.01, 0.001), (1, "seed", 0, 1)]
    page = report.write_report([run], run / "report.html").read_text()
    assert "<td>1</td><td>optim.low.lr</td><td>0.01</td><td>0.001</td>" in page
    now = {"optim.low.lr": 1e-3, "seed": 1}
    train.main(_set(started, now))  # from now on without the switch
    (tmp_path / "other.txt").write_text("blue\nred\n")
    before = (run / "config.json").read_text()
    message = _said(train.main, _set(started, now | {"eval.prompts": str(tmp_path / "other.txt")}))
    assert "evaluation prompts of this run have changed" in message
    assert _flags(message) == {"allow_changes": True}
    assert (run / "config.json").read_text() == before  # a start that fails leaves no trace


@pytest.mark.slow
def test_free_keys_and_moved_files_change_a_run_by_rounding_alone(
    started, whole, model, tmp_path, capsys
):
    """And a lower keep_last removes what it no longer keeps, before the next checkpoint."""
    shutil.copytree(pathlib.Path(model).parent, tmp_path / "elsewhere")
    prompts_file = str(tmp_path / "elsewhere/prompts.txt")
    run = train.main(_set(started, {
        "model.path": str(tmp_path / "elsewhere/model"),
        "prompts": prompts_file, "eval.prompts": prompts_file,
        "micro_samples": 4, "micro_steps": 2, "sampling.batch": 4, "guidance.mode": "sequential",
        "model.remat": "full", "mesh.data": 2, "mesh.fsdp": 2, "mesh.context": 2,
        "compile_cache": "", "reward_deadline": 1200.0, "reward_failure": "skip", "keep_last": 1,
    }))  # fmt: skip
    keys = {note["key"] for note in guard.changes(run)}
    assert keys == {"model.path", "prompts", "eval.prompts"}
    moved, plain = (metrics.read(folder)[1] for folder in (run, whole))
    names = [name for name in plain if not name.startswith(("time/", "perf/"))]
    assert len(names) > 10
    for name in names:
        assert moved[name] == pytest.approx(plain[name], rel=2e-3, abs=2e-5), name
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000002"]
    assert "sampling.batch 8 -> 4" in capsys.readouterr().out


def _texts(tree) -> list[str]:
    """The strings of a module that are no docstrings, with \\0 for what is filled in."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {
        id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values
    }

    def text(node):
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
        return "".join(map(str, parts))

    kinds = ast.JoinedStr | ast.Constant
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text(node) for node in nodes if id(node) not in docs | parts]


def test_no_message_names_a_key_that_does_not_exist():
    found = set()
    for path in pathlib.Path(wanjax.__file__).parent.rglob("*.py"):
        for text in _texts(ast.parse(path.read_text())):
            keys = re.findall(r"\bconfig\.([\w\0][\w.\0]*)", text)
            found |= {(path.name, key.rstrip(".")) for key in keys} - {(path.name, "json")}
    assert len(found) > 50
    for file, key in found:
        pattern = key.replace("\0", "*")
        known = fnmatch.filter(KEYS, pattern) + fnmatch.filter(KEYS, f"{pattern}.*")
        assert known or key.startswith("reward."), f"{file}: config.{key}"
