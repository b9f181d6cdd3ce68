"""Rewards and numbers: judges that fail, and values at the edge of what a key takes."""

import json

import numpy as np
import pytest

from configs import default
from tests import tiny
from tests.field.table import Case, cases
from wanjax import rewards, sample, setup, train
from wanjax.run import checkpoint, metrics


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def failing(video, prompts, meta):
    """A judge that has gone away."""
    raise OSError("connection refused")


def gone_config(model, workdir, **changes):
    config = tiny.make_config(model, workdir, reward_failure="skip", save_every=1, **changes)
    del config.reward["tests.tiny:brightness"]
    config.reward["tests.field.test_rewards:failing"] = 1.0
    return config


@cases(
    Case(
        "a judge that is gone, with reward_failure skip",
        "stopped after three steps",
        "step 2, phase reward: all scores of the last 3 steps were lost for the reasons above; "
        "checkpoint 2 is kept. Mend the reward, or set config.reward_lost_steps to 0 to go on",
        3,
    ),
    Case(
        "the same with reward_lost_steps 1",
        "stopped after one step",
        "step 0, phase reward: all scores of the last 1 steps were lost for the reasons above; "
        "no checkpoint has been saved…",
        1,
    ),
)
def test_a_run_does_not_go_on_without_rewards(case, model, tmp_path, capsys):
    config = gone_config(model, tmp_path, reward_lost_steps=case.given, steps=4)
    with pytest.raises(rewards.RewardError) as error:
        train.main(config)
    case.check(str(error.value))
    assert "reward: skipped samples 0 to 7: " in capsys.readouterr().out
    assert checkpoint.latest_good(tmp_path / "run") == (case.given - 1 or None)
    for line in metrics.read(tmp_path / "run"):
        assert line.get("reward/lost", 1) == 1 and "reward/mean" not in line


def test_missing_scores_stay_missing(model, tmp_path):
    """Of steps, evaluations and the summary, none of which is then NaN or 0."""
    run = train.main(gone_config(model, tmp_path, reward_lost_steps=0, steps=1))
    assert "reward/mean" not in metrics.read(run)[0]
    for file in (run / "evals/step_000001.json", run / "summary.json"):
        found = json.loads(file.read_text(), parse_constant=pytest.fail)
        assert not any("reward" in key for key in found)
    scores = json.loads((run / "samples/step_000001/scores.json").read_text())
    assert scores and not any(np.isnan(v) for row in scores for v in row.values())
    assert (run / "report.html").exists()


@cases(
    Case(
        "config.seed of 2**32",
        "refused: the sampler would drop its higher bits",
        "config.seed is 4294967296; expected in [0, 2**32)",
        ("seed", 2**32),
    ),
    Case(
        "config.eval.seed of 2**64",
        "refused",
        "config.eval.seed is 18446744073709551616; expected in [0, 2**32)",
        ("eval.seed", 2**64),
    ),
    Case("a negative seed", "refused", "config.seed is -1; expected in [0, 2**32)", ("seed", -1)),
    Case(
        "config.steps of 2**31",
        "refused",
        "config.steps is 2147483648; expected a number below 2**31",
        ("steps", 2**31),
    ),
    Case(
        "config.sampling.batch of 2**63",
        "refused",
        "config.sampling.batch is 9223372036854775808; expected a number below 2**31",
        ("sampling.batch", 2**63),
    ),
)
def test_numbers_beyond_what_is_kept(case):
    config, (key, value) = default.get_config().to_dict(), case.given
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node = node[name]
    node[last] = value
    with pytest.raises(ValueError) as error:
        setup.check(config)
    case.check(str(error.value))


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
def test_seeds_that_are_kept(value):
    config = default.get_config().to_dict()
    config["seed"] = config["eval"]["seed"] = value
    setup.check(config)


def test_a_seed_of_sample_beyond_32_bits_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="--seed is 4294967296; expected a number in"):
        arguments = ["--model", "tinywan22", "--prompt", "red", "--out", str(tmp_path / "o")]
        sample.main([*arguments, "--seed", str(2**32)])
    assert not (tmp_path / "o").exists()


def test_no_sample_videos_are_a_setting(model, tmp_path):
    """eval.samples=0 scores all prompts and shows none."""
    run = train.main(tiny.make_config(model, tmp_path, steps=1, eval__samples=0))
    assert json.loads((run / "summary.json").read_text())["eval_prompts"] == 2
    assert not list((run / "samples").rglob("*.mp4"))
