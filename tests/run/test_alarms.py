"""Alarms: when they ring, what they say, and that a run stops with its best checkpoint kept."""

import json
import math

import numpy as np
import pytest

from configs import default
from tests import tiny
from wanjax import evaluate, rewards, train, trees
from wanjax.models import lora
from wanjax.run import alarms, checkpoint


def test_a_limit_rings_once_after_enough_steps_in_a_row():
    look = alarms.watch({"a/*": (0.0, 1.0), "b": (-math.inf, 2.0)}, patience=2)
    values = [2.0, 0.5, -1.0, math.nan, 3.0, 0.0, 5.0, 5.0]
    rung = [look({"a/x": value, "a/y": 0.5, "b": 0.0, "other": 9.0}) for value in values]
    assert [len(lines) for lines in rung] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert rung[3] == ["a/x is nan and has been outside 0 to 1 for 2 steps (config.alarms)"]
    assert look({"b": 3.0}) == [] and look({"b": 3.0}) != []


@pytest.mark.parametrize("kept", range(9))
def test_an_interrupted_run_rings_at_the_same_step(kept):
    """Whichever step its checkpoint continues with; counts pass through JSON."""
    limits, values = {"a": (0.0, 1.0)}, [2.0, 0.5, 2.0, 2.0, 2.0, 2.0, 0.5, 2.0]
    rung = [2 + 3 - 1]  # in a row since step 2, with a patience of 3; once
    counts: dict[str, int] = {}
    look, found = alarms.watch(limits, 3, counts), []
    for step, value in enumerate(values):
        if step == kept:
            counts = json.loads(json.dumps(counts))
            look = alarms.watch(limits, 3, counts)
        found += [step] * len(look({"a": value}))
    assert found == rung


def test_a_shorter_patience_rings_for_what_has_not_rung_yet():
    counts = {"a": 5, "b": alarms.RUNG}
    look = alarms.watch({"*": (0.0, 1.0)}, 3, counts)
    assert len(look({"a": 2.0, "b": 2.0})) == 1 and look({"a": 2.0, "b": 2.0}) == []


def test_the_first_step_must_be_on_policy():
    """The limits that every run has, each with a value that it allows and one that it does not."""
    values = {
        "grpo/clip_frac/low": (0.0, 0.01), "grpo/ratio_mean/high": (1.001, 1.02),
        "awm/ratio_mean/low": (0.999, 0.98),
        "nft/kl/low": (0.0, 0.01), "nft/old_deviate/high": (1e-5, 0.01),
        "dpo/loss/low": (math.log(2), 0.7), "dmd2/critic_gap/high": (0.0, 1e-7),
    }  # fmt: skip
    limits = default.get_config().alarms.start.to_dict()
    assert alarms.watch(limits, 1)({name: good for name, (good, _) in values.items()}) == []
    for name, (_, bad) in values.items():
        (line,) = alarms.watch(limits, 1)({name: bad})
        assert line.startswith(name)


@pytest.mark.parametrize(
    ("limits", "patience", "text"),
    [
        ({"a": (1.0, 0.0)}, 1, r"config.alarms has 'a': \(1.0, 0.0\)"),
        ({"a": (1.0,)}, 1, "expected .lowest, highest."),
        ({}, 0, "config.alarms.patience is 0"),
    ],
)
def test_limits_that_mean_nothing_are_refused(limits, patience, text):
    with pytest.raises(ValueError, match=text):
        alarms.watch(limits, patience)


def test_videos_are_measured_whatever_the_reward():
    reward = rewards.combine(["tests.tiny:brightness"])
    still = np.full((2, 3, 4, 4, 3), 128, np.uint8)
    still[1, 1] = 255
    info = reward(still, ["a", "b"])[1]
    np.testing.assert_allclose(info["video/motion"], [0, 127 / 255])
    np.testing.assert_allclose(info["video/saturation"], [0, 1 / 3])
    assert "video/motion" not in reward(still[:, :1], ["a", "b"])[1]


@pytest.mark.slow
def test_an_alarm_stops_the_run_and_the_best_checkpoint_stays(tmp_path, monkeypatch, capsys):
    model = tiny.save_model(tmp_path / "model")
    scores = {1: 3.0, 2: 2.0, 3: 1.0}
    real = evaluate.previews

    def previews(job, state):
        videos, found = real(job, state)
        return videos, found | {"reward": np.full(len(videos), scores.get(int(state.step), 0.0))}

    monkeypatch.setattr(evaluate, "previews", previews)
    changes = dict(steps=9, save_every=1, eval_every=1, keep_last=1, alarms__patience=4)
    config = tiny.make_config(model, tmp_path, **changes)
    config.alarms.limits["reward/mean"] = (2.0, 3.0)  # never so
    config.alarms.action = "stop"  # and the first step's own limits hold
    for _ in range(2):  # as often as the same command continues it
        with pytest.raises(alarms.Collapsed, match="step 3: reward/mean is .* best .* at step 1"):
            train.main(config)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(kept) == 2 and int(kept[0].removeprefix("step_")) == 1
    assert checkpoint.latest_good(tmp_path / "run") == 3
    config.alarms.action = "warn"
    config.steps = 4
    train.main(config)
    assert "alarm at step 3: reward/mean" in capsys.readouterr().out


@pytest.mark.slow
def test_a_policy_that_is_not_the_reference_is_reported_at_the_first_step(
    tmp_path, capsys, monkeypatch
):
    """Which is the last one here: nothing waits for a step after it."""
    real = lora.init

    def moved(*args, **kwargs):  # an adapter that is no identity
        tree = real(*args, **kwargs)
        return trees.map_paths(lambda path, x: x + 0.3 if path.endswith("/b") else x, tree)

    monkeypatch.setattr(lora, "init", moved)
    model = tiny.save_model(tmp_path / "model")
    changes = dict(steps=1, algorithm="nft", nft__train_guidance=True, kl__high=0.1, kl__low=0.1)
    train.main(tiny.make_config(model, tmp_path, **changes))
    out = capsys.readouterr().out
    assert "alarm at step 0: nft/kl/high is" in out and "alarm at step 0: nft/kl/low is" in out
    assert "nft/old_deviate" not in out
