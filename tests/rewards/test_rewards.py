"""Rewards by name with arguments, several at once, overlap, failures, and what lost samples do."""

import contextlib
import functools
import sys
import threading
import types

import jax
import numpy as np
import pytest

from wanjax import advantages, rewards
from wanjax.parallel import distributed


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """A user's module `mine` of rewards and makers of rewards."""
    module = types.ModuleType("mine")

    def first_pixel(video, prompts, meta):
        return video[:, 0, 0, 0, 0].astype(float), {"length": [len(p) for p in prompts]}

    def make(power: float, name: str = "x", times: int = 1, anything=None):
        if power < 0:
            raise ValueError(f"power is {power}; expected 0 or more")
        facts = (power, name, times, anything)
        return lambda video, prompts, meta: (np.full(len(video), power), {"facts": facts})

    def strict(video, prompts, meta):
        return np.ones(len(video)), {"strict": np.arange(len(video)) % 2 == 0}

    for function in (first_pixel, make, strict):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def numbered(count, batch):
    """Videos whose only pixels are 0, 1, 2, ..., in batches of which all rows count."""
    video = np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1, 1)
    return [(video[i : i + batch], batch) for i in range(0, count, batch)]


TEXTS = [f"prompt {i}" for i in range(8)]


def test_a_query_makes_the_reward_with_arguments_of_the_annotated_types():
    reward = rewards.find("mine:make?power=2&name=a%26b=c&times=3&anything=4")
    scores, info = reward(np.zeros((2, 1)), ["", ""], None)
    np.testing.assert_array_equal(scores, [2, 2])
    assert info["facts"] == (2.0, "a&b=c", 3, "4")
    assert [type(x) for x in info["facts"]] == [float, str, int, str]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pickscores", "expected one of .*'pickscore'.* or an import path"),
        ("no_such_module:fn", "cannot be imported: No module named 'no_such_module'; pip install"),
        ("mine:missing", "cannot be imported: module 'mine' has no attribute 'missing'"),
        ("mine:make?", r"'mine:make\?': needs the argument 'power', as in ...\?power=VALUE"),
        ("mine:make?power=1&powr=2", "has no argument 'powr'; it has power, name, times, anything"),
        ("mine:make?power=high", "argument power is 'high', expected float"),
        ("mine:make?power", "bad query field"),
        ("mine:make?power=-1", r"'mine:make\?power=-1': power is -1.0; expected 0 or more"),
        ("shapes?frames=4", "shapes takes no arguments"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        rewards.combine([name])
    assert "config.reward names" in str(caught.value) and "\n" not in str(caught.value)


def test_every_built_in_reward_can_be_imported():
    for name in rewards.BUILT_IN:
        try:
            assert callable(rewards.find(name))
        except ValueError as error:
            assert "needs the argument" in str(error)


def test_several_rewards_have_short_names_of_their_own():
    names = ["mine:first_pixel", "mine:make?power=2", "mine:make?power=3", "mine:strict"]
    scores, info = rewards.combine([n for n in names if "make" not in n])(
        np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1, 1), ["", "a", "bc"]
    )
    np.testing.assert_array_equal(scores["mine:first_pixel"], [0, 1, 2])
    np.testing.assert_array_equal(info["reward/mine:first_pixel/length"], [0, 1, 2])
    np.testing.assert_array_equal(info["success"], [1, 0, 1])
    assert rewards._labels(names) == {
        "mine:first_pixel": "mine:first_pixel",
        "mine:make?power=2": "mine:make",
        "mine:make?power=3": "mine:make_2",
        "mine:strict": "mine:strict",
    }


def test_a_score_outside_the_range_of_a_built_in_names_reward_and_sample(mine, monkeypatch):
    monkeypatch.setitem(rewards.BUILT_IN, "unit", ("mine:first_pixel", 0.0, 1.0))
    reward = rewards.combine(["unit"])
    np.testing.assert_array_equal(reward(numbered(2, 2)[0][0], TEXTS[:2])[0]["unit"], [0, 1])
    with pytest.raises(
        rewards.RewardError, match=r"unit gave 2 for sample 2 .*'prompt 2'.* 0 to 1"
    ):
        reward(numbered(3, 3)[0][0], TEXTS[:3])
    mine.first_pixel = lambda video, prompts, meta: (np.full(len(video), np.nan), {})
    assert np.isnan(rewards.combine(["unit"])(numbered(2, 2)[0][0], TEXTS[:2])[0]["unit"]).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((np.ones(2), {}), r"reward mine:strict has shape \(2,\) for 3 videos"),
        ((np.ones(3), {"a": 1.0}), r"reward mine:strict/a has shape \(\) for 3 videos"),
    ],
)
def test_another_number_of_scores_is_an_error(mine, values, message):
    mine.strict = lambda video, prompts, meta: values
    with pytest.raises(rewards.RewardError, match=message):
        rewards.combine(["mine:strict"])(numbered(3, 3)[0][0], TEXTS[:3])


