"""report.py: one page with what a run folder holds, at any moment of a run, nothing fetched."""

import doctest
import html.parser
import json
import math
import pathlib
import re

import numpy as np
import pytest

from wanjax import report
from wanjax.data import video
from wanjax.run import disk, guard, metrics

COLOURS = {
    "red": (214, 52, 44),
    "blue": (44, 92, 214),
    "green": (36, 150, 76),
    "yellow": (232, 190, 40),
}
MOVES = {"left": (0, -2), "right": (0, 2), "up": (-2, 0), "down": (2, 0)}


def clip(colour, move, blur=0.0, frames=17, size=64):
    """A disc that moves over a gray background."""
    grid = np.stack(np.mgrid[:size, :size], -1)
    out = np.full((frames, size, size, 3), 150.0)
    for t in range(frames):
        centre = size / 2 + (t - frames / 2) * np.array(MOVES[move])
        inside = np.clip(14 - np.linalg.norm(grid - centre, axis=-1), 0, 1)[..., None]
        out[t] += inside * (1 - blur) * (np.array(COLOURS[colour]) - out[t])
    return np.clip(out + np.random.default_rng(0).normal(0, 40 * blur, out.shape), 0, 255).astype(
        np.uint8
    )


def set_wall_times(run_dir, seconds):
    """Make the logged steps `seconds` apart."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["time/wall"] = 1.8e9 + seconds * record["step"]
        record["perf/steps_per_second"] = 1 / seconds if record["step"] else 0.0
    lines = [json.dumps(record) + "\n" for record in records]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def make_run(run_dir, steps=40, done=None, lr=2e-4, gain=1.0, seed=0, samples=6):
    """Write a run folder as training does: `done` of `steps` steps (None: finished)."""
    rng = np.random.default_rng(seed)
    done_steps = steps if done is None else done
    config = {
        "name": run_dir.name,
        "seed": seed,
        "steps": steps,
        "model": {"path": "tinywan22"},
        "grpo": {"group": 8, "clip": {"high": 1e-3, "low": 1e-3}},
        "optim": {"lr": lr},
    }
    guard.claim(run_dir, config, resume=True)
    disk.write_json(
        run_dir / "facts.json",
        {
            "Model": {"name": "tinywan22", "parameters, high": "2,831,424", "LoRA rank": 16},
            "Mesh": {"data": 1, "fsdp": 1, "context": 1, "tensor": 1, "stage": 1},
            "Versions": metrics.environment(),
        },
    )
    table = [
        f"{i:4d}  {1 - i / 10:.4f}  {1000 - 100 * i:6.1f}  {'high' if i < 7 else 'low'}"
        for i in range(10)
    ]
    (run_dir / "schedule.txt").write_text(
        "\n".join(["step   sigma       t  expert", *table]) + "\n"
    )
    writer = metrics.MetricsWriter(run_dir, total=steps)
    for step in range(done_steps):
        progress = step / steps
        writer.write(
            step,
            {
                "reward/mean": 0.52 + gain * 0.22 * progress + rng.normal(0, 0.02),
                "reward/std": 0.2 - 0.05 * progress + rng.normal(0, 0.01),
                "success/mean": 0.41 + gain * 0.2 * progress + rng.normal(0, 0.04),
                **{f"grpo/loss/{e}": rng.normal(0, 0.01) for e in metrics.EXPERTS},
                **{
                    f"grpo/kl/{e}": k * progress**1.5 * (1 + rng.normal(0, 0.1))
                    for e, k in (("high", 0.004), ("low", 0.0016))
                },
                **{
                    f"grpo/clip_frac/{e}": 0.1 * progress + abs(rng.normal(0, 0.02))
                    for e in metrics.EXPERTS
                },
                **{f"grpo/ratio_mean/{e}": 1 + rng.normal(0, 1e-4) for e in metrics.EXPERTS},
                **{
                    f"grad_norm/{e}": g * (1 + abs(rng.normal(0, 0.2)))
                    for e, g in (("high", 1.2), ("low", 0.4))
                },
                **{f"lr/{e}": lr for e in metrics.EXPERTS},
                "time/rollout": 3.1 + rng.normal(0, 0.1),
                "time/decode": 0.8,
                "time/reward": 0.12,
                "time/update": 4.2 + rng.normal(0, 0.2) + (20 if step == 0 else 0),
                "time/checkpoint": 0.2,
                "time/update/forward": 1.7,  # a part of update: not counted again
            },
        )
    writer.close()
    set_wall_times(run_dir, 8.4)
    words = [(c, m) for c in COLOURS for m in MOVES][:samples]
    prompts = [f"a {c} circle moving {m} on a gray background" for c, m in words]
    for at, blur in ((0, 0.6), *(((steps, 0.05),) if done is None else ())):
        scores = [
            {"reward": round(1 - blur / 2 - 0.02 * n, 3), "success": float(blur < 0.3)}
            for n in range(samples)
        ]
        video.write_samples(run_dir, at, [clip(c, m, blur) for c, m in words], prompts, 8, scores)
    if done is None:
        disk.write_json(
            run_dir / "summary.json",
            {
                "reward_before": 0.523,
                "reward_after": 0.523 + 0.22 * gain,
                "success_before": 0.41,
                "success_after": 0.41 + 0.2 * gain,
                "eval_prompts": 64,
                "seconds": {"rollout": 130.0},
                "report": "report.html",
            },
        )
    return run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "quick", steps=6, samples=2)


class Page(html.parser.HTMLParser):
    """Checks that tags nest and collects what the tests ask for."""

    VOID = {"meta", "br", "img", "link"}

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.text, self.charts, self.urls = [], [], "", {}, []
        self.feed(pathlib.Path(path).read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.urls += [attrs[key] for key in ("src", "href", "xlink:href") if key in attrs]
        if attrs.get("class") == "chart":
            self.charts[attrs["aria-label"]] = json.loads(attrs["data-c"])["series"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def write(runs, out):
    return Page(report.write_report(runs, out / "report.html"))


def test_finished_run_shows_result_videos_curves_times_and_settings(finished, tmp_path):
    page = write([finished], tmp_path)
    assert (
        "On 64 evaluation prompts the mean reward rose from 0.523 to 0.743, "
        "strict success went from 41.0\u00a0% to 61.0\u00a0%." in page.text
    )
    assert "+20.0 points" in page.text and "8.4 s a step" in page.text
    assert sum(tag == "video" for tag, _ in page.tags) == 4
    assert "a red circle moving left on a gray background" in page.text
    assert [s["name"] for s in page.charts["grpo/kl"]] == ["high", "low"]
    assert [s["name"] for s in page.charts["lr"]] == [""]  # the same for both experts
    assert "rollout 3." in page.text and "time/wall" not in page.text
    assert "update/forward" not in page.text
    for text in ("0.3000   300.0  low", "grpo.clip.high", "2,831,424", "tensor"):
        assert text in page.text


def test_curves_hold_the_logged_values(finished, tmp_path):
    (curve,) = write([finished], tmp_path).charts["reward/mean"]
    records = metrics.read(finished)
    assert curve["x"] == [record["step"] for record in records] == list(range(6))
    for shown, record in zip(curve["y"], records, strict=True):
        assert float(shown) == pytest.approx(record["reward/mean"], rel=1e-3)


def test_curves_of_evaluations_end_with_the_last_one(tmp_path):
    """Which comes after the last step, so no line of metrics.jsonl has it."""
    make_run(tmp_path / "r", steps=6)
    for step, value in ((0, 0.25), (6, 0.75)):
        path = tmp_path / f"r/evals/step_{step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        disk.write_json(path, {"eval/own": value})
    (tmp_path / "r/metrics.jsonl").write_text(
        "".join(
            json.dumps(record | ({"eval/own": 0.25} if record["step"] == 0 else {})) + "\n"
            for record in metrics.read(tmp_path / "r")
        )
    )
    page = write([tmp_path / "r"], tmp_path)
    (curve,) = page.charts["eval/own"]
    assert curve["x"] == [0, 6] and [float(y) for y in curve["y"]] == [0.25, 0.75]
    assert page.charts["reward/mean"][0]["x"] == list(range(6))


def test_page_is_self_contained_and_embeds_the_very_files(finished, tmp_path):
    page = write([finished], tmp_path)
    assert page.urls and all(url.startswith("data:video/mp4;base64,") for url in page.urls)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text)
    embedded = [report.base64.b64decode(url.split(",", 1)[1]) for url in page.urls]
    files = [finished / f"samples/step_{s:06d}/{n:03d}.mp4" for n in (0, 1) for s in (0, 6)]
    assert embedded == [file.read_bytes() for file in files]


def test_half_way_and_with_parts_missing_the_page_still_comes(tmp_path):
    run = make_run(tmp_path / "half", steps=6, done=3, samples=1)
    page = write([run], tmp_path)
    assert "3 of 6 steps are logged" in page.text and "went from" in page.text
    assert sum(tag == "video" for tag, _ in page.tags) == 1
    for name in ("schedule.txt", "facts.json", "samples/step_000000/000.mp4", "metrics.jsonl"):
        (run / name).unlink()
        write([run], tmp_path)
    (run / "summary.json").write_text('{"reward_bef')
    assert "summary.json cannot be read" in write([run], tmp_path).text


def test_two_runs_share_the_axes_and_show_what_differs(finished, tmp_path):
    other = make_run(tmp_path / "other", steps=9, lr=5e-5, gain=0.3, seed=1, samples=2)
    page = write([finished, other], tmp_path)
    assert [s["name"] for s in page.charts["reward/mean"]] == ["quick", "other"]
    kl = [s["name"] for s in page.charts["grpo/kl"]]
    assert kl == ["quick high", "quick low", "other high", "other low"]
    assert sum(tag == "video" for tag, _ in page.tags) == 6  # before, and after of each run
    differences = page.text.split("What differs in the configs")[1].split("Model of quick")[0]
    assert "optim.lr" in differences and "model.path" not in differences


def test_non_finite_values_are_gaps_and_are_named(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "run", total=4)
    for step, loss in enumerate([1.0, math.nan, 0.5, 0.25]):
        writer.write(step, {"loss/high": loss})
    writer.close()
    page = write([tmp_path / "run"], tmp_path)
    assert "loss/high was not a finite number at 1 of 4 steps, first at step 1." in page.text
    assert [attrs["class"] for tag, attrs in page.tags if tag == "circle"] == ["bad"]
    strokes = [attrs["d"] for tag, attrs in page.tags if tag == "path"]
    assert strokes[0].count("M") == 2 and "nan" not in strokes[0]


def test_text_from_the_run_is_escaped(tmp_path):
    guard.claim(tmp_path / "run", {"prompt": "<script>alert(1)</script>"}, resume=True)
    text = report.write_report([tmp_path / "run"], tmp_path / "r.html").read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_long_curves_are_thinned_to_their_means():
    steps, values = report._thin(list(range(1000)), [float(n % 2) for n in range(1000)])
    assert len(steps) == 334 and steps[:3] == [0, 3, 6]
    assert values[:2] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    _, broken = report._thin(list(range(1000)), [math.nan] + [1.0] * 999)
    assert math.isnan(broken[0]) and broken[1] == 1.0


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.9998, 1.0003, ["0.9998", "1.0000", "1.0002", "1.0004"]),
        (-3, 5, ["−4", "−2", "0", "2", "4", "6"]),
        (2e-4, 2e-4, ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003"]),
        (0, 4e6, ["0.0", "1e6", "2e6", "3e6", "4e6"]),
    ],
)
def test_ticks_are_round_enclose_the_values_and_can_be_told_apart(low, high, labels):
    ticks = report._ticks(low, high)
    assert ticks[0] <= low and high <= ticks[-1] * (1 + 1e-12)
    got = report._tick_labels(ticks)
    assert len(set(got)) == len(ticks)
    assert [float(t.replace("−", "-")) for t in got] == pytest.approx(
        [float(t.replace("−", "-")) for t in labels]
    )


def test_command_line_writes_into_the_run_or_says_in_a_line_why_not(finished, tmp_path, capsys):
    report.main([str(finished)])
    assert (finished / "report.html").stat().st_size > 10_000
    (finished / "report.html").unlink()
    assert "report.html" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "gone", "no run folder"),
        (tmp_path / "empty", "holds no run"),
    ):
        with pytest.raises(SystemExit) as stop:
            report.main([str(path)])
        assert stop.value.code == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_docstring_examples():
    assert doctest.testmod(report).failed == 0
