"""Rewards: decoded videos and prompts in, one score per sample out.

A reward is reward(video_BTHWC uint8, prompts, meta) -> (scores [B], info {name: [B]}), higher is
better. config.reward maps names to weights; a name is one of

    shapes                                         built in
    pickscore?model=/models/PickScore_v1&frames=4  built in, with arguments
    http?url=http://127.0.0.1:9000&deadline=60     inside a value, & is written %26
    my.module:fn                                   your own function
    my.module:make?threshold=0.5                   a function that returns one; "make?" without
                                                   arguments

Arguments are converted to the types that the maker's parameters are annotated with (str, int,
float).

B samples of a call  M rewards  P prompts  K samples of one prompt
"""

import importlib
import inspect
import json
import math
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent import futures

import jax
import numpy as np

from wanjax import advantages
from wanjax.parallel import distributed, sharding

# name: (import path, ending in "?" if it makes the reward; lowest and highest possible score)
BUILT_IN = {
    "shapes": ("wanjax.rewards.shapes:reward", 0.0, 1.0),
    "pickscore": ("wanjax.rewards.clip_score:pickscore?", -5.0, 5.0),
    "clipscore": ("wanjax.rewards.clip_score:clipscore?", 0.0, 1.0),
    "hpsv2": ("wanjax.rewards.clip_score:hpsv2?", -1.0, 1.0),
    "ocr": ("wanjax.rewards.ocr:ocr?", 0.0, 1.0),
    "http": ("wanjax.rewards.http:http?", -math.inf, math.inf),
}
FAILURE = ("stop", "skip")
_ROUNDING = 1e-4  # a cosine may round to above 1


class RewardError(RuntimeError):
    """A reward failed while it ran; the message is one line."""


def find(name: str) -> Callable:
    """Return the reward of a name (see the module); one-line ValueError if that is impossible."""
    base, made, query = name.partition("?")
    path = BUILT_IN[base][0] if base in BUILT_IN else base + made
    module, _, function = path.removesuffix("?").partition(":")
    if not function:
        raise ValueError(
            f"config.reward names {name!r}; expected one of {tuple(BUILT_IN)} or an import path "
            "'package.module:function'"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"config.reward names {name!r}, which cannot be imported: {error}; pip install "
            "'wanjax[rewards]' has the packages of the built-in ones"
        ) from None
    if not path.endswith("?"):
        if made:
            raise ValueError(f"config.reward names {name!r}; {base} takes no arguments")
        return found
    try:
        return found(**_arguments(found, query))
    except (ValueError, ImportError, OSError) as error:
        raise ValueError(f"config.reward names {name!r}: {error}") from None


def forwards(names: Iterable[str]) -> tuple[dict[str, tuple], list[str]]:
    """({name: clip_score.forward} of the rewards among the names that hold a model on the device,
    the names of a user's own, of which nothing is known); nothing is loaded."""
    found, unknown = {}, []
    for name in names:
        base, _, query = name.partition("?")
        path = BUILT_IN.get(base, ("",))[0]
        if path.startswith("wanjax.rewards.clip_score:"):
            clip_score = importlib.import_module(path.partition(":")[0])  # imports transformers
            given = _arguments(getattr(clip_score, base), query)
            found[name] = clip_score.forward(base, **given)
        elif not path:
            unknown.append(name)
    return found, unknown


def combine(names: Iterable[str], deadline: float = 600.0) -> Callable:
    """Combine rewards into one function (video, prompts) -> ({name: scores [B]}, info).

    Info values are named "reward/<label>/<part>"; a part "strict" also appears as "success". Every
    video also gets "video/motion", the mean change of a value from frame to frame in [0, 1], and
    "video/saturation", the share of values that are 0 or 255.
    deadline: seconds that one reward may take per call.
    The function raises RewardError for a reward that takes longer, gives the wrong number of
    scores, or leaves the range of a built-in one; NaN passes. It has the attribute `once` where
    one of the rewards has it: see `run`; its attribute `check` takes prompts and raises ValueError
    for one that a reward cannot score, which such a reward's own attribute `check` says.
    """
    functions = {name: find(name) for name in names}
    labels = _labels(functions)

    def score(video_BTHWC, prompts):
        scores, info = {}, {}
        for name, function in functions.items():
            label = labels[name]
            running = _in_thread(function, video_BTHWC, prompts, None)
            futures.wait([running], deadline)
            if not running.done():
                raise RewardError(
                    f"reward {label} gave no answer for {len(prompts)} videos in {deadline:g} s; "
                    "raise config.reward_deadline or look at what it waits for"
                )
            values, parts = running.result()
            scores[name] = _row(f"reward {label}", values, prompts)
            _check_range(name, scores[name], prompts)
            for part, values in parts.items():
                info[f"reward/{label}/{part}"] = _row(f"reward {label}/{part}", values, prompts)
            if "strict" in parts:
                info["success"] = info[f"reward/{label}/strict"]
        return scores, info | _looks(video_BTHWC)

    def check(prompts):
        for name, function in functions.items():
            try:
                for prompt in prompts if hasattr(function, "check") else ():
                    function.check(prompt)
            except ValueError as error:
                raise ValueError(f"reward {labels[name]}: {error}") from None

    score.check = check
    score.once = any(getattr(function, "once", False) for function in functions.values())
    return score