def score(videos, reward, names=("mine:first_pixel",), **settings):
    settings = dict(group=4, step=7, failure="stop") | settings
    return rewards.score(videos, TEXTS, reward, dict.fromkeys(names, 1.0), **settings)


def test_the_next_batch_is_fetched_while_one_is_scored_and_order_is_kept():
    fetched, busy = [threading.Event() for _ in range(5)], threading.Lock()

    def videos():
        for i, batch in enumerate(numbered(8, 2)):
            fetched[i].set()
            yield batch
        fetched[4].set()

    def reward(video, prompts):
        assert busy.acquire(blocking=False), "two batches are scored at once"
        i = int(video[0].item()) // 2
        assert fetched[i + 1].wait(30), "the next batch waits for this one's scores"
        busy.release()
        assert prompts == TEXTS[2 * i : 2 * i + 2]
        return {"mine:first_pixel": video.reshape(-1) + 0.5}, {"part": np.full(len(video), i)}

    scores_MPK, metrics = score(videos(), reward)
    np.testing.assert_array_equal(scores_MPK, np.arange(8).reshape(1, 2, 4) + 0.5)
    assert metrics["reward/mean"] == 4 and metrics["part"] == 1.5
    assert metrics["reward/mine:first_pixel"] == 4 and "reward/lost" not in metrics


def faulty(mine, fault, on=2):
    """A combined reward of which the batch that starts with sample `on` goes wrong."""
    release = threading.Event()

    def function(video, prompts, meta):
        scores = video[:, 0, 0, 0, 0].astype(float)
        if scores[0] == on:
            if fault == "raise":
                raise ZeroDivisionError("no objects")
            if fault == "hang":
                release.wait()
            scores[1] = np.nan
        return scores, {"twice": 2 * scores}

    mine.first_pixel = function
    return rewards.combine(["mine:first_pixel"], deadline=0.2), release


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            "raise",
            rewards.RewardError,
            "step 7, phase reward: samples 2 to 3: ZeroDivisionError: no objects; the last good",
        ),
        ("hang", rewards.RewardError, "samples 2 to 3: reward mine:first_pixel gave no answer for"),
        ("nan", FloatingPointError, "step 7, phase reward: sample 3 .'prompt 3'. got mine:first_p"),
    ],
)
def test_stop_ends_the_step_and_names_what_failed(mine, fault, kind, message):
    reward, release = faulty(mine, fault)
    with pytest.raises(kind, match=message) as caught:
        score(numbered(8, 2), reward)
    release.set()
    if fault == "raise":
        assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("fault", "lost"), [("raise", [2, 3]), ("hang", [2, 3]), ("nan", [3])])
def test_skip_loses_those_samples_only_and_nothing_is_learnt_from_them(mine, capsys, fault, lost):
    reward, release = faulty(mine, fault)
    scores_MPK, metrics = score(numbered(8, 2), reward, failure="skip")
    release.set()
    kept = [k for k in range(4) if k not in lost]
    want = np.arange(8, dtype=float)
    want[lost] = np.mean(kept)
    np.testing.assert_allclose(scores_MPK[0].ravel(), want, rtol=1e-15)
    adv_PK = advantages.group_advantages(scores_MPK, "flow_grpo", weights=[1.0])
    assert np.abs(adv_PK[0, lost]).max() < 1e-12 and adv_PK[0, kept[0]] < 0 < adv_PK[0, kept[-1]]
    assert metrics["reward/lost"] == len(lost) / 8
    whole = [i for i in range(8) if i not in lost]
    assert metrics["reward/mine:first_pixel/twice"] == 2 * np.mean(whole)
    assert ("reward: skipped samples 2 to 3" in capsys.readouterr().out) == (fault != "nan")


