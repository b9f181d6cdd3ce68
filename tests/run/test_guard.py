"""guard.py: one config per run folder, and what of it may change."""

import fnmatch
import json

import pytest

from configs import default
from wanjax import trees
from wanjax.run import guard

CONFIG = {
    "seed": 0,
    "steps": 10,
    "lora": {"rank": 8, "experts": ("high", "low"), "start": ("a.safetensors",)},
    "model": {"path": "/models/a"},
    "reward": {"shapes": 1.0, "http?url=http://a:1&deadline=60": 0.5},
    "wandb": {"mode": "off"},
}


def _continue(run, config, *, defaults=None, allow=False, step=4, content=None):
    """Continue a run as a start does."""
    assert guard.claim(run, config, True, defaults, allow=allow) is True
    guard.record(run, config, defaults, step, content or {})


def _noted(run):
    return {n["key"]: (n["step"], n["old"], n["new"]) for n in guard.changes(run)}


@pytest.fixture
def run(tmp_path):
    assert guard.claim(tmp_path / "run", CONFIG, resume=True) is False
    return tmp_path / "run"


def test_claim_writes_the_config_once_and_resumes_with_the_same(run):
    text = (run / "config.json").read_text()
    assert json.loads(text)["lora"]["experts"] == ["high", "low"]
    _continue(run, CONFIG)
    assert (run / "config.json").read_text() == text and guard.changes(run) == []


def test_claim_refuses_another_config_and_lists_the_keys(run):
    other = {**CONFIG, "seed": 1, "lora": {**CONFIG["lora"], "experts": ("high",)}, "extra": None}
    with pytest.raises(ValueError) as error:
        guard.claim(run, other, resume=True)
    message = str(error.value)
    assert "seed: 0 -> 1" in message and "--config.allow_changes=True" in message
    assert 'lora.experts: ["high", "low"] -> ["high"]' in message
    assert "extra: (absent) -> null" in message
    assert "\n" not in message


def test_a_key_that_did_not_exist_when_a_run_started_had_its_default(run):
    newer = {**CONFIG, "fresh": {"size": (1, 2), "kind": "a"}}
    _continue(run, newer, defaults={**newer, "unused": 1})
    assert json.loads((run / "config.json").read_text()) == json.loads(json.dumps(CONFIG))
    with pytest.raises(ValueError, match='fresh.kind: "b" -> "a"'):
        guard.claim(run, newer, True, {"fresh": {"size": (1, 2), "kind": "b"}})


def test_free_keys_vary_without_a_note(run, capsys):
    _continue(run, {**CONFIG, "steps": 20, "wandb": {"mode": "offline"}})
    assert "steps 10 -> 20" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["steps"] == 20
    assert guard.changes(run) == []


def test_moved_paths_are_accepted_and_noted_and_evaluations_stay(run):
    (run / "evals").mkdir()
    (run / "evals/step_000004.json").write_text("{}")
    reward = {"shapes": 1.0, "http?url=http://b:2&deadline=900": 0.5}
    lora = {**CONFIG["lora"], "start": ("b.safetensors",)}
    _continue(run, {**CONFIG, "model": {"path": "/b"}, "lora": lora, "reward": reward})
    assert _noted(run) == {
        "model.path": (4, "/models/a", "/b"),
        "lora.start.0": (4, "a.safetensors", "b.safetensors"),
        "reward.http?url": (4, "http://a:1", "http://b:2"),
    }
    assert (run / "evals/step_000004.json").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"path": ""}},  # from somewhere to nowhere is no move
        {"lora": {**CONFIG["lora"], "start": ("a.safetensors", "b.safetensors")}},
        {"reward": {"shapes": 2.0, "http?url=http://a:1&deadline=60": 0.5}},
        {"reward": {"shapes": 1.0, "http?url=http://a:1&deadline=60&frames=4": 0.5}},
        {"reward": {"shapes": 1.0}},
        {"reward": {"shapes": 1.0, "own:make?deadline=60": 0.5}},
    ],
)
def test_what_looks_like_a_move_is_refused(run, other):
    with pytest.raises(ValueError, match="different config"):
        guard.claim(run, {**CONFIG, **other}, resume=True)


def test_the_switch_accepts_what_changes_the_result_and_notes_it(run):
    for step in (2, 4, 6):
        for name in (f"evals/step_{step:06d}.json", f"samples/step_{step:06d}/000.mp4"):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text("{}")
    _continue(run, {**CONFIG, "seed": 1, "allow_changes": True}, allow=True)
    _continue(run, {**CONFIG, "seed": 2}, allow=True, step=5, content={"data.crc": (7, 8)})
    notes = guard.changes(run)
    assert [(n["step"], n["key"], n["old"], n["new"]) for n in notes] == [
        (4, "seed", 0, 1), (5, "seed", 1, 2), (5, "data.crc", 7, 8),
    ]  # fmt: skip
    assert all(n["time"].endswith("+00:00") for n in notes)
    assert json.loads((run / "config.json").read_text())["seed"] == 2
    left = sorted(path.name for path in run.glob("*/step_*"))
    assert left == ["step_000002", "step_000002.json"]  # those of the old config from 4 on are void


def test_what_shapes_a_checkpoint_stays_once_there_is_one(run):
    other = {**CONFIG, "lora": {**CONFIG["lora"], "rank": 16}}
    assert guard.claim(run, other, True, allow=True) is True  # nothing has been saved
    (run / "checkpoints/step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"fit no other lora\.rank: set these keys back") as error:
        guard.claim(run, {**other, "seed": 1}, True, allow=True)
    assert "seed" not in str(error.value)
    assert guard.claim(run, {**CONFIG, "seed": 1}, True, allow=True) is True


def test_folders_of_one_reward_twice_are_told_apart(tmp_path):
    reward = {"pickscore?model=/a": 1.0, "pickscore?model=/b": 2.0}
    guard.claim(tmp_path / "run", {"reward": reward}, resume=True)
    _continue(tmp_path / "run", {"reward": {"pickscore?model=/a": 1.0, "pickscore?model=/c": 2.0}})
    assert _noted(tmp_path / "run") == {"reward.pickscore_?model": (4, "/b", "/c")}


def test_every_pattern_names_a_key():
    known = trees.dotted(default.get_config().to_dict())
    known |= {"lora.start.0": "a"}
    for pattern in (*guard.FREE, *guard.MOVED, *guard.FIXED):
        found = [k for k in known if fnmatch.fnmatchcase(f"{k}.", f"{pattern}.*")]
        assert found or pattern.startswith("reward."), pattern


def test_claim_refuses_folders_that_are_not_its_own(tmp_path):
    (tmp_path / "photo.jpg").write_text("x")
    with pytest.raises(ValueError, match=r"holds photo\.jpg"):
        guard.claim(tmp_path, CONFIG, resume=True)
    with pytest.raises(ValueError, match="is a file"):
        guard.claim(tmp_path / "photo.jpg", CONFIG, resume=True)
    guard.claim(tmp_path / "run", CONFIG, resume=False)
    with pytest.raises(ValueError, match="already holds a run"):
        guard.claim(tmp_path / "run", CONFIG, resume=False)
    (tmp_path / "run/config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        guard.claim(tmp_path / "run", CONFIG, resume=True)
