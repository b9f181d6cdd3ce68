"""Evaluation of a run: videos of fixed prompts from fixed noise, their scores, losses of held-out
clips, the best checkpoint and the summary.

evals/step_*.json holds one result; it is written once, so an interrupted run does not repeat it.
"""

import collections
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax import paths, rewards, sampling, settings
from wanjax import state as states
from wanjax.algorithms import Algorithm, Tools
from wanjax.data import Item, latents, text, video
from wanjax.models import presets
from wanjax.parallel import distributed, sharding
from wanjax.run import disk, metrics


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What every evaluation of a run shares."""

    run_dir: paths.Path
    model: presets.ModelConfig
    plan: settings.SamplingConfig  # as config.eval asks
    policy: str  # that is evaluated, see state.rollout_params
    rewards: settings.RewardConfig
    tools: Tools
    preview: Item | None  # prompts or first frames to make videos of
    seed: int
    shown: int  # how many of these become sample videos
    static: dict  # of sampling.rollout, see algorithms.Extras.rollout_static
    validate: Callable | None  # state -> {"eval/…": mean over the held-out clips}

    def path(self, step: int) -> paths.Path:
        """The result of an evaluation before step `step`."""
        return self.run_dir / "evals" / f"step_{step:06d}.json"


def run(job: Evaluation, state: states.State, step: int, writer=None) -> None:
    """Make, score and write videos, measure held-out clips, and write the result, once.

    writer: metrics.MetricsWriter of the running training, if it still runs.
    """
    if not (job.preview or job.validate):
        return
    path = job.path(step)
    done = multihost_utils.broadcast_one_to_all(np.array(path.exists()))  # one answer for all
    if done:  # before the run was interrupted
        if writer:
            writer.write(step, json.loads(path.read_text(encoding="utf-8")))
        return
    result = job.validate(state) if job.validate else {}
    videos, scores = previews(job, state) if job.preview else ([], {})
    known = {name: values[np.isfinite(values)] for name, values in scores.items()}
    result |= {
        f"eval/{name}": float(values.mean()) for name, values in known.items() if values.size
    }
    if jax.process_index() != 0:
        return
    line, films = f"eval at step {step}: {_in_words(result)}", []
    if job.preview:
        line += f" on {len(job.preview.texts)} prompts"
        if videos:
            folder, films = _write_samples(job, step, videos, scores)
            line += f", videos in {folder}"
    disk.write_json(path, result)
    (writer.say if writer else print)(line)
    if writer:
        writer.write(step, result)
        for film in films:
            writer.video(step, *film)


def previews(job: Evaluation, state: states.State):
    """(the first `shown` videos of the fixed prompts, {score: value of each prompt}); no scores
    without a reward.

    Each process scores the videos of its own devices; those that are shown come to all.
    """
    item = job.preview
    assert item is not None
    ctx_PSE, uncond_1SE = text.align(item.ctx_PSE, job.tools.uncond_1SE)
    made = sampling.clips(
        states.rollout_params(state, job.policy), job.tools.vae, ctx_PSE, uncond_1SE,
        model=job.model, plan=job.plan, seed=job.seed, cond=item.cond, **job.static,
    )  # fmt: skip
    shown, weights = [], job.rewards.weights

    def keeping():
        for batch, count in made:
            distributed.check_stop()
            if len(shown) < job.shown:
                shown.extend(sharding.fetch(batch)[: min(count, job.shown - len(shown))])
            yield batch, count

    if not job.tools.reward:
        collections.deque(keeping(), maxlen=0)
        return shown, {}
    scores, info = rewards.run(
        keeping(), item.texts, job.tools.reward, weights, failure=job.rewards.failure
    )
    total = np.sum([weights[name] * scores[name] for name in scores], axis=0)
    return shown, {"reward": total, **info}


def validation(
    algorithm: Algorithm, setup: settings.Setup, stream: latents.LatentStream, tools: Tools
) -> Callable | None:
    """A function state -> {name: mean over the held-out clips}; None where the algorithm measures
    none."""
    validate = getattr(algorithm, "validate", None)
    if validate is None:
        return None

    def measure(state) -> dict[str, float]:
        found: dict[str, list] = {}
        for item, count in stream.heldout():
            for name, value_P in validate(state, setup, item, tools).items():
                found.setdefault(name, []).append(value_P[:count])
        return {name: float(np.concatenate(parts).mean()) for name, parts in found.items()}

    return measure


def best(run_dir: paths.Path) -> int | None:
    """The step with the highest reward in an evaluation."""
    found = {}
    for path in sorted((run_dir / "evals").glob("step_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "eval/reward" in result:
            found[int(path.stem.removeprefix("step_"))] = result["eval/reward"]
    return max(found, key=found.__getitem__) if found else None


def write_summary(job: Evaluation, step: int, seconds: float, evaluated: float) -> dict[str, Any]:
    """Write summary.json, the result of a run before and after; returns what it holds.

    seconds: of this process; evaluated: of the last evaluation, which no metric has.
    """
    times = {"time/eval": evaluated}
    for record in metrics.read(job.run_dir):
        for name, value in record.items():
            if name.startswith("time/") and name != "time/wall":
                times[name] = times.get(name, 0.0) + value
    summary: dict[str, Any] = {
        "steps": step,
        "seconds": {name.removeprefix("time/"): round(value, 2) for name, value in times.items()},
        "seconds_this_process": round(seconds, 2),
        "report": str(job.run_dir / "report.html"),
    }
    for when, at in (("before", 0), ("after", step)):
        if job.path(at).exists():
            summary |= _results(json.loads(job.path(at).read_text(encoding="utf-8")), when)
    if job.preview and job.tools.reward:
        summary["eval_prompts"] = len(job.preview.texts)
    disk.write_json(job.run_dir / "summary.json", summary)
    return summary


def describe(summary: dict[str, Any]) -> list[str]:
    """The lines of a summary for the console: reward, success and loss, before and after."""
    lines = []
    for name in ("reward", "success", "loss"):
        if {f"{name}_before", f"{name}_after"} <= summary.keys():
            before, after = summary[f"{name}_before"], summary[f"{name}_after"]
            on = "held-out clips" if name == "loss" else f"{summary['eval_prompts']} prompts"
            lines.append(f"{name:8} {before:.3f} -> {after:.3f} on {on}")
    return lines


def _results(result: dict[str, float], when: str) -> dict[str, float]:
    """Reward, success and mean loss of an evaluation as summary.json names them."""
    found = {
        f"{name}_{when}": result[f"eval/{name}"]
        for name in ("reward", "success")
        if f"eval/{name}" in result
    }
    losses = [value for name, value in result.items() if name.startswith("eval/loss/")]
    if losses:  # of held-out clips, mean over the experts
        found[f"loss_{when}"] = sum(losses) / len(losses)
    return found


def _write_samples(job: Evaluation, step: int, videos, scores):
    """Write the first videos with prompts and scores; returns (folder, [(name, file, prompt)])."""
    assert job.preview is not None
    shown, texts = videos[: job.shown], job.preview.texts
    names = {name: name.split("/")[-1] for name in scores}
    rows = [
        {names[n]: float(v[i]) for n, v in scores.items() if np.isfinite(v[i])}  # the rest is lost
        for i in range(len(shown))
    ]
    folder = video.write_samples(
        job.run_dir, step, shown, texts[: len(shown)], job.model.sampling.fps,
        rows if scores else None,
    )  # fmt: skip
    films = [(f"samples/{i}", folder / f"{i:03d}.mp4", texts[i]) for i in range(len(shown))]
    return folder, films


def _in_words(result: dict[str, float]) -> str:
    """The main values of an evaluation: losses of held-out clips, reward, success."""
    losses = [n.removeprefix("eval/") for n in result if n.startswith("eval/loss/")]
    parts = [f"{name} {result[f'eval/{name}']:.4g}" for name in losses]
    if "eval/reward" in result:
        parts.append(f"reward {result['eval/reward']:.3f}")
    if "eval/success" in result:
        parts.append(f"success {result['eval/success']:.1%}")
    return ", ".join(parts) or "no scores"