def test_a_lost_group_has_no_spread_and_losing_all_is_survived():
    def reward(video, prompts):
        if video[0].item() >= below:
            raise OSError("down")
        pixels = video.reshape(-1)
        return {"a": pixels + 1.0, "b": np.where(pixels == 1, np.nan, 10.0 * pixels)}, {}

    below = 4
    scores_MPK, metrics = score(numbered(8, 2), reward, names=("a", "b"), failure="skip")
    np.testing.assert_allclose(scores_MPK[0], [[1, 8 / 3, 3, 4], [8 / 3] * 4])
    np.testing.assert_allclose(scores_MPK[1], [[0, 50 / 3, 20, 30], [50 / 3] * 4])
    assert metrics["reward/lost"] == 5 / 8 and metrics["reward/zero_spread"] == 0.5
    below = 0
    scores_MPK, metrics = score(numbered(8, 2), reward, names=("a", "b"), failure="skip")
    assert not scores_MPK.any() and metrics["reward/lost"] == 1


def two_processes(monkeypatch, reward, failure="stop"):
    """(results of both processes, what each process said) where process i holds rows i, i + 2, …"""
    said: dict[int, str] = {}

    def run(process):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        rows = lambda video, count: (np.arange(process, count, 2), video[process:count:2])
        monkeypatch.setattr(rewards.sharding, "own_rows", rows)
        monkeypatch.setattr(distributed, "gather", functools.partial(gather, process))
        return rewards.run(iter(numbered(8, 4)), TEXTS, reward, ["a"], failure=failure)

    def gather(process, text):
        said[process] = text
        if len(said) < 2:
            raise StopIteration  # what the other says is not known yet
        return [said[0], said[1]]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(rewards.sharding, "fetch", lambda x: x)
    for process in (0, 1):
        with contextlib.suppress(StopIteration, rewards.RewardError):
            run(process)
    return run, said


def test_each_process_scores_its_own_rows_and_all_get_all_numbers(monkeypatch):
    values, calls = np.array([0.1, np.nan, 1 / 3, np.inf] * 2), []

    def reward(video, prompts):
        calls.append((video.reshape(-1).tolist(), prompts))
        return {"a": values[video.reshape(-1)]}, {"info": -values[video.reshape(-1)]}

    run, _ = two_processes(monkeypatch, reward)
    assert calls[0] == ([0, 2], ["prompt 0", "prompt 2"]) and calls[3][0] == [5, 7]
    for process in (0, 1):
        scores, info = run(process)
        np.testing.assert_array_equal(scores["a"], values)
        np.testing.assert_array_equal(info["info"], -values)


def test_a_reward_that_is_asked_once_gets_the_videos_of_all_on_process_0(monkeypatch):
    calls = []

    def reward(video, prompts):
        calls.append(video.reshape(-1).tolist())
        return {"a": video.reshape(-1) + 0.5}, {}

    reward.once = True
    run, said = two_processes(monkeypatch, reward)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]] and said[1] == "[]"
    np.testing.assert_array_equal(run(1)[0]["a"], np.arange(8) + 0.5)


def test_a_failure_on_one_process_ends_all_with_its_words(monkeypatch):
    def reward(video, prompts):
        if 5 in video:
            raise OSError("down")
        return {"a": video.reshape(-1).astype(float)}, {}

    run, _ = two_processes(monkeypatch, reward)
    for process in (0, 1):
        with pytest.raises(rewards.RewardError, match="samples 5 to 7: OSError: down"):
            run(process)
    run, _ = two_processes(monkeypatch, reward, failure="skip")
    np.testing.assert_array_equal(run(0)[0]["a"], [0, 1, 2, 3, 4, np.nan, 6, np.nan])


def test_a_combined_reward_is_asked_once_where_one_of_them_is(mine):
    assert not rewards.combine(["mine:first_pixel"]).once
    mine.strict.once = True
    assert rewards.combine(["mine:first_pixel", "mine:strict"]).once


def test_an_unknown_policy_names_the_config_key():
    with pytest.raises(ValueError, match="config.reward_failure is 'drop'; expected one of"):
        score(numbered(8, 2), rewards.combine(["mine:first_pixel"]), failure="drop")