def run(videos, texts, reward: Callable, names, *, failure: str = "stop"):
    """Score batches of videos in order; returns (scores {name: [B]}, info {name: [B]}).

    videos: (array [b', ...], how many of its first rows count), the counts adding up to len(texts);
    each is fetched when its turn comes, while the previous batch is scored in a thread of its own.
    A process scores the rows that its own devices hold, and only the results travel, so that all
    have the same numbers. A reward with the attribute `once` (one judge with a quota) is called by
    process 0 alone, with the videos of all. A batch whose reward raises stops the run with
    RewardError, or with failure="skip" gets NaN.
    """
    if failure not in FAILURE:
        raise ValueError(f"config.reward_failure is {failure!r}; expected one of {FAILURE}")
    scored, first, once = [], 0, getattr(reward, "once", False)
    for video, count in videos:
        if once:
            frames = sharding.fetch(video)[:count]  # by all processes, also after a failure
            rows = np.arange(count if jax.process_index() == 0 else 0)
        else:
            rows, frames = sharding.own_rows(video, count)
        part, first = first + rows, first + count
        last = scored[-1][1].result() if scored else None
        ended = failure == "stop" and isinstance(last, Exception)
        if len(part) and not ended:
            own = [texts[i] for i in part]
            scored.append((part, _in_thread(_attempt, reward, frames, own)))
    results = [(part, future.result()) for part, future in scored]
    return _joined(_shared(results, failure), names, len(texts), failure)


def score(videos, texts, reward: Callable, weights: dict, *, group: int, step: int, failure: str):
    """Score batches of videos as `run` does; returns (scores_MPK, metrics).

    reward: see `combine`; weights: reward name -> weight; group: samples per prompt K.
    failure: "stop" raises RewardError, or FloatingPointError for a score that is not finite, with
    step and sample. "skip" gives each lost sample the mean of the rest of its group, so that its
    advantage is zero and the others' mean does not change; where all are lost, no reward is told.
    """
    try:
        scores, info = run(videos, texts, reward, weights, failure=failure)
    except RewardError as error:
        raise RewardError(
            f"step {step}, phase reward: {error}; the last good checkpoint is kept"
        ) from error
    scores_MB = np.stack([scores[name] for name in weights])
    labels = list(_labels(weights).values())
    lost_B = ~np.isfinite(scores_MB).all(0)
    if failure == "stop" and lost_B.any():
        which, bad = np.argwhere(~np.isfinite(scores_MB.T))[0][::-1]
        raise FloatingPointError(
            f"step {step}, phase reward: sample {bad} ({texts[bad]!r}) got {labels[which]} = "
            f"{scores_MB[which, bad]}, which is not finite; the last good checkpoint is kept"
        )
    scores_MPK = _filled(scores_MB.reshape(len(weights), -1, group), lost_B.reshape(-1, group))
    total_PK = np.einsum("m,mpk->pk", list(weights.values()), scores_MPK)
    metrics = (
        {}
        if lost_B.all()
        else {
            "reward/mean": total_PK.mean(),
            "reward/std": total_PK.std(),
            "reward/zero_spread": advantages.zero_spread(total_PK).mean(),
            **{
                f"reward/{label}": row.mean() for label, row in zip(labels, scores_MPK, strict=True)
            },
        }
    )
    for name, values in info.items():
        if (finite := np.isfinite(values)).any():
            metrics[name] = values[finite].mean()
    if failure == "skip":
        metrics["reward/lost"] = lost_B.mean()
    return scores_MPK, metrics


def _looks(video_BTHWC) -> dict[str, np.ndarray]:
    """Signs of a collapse whatever the reward says, [B] each; an image has no motion."""
    axes = tuple(range(1, video_BTHWC.ndim))
    burnt = (video_BTHWC == 0) | (video_BTHWC == 255)
    looks = {"video/saturation": burnt.mean(axes)}
    if video_BTHWC.shape[1] > 1:
        change = np.abs(np.diff(video_BTHWC.astype(np.int16), axis=1))
        looks["video/motion"] = change.mean(axes) / 255
    return looks


