"""guard.py: one config per run folder."""

import json

import pytest

from wanjax.run import guard

CONFIG = {
    "seed": 0,
    "steps": 10,
    "lora": {"rank": 8, "experts": ("high", "low")},
    "wandb": {"mode": "off"},
}


def test_claim_writes_the_config_once_and_resumes_with_the_same(tmp_path):
    run = tmp_path / "run"
    assert guard.claim(run, CONFIG, resume=True) is False
    text = (run / "config.json").read_text()
    assert json.loads(text)["lora"] == {"rank": 8, "experts": ["high", "low"]}
    assert guard.claim(run, CONFIG, resume=True) is True
    assert (run / "config.json").read_text() == text


def test_claim_refuses_another_config_and_lists_the_keys(tmp_path):
    guard.claim(tmp_path / "run", CONFIG, resume=True)
    other = {**CONFIG, "lora": {"rank": 16, "experts": ("high",)}, "extra": None}
    with pytest.raises(ValueError) as error:
        guard.claim(tmp_path / "run", other, resume=True)
    message = str(error.value)
    assert "lora.rank: 8 -> 16" in message
    assert 'lora.experts: ["high", "low"] -> ["high"]' in message
    assert "extra: (absent) -> null" in message
    assert "\n" not in message


def test_a_key_that_did_not_exist_when_a_run_started_had_its_default(tmp_path):
    guard.claim(tmp_path / "run", CONFIG, resume=True)
    newer = {**CONFIG, "fresh": {"size": (1, 2), "kind": "a"}}
    assert guard.claim(tmp_path / "run", newer, True, {**newer, "unused": 1}) is True
    assert json.loads((tmp_path / "run/config.json").read_text()) == json.loads(json.dumps(CONFIG))
    with pytest.raises(ValueError, match='fresh.kind: "b" -> "a"'):
        guard.claim(tmp_path / "run", newer, True, {"fresh": {"size": (1, 2), "kind": "b"}})


def test_claim_lets_only_the_named_keys_vary(tmp_path, capsys):
    guard.claim(tmp_path / "run", CONFIG, resume=True)
    longer = {**CONFIG, "steps": 20, "wandb": {"mode": "offline"}}
    assert guard.claim(tmp_path / "run", longer, resume=True) is True
    assert "steps 10 -> 20" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 20


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
