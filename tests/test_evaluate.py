"""Evaluation: its own sampler, the best step, the summary before and after."""

import json

import pytest

from tests import tiny
from wanjax import evaluate, sampling, train
from wanjax.algorithms import Tools, grpo
from wanjax.data import Item
from wanjax.run import disk


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def test_evaluation_may_have_a_sampler_of_its_own(model, tmp_path, monkeypatch):
    own = dict(eval__steps=2, eval__grid="unipc", eval__solver="unipc", eval__guidance__high=1.0)
    config = tiny.make_config(model, tmp_path, **own)
    seen, clips = [], sampling.clips
    spy = lambda *args, plan, **kw: seen.append(plan) or clips(*args, plan=plan, **kw)
    monkeypatch.setattr(sampling, "clips", spy)
    monkeypatch.setattr(grpo, "collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train.main(config)
    assert [own.schedule.steps for own in seen] == [2] and config.sampling.steps == 6
    assert seen[0].solver == seen[0].schedule.grid == "unipc" != config.sampling.solver
    assert seen[0].guidance.high == 1.0 and seen[0].guidance.low == tiny.MODEL.sampling.guidance.low


def test_the_best_evaluation_is_the_one_with_the_highest_reward(tmp_path):
    assert evaluate.best(tmp_path) is None
    for step, result in ((0, {"eval/reward": 0.2}), (4, {"eval/reward": 0.9}),
                         (8, {"eval/reward": 0.5}), (12, {"eval/loss/high": 0.1})):  # fmt: skip
        disk.write_json(tmp_path / f"evals/step_{step:06d}.json", result)
    assert evaluate.best(tmp_path) == 4


def test_the_summary_has_the_results_before_and_after(tmp_path):
    item, tools = Item(["a", "b"], None), Tools({}, None, reward=tiny.mean_reward)
    job = evaluate.Evaluation(
        tmp_path, tiny.MODEL, tiny.make_setup().sampling, "default", tiny.make_setup().rewards,
        tools, item, seed=0, shown=1, static={}, validate=None,
    )  # fmt: skip
    for step, reward in ((0, 0.25), (7, 0.75)):
        result = {"eval/reward": reward, "eval/success": 0.5, "eval/loss/high": reward + 1,
                  "eval/loss/low": reward + 2}  # fmt: skip
        disk.write_json(job.path(step), result)
    summary = evaluate.write_summary(job, 7, seconds=3.0, evaluated=1.0)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["reward_before"], summary["reward_after"]) == (0.25, 0.75)
    assert (summary["loss_before"], summary["loss_after"]) == (1.75, 2.25)
    assert summary["steps"] == 7 and summary["seconds"] == {"eval": 1.0}
    assert evaluate.describe(summary) == [
        "reward   0.250 -> 0.750 on 2 prompts",
        "success  0.500 -> 0.500 on 2 prompts",
        "loss     1.750 -> 2.250 on held-out clips",
    ]