def _arguments(maker: Callable, query: str) -> dict:
    """Arguments of a reward's maker from the part of its name after "?"."""
    known = inspect.signature(maker).parameters
    given = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    needed = [key for key, p in known.items() if p.default is p.empty and key not in dict(given)]
    if needed:
        raise ValueError(f"needs the argument {needed[0]!r}, as in ...?{needed[0]}=VALUE")
    values = {}
    for key, text in given:
        if key not in known:
            raise ValueError(f"has no argument {key!r}; it has {', '.join(known)}")
        kind = known[key].annotation
        try:
            values[key] = kind(text) if kind in (int, float) else text
        except ValueError:
            raise ValueError(f"argument {key} is {text!r}, expected {kind.__name__}") from None
    return values


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Short names for metrics: the part before "?", numbered where that is not unique."""
    labels: dict[str, str] = {}
    for name in names:
        base = name.partition("?")[0]
        same = sum(other.partition("?")[0] == base for other in labels)
        labels[name] = f"{base}_{same + 1}" if same else base
    return labels


def _in_thread(function: Callable, *args) -> futures.Future:
    """Start function(*args) in a thread that, unlike an executor's, never blocks process exit."""
    future = futures.Future()

    def work():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _attempt(reward: Callable, frames_BTHWC, texts):
    """Scores and info of a batch, or the exception it raised."""
    try:
        return reward(frames_BTHWC, texts)
    except Exception as error:  # a user's reward may raise anything
        return error


def _shared(results, failure: str) -> list[tuple]:
    """[(numbers of samples, scores, info, what went wrong or "")] of all processes, in order."""
    told = []
    for part, result in results:
        if isinstance(result, Exception):
            kind = "" if isinstance(result, RewardError) else f"{type(result).__name__}: "
            said = " ".join(str(result).split())
            line = f"samples {part[0]} to {part[-1]}: {kind}{said}"
            if failure == "skip":
                print(f"reward: skipped {line}", flush=True)
            elif jax.process_count() == 1:
                raise RewardError(line) from result
            told.append((part.tolist(), {}, {}, line))
        else:
            rows = ({name: np.asarray(row).tolist() for name, row in r.items()} for r in result)
            told.append((part.tolist(), *rows, ""))
    if jax.process_count() == 1:
        return told
    return sorted(row for text in distributed.gather(json.dumps(told)) for row in json.loads(text))


def _joined(told: list[tuple], names, count: int, failure: str):
    """(scores, info) of what `_shared` returns; RewardError for the first failure that counts."""
    scores, info = {name: np.full(count, np.nan) for name in names}, {}
    for part, own_scores, own_info, line in told:
        if line and failure == "stop":
            raise RewardError(line)
        for name, values in own_scores.items():
            scores[name][part] = values
        for name, values in own_info.items():
            info.setdefault(name, np.full(count, np.nan))[part] = values
    return scores, info


def _row(what: str, values, prompts) -> np.ndarray:
    """Values as float64 [B]; RewardError unless there is one per prompt."""
    row = np.asarray(values, np.float64)
    if row.shape != (len(prompts),):
        raise RewardError(
            f"{what} has shape {row.shape} for {len(prompts)} videos; expected one number each"
        )
    return row


def _check_range(name: str, scores_B, prompts) -> None:
    """RewardError if a score of a built-in reward is out of its range."""
    base = name.partition("?")[0]
    _, low, high = BUILT_IN.get(base, ("", -math.inf, math.inf))
    for i in np.flatnonzero((scores_B < low - _ROUNDING) | (scores_B > high + _ROUNDING)):
        raise RewardError(
            f"reward {base} gave {scores_B[i]:g} for sample {i} of the batch ({prompts[i]!r}), "
            f"outside {low:g} to {high:g}; check that its model is the right one"
        )


def _filled(scores_MPK, lost_PK):
    """Replace each lost sample by the mean of the rest of its group, or of all if none is left."""
    filled, kept_MB = scores_MPK.copy(), scores_MPK[:, ~lost_PK]
    everywhere_M1 = kept_MB.mean(1, keepdims=True) if kept_MB.size else np.zeros((len(filled), 1))
    for p, lost_K in enumerate(lost_PK):
        rest = scores_MPK[:, p, ~lost_K]
        filled[:, p, lost_K] = rest.mean(1, keepdims=True) if rest.size else everywhere_M1
    return filled
