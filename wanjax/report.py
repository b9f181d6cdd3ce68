"""One self-contained HTML page about a run, or comparing several runs.

    python -m wanjax.report runs/quickstart                  writes runs/quickstart/report.html
    python -m wanjax.report runs/a runs/b --out compare.html

It shows what the run folder holds (see `load_run`) and works in the middle of a run: the result in
words, videos before and after, curves of metrics.jsonl, where the time went, schedule and config.
Videos and scripts are embedded; nothing is fetched. One module, as no part of the page is of use
elsewhere; its sections are in the order of the page.
"""

import argparse
import base64
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from wanjax import paths, trees
from wanjax.run import guard, metrics

_TEMPLATE = pathlib.Path(__file__).parent / "assets" / "report.html"
_COLOURS = 6  # --s0 … --s5 of the template
_POINTS = 400  # a longer curve is averaged down to this many points
_WIDTH, _HEIGHT = 360, 180  # of a chart, in the units of its viewBox
_VIDEO_ROWS = 6
_VIDEO_BYTES = 64_000_000  # of all videos together, before base64
# Section of the page -> prefixes; a metric goes to the first section with a prefix of one of the
# components of its name.
_SECTIONS = {
    "Reward": ("reward", "success", "eval", "score", "group"),
    "Policy": ("kl", "clip", "ratio", "adv", "logp"),
    "Optimisation": ("loss", "grad", "lr", "update", "skip"),
    "Speed": ("perf",),
    "Other": ("",),
}


@dataclass(frozen=True)
class Sample:
    """One generated video of a step."""

    path: paths.Path
    prompt: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; every part but the name may be empty."""

    name: str
    config: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    schedule: str
    summary: dict[str, Any]
    records: list[dict[str, float]]
    samples: dict[int, list[Sample]]
    evals: list[dict[str, float]] = field(default_factory=list)  # with "step", like records
    changes: list[dict[str, Any]] = field(default_factory=list)  # step, time, key, old, new
    notes: list[str] = field(default_factory=list)

    @property
    def curves(self) -> list[dict[str, float]]:
        """What is plotted over steps: the last evaluation belongs to no training step."""
        logged = {record["step"] for record in self.records}
        return self.records + [found for found in self.evals if found["step"] not in logged]


def load_run(run_dir) -> Run:
    """Read config.json, facts.json ({section: {key: value}}), schedule.txt, summary.json,
    metrics.jsonl, changes.json, evals/step_*.json and samples/step_*/{NNN.mp4, NNN.txt,
    scores.json} of a run folder.

    Raises ValueError for a folder with none of these; a file that cannot be read becomes a note.
    """
    run_dir = paths.resolve(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"no run folder at {run_dir}")
    notes: list[str] = []
    schedule = run_dir / "schedule.txt"
    run = Run(
        name=run_dir.resolve().name,
        config=_read_json(run_dir / "config.json", notes, {}),
        facts=_read_json(run_dir / "facts.json", notes, {}),
        schedule=schedule.read_text(encoding="utf-8") if schedule.exists() else "",
        summary=_read_json(run_dir / "summary.json", notes, {}),
        records=metrics.read(run_dir),
        samples=_read_samples(run_dir / "samples", notes),
        evals=[
            {"step": int(path.stem.removeprefix("step_")), **_read_json(path, notes, {})}
            for path in sorted(run_dir.glob("evals/step_*.json"))
        ],
        changes=guard.changes(run_dir),
        notes=notes,
    )
    if not (run.config or run.records or run.samples or run.summary):
        raise ValueError(f"{run_dir} holds no run (no config.json, metrics.jsonl or samples)")
    return run


def write_report(run_dirs: Sequence, out) -> paths.Path:
    """Write the page about the runs in `run_dirs` to `out` and return its path."""
    runs = [load_run(run_dir) for run_dir in run_dirs]
    out = paths.resolve(out)
    title = " vs ".join(run.name for run in runs)
    parts = (_header(runs, title), _films(runs), _curves(runs), _phases(runs), _facts(runs))
    page = _TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("@@title@@", escape(f"wanjax: {title}"))
    page = page.replace("@@body@@", "\n".join(parts))
    with paths.whole_file(out) as part:
        part.write_text(page, encoding="utf-8")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: RUN... [--out FILE]."""
    parser = argparse.ArgumentParser(prog="python -m wanjax.report", description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, such as runs/quickstart")
    add("--out", help="default: RUN/report.html, or report.html for several runs")
    args = parser.parse_args(argv)
    try:
        default = paths.resolve(args.runs[0] if len(args.runs) == 1 else ".") / "report.html"
        out = write_report(args.runs, args.out or default)
    except ValueError as error:
        parser.exit(1, f"wanjax.report: {error}\n")
    print(f"{out} ({paths.size(out) / 1e6:.1f} MB)")


# ------------------------------------------------------------------------------ reading


def _read_json(path, notes, default):
    if not path.exists():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return default


def _read_samples(folder, notes):
    steps = {}
    for path in sorted(folder.glob("step_*")) if folder.is_dir() else ():
        scores = _read_json(path / "scores.json", notes, [])
        samples = []
        for video in sorted(path.glob("[0-9]*.mp4")):
            text = video.with_suffix(".txt")
            prompt = text.read_text(encoding="utf-8").strip() if text.exists() else ""
            n = int(video.stem)
            samples.append(Sample(video, prompt, scores[n] if n < len(scores) else {}))
        if samples:
            steps[int(path.name.removeprefix("step_"))] = samples
    return steps


# ------------------------------------------------------------------------------ the result


def _header(runs, title):
    parts = [f"<h1>{escape(title)}</h1>"]
    for run in runs:
        name = f"<b>{escape(run.name)}</b>: " if len(runs) > 1 else ""
        parts.append(f'<p class="lead">{name}{escape(_in_words(run))}</p>')
        notes = run.notes + _non_finite(run)
        parts += [f'<p class="note">{name}{escape(note)}</p>' for note in notes]
    if len(runs) == 1:
        parts.append(f'<div class="tiles">{"".join(_tiles(runs[0]))}</div>')
    return "\n".join(parts)


def _in_words(run):
    """Say in a sentence or two where the run stands and what it changed."""
    s, done, text = run.summary, len(run.records), ""
    if "reward_before" in s and "reward_after" in s:
        before, after = s["reward_before"], s["reward_after"]
        verb = "rose" if after > before else "fell" if after < before else "stayed"
        count = f"{s['eval_prompts']} " if "eval_prompts" in s else ""
        text = f"On {count}evaluation prompts the mean reward {verb} "
        text += f"from {_num(before)} to {_num(after)}"
        if "success_before" in s and "success_after" in s:
            before, after = _percent(s["success_before"]), _percent(s["success_after"])
            text += f", strict success went from {before} to {after}"
        text += ". "
    elif "loss_before" in s and "loss_after" in s:
        before, after = _num(s["loss_before"]), _num(s["loss_after"])
        text = f"The loss on held-out clips went from {before} to {after}. "
    elif curve := _finite(run, "reward/mean") or _finite(run, "reward"):
        few = max(len(curve) // 10, 1)
        first, last = statistics.fmean(curve[:few]), statistics.fmean(curve[-few:])
        span = "step" if few == 1 else f"{few} steps"
        text = f"In training rollouts the mean reward went from {_num(first)} (first {span}) "
        text += f"to {_num(last)} (last {span}). "
    if not s:
        of = f" of {run.config['steps']}" if "steps" in run.config else ""
        text += f"There is no summary yet: {done}{of} steps are logged; "
        text += "the run is still going or was stopped."
    return text.strip()


def _finite(run, name):
    return [r[name] for r in run.records if math.isfinite(r.get(name, math.nan))]


def _tiles(run):
    s, tiles = run.summary, []
    for name, label, show in (
        ("reward", "mean reward", _num),
        ("success", "strict success", _percent),
        ("loss", "validation loss", _num),
    ):
        before, after = s.get(f"{name}_before"), s.get(f"{name}_after")
        if before is not None and after is not None:
            gain = after - before
            change = f"{gain:+.3g}" if show is _num else f"{100 * gain:+.1f} points"
            good = -gain if name == "loss" else gain
            tone = "up" if good > 0 else "down" if good < 0 else "soft"
            value = f"<i>{show(before)} →</i> {show(after)}"
            tiles.append(_tile(f"{label}, before → after", value, change, tone))
    total = f" <i>/ {run.config['steps']}</i>" if "steps" in run.config else ""
    state = "finished" if s else "not finished"
    tiles.append(_tile("steps logged", f"{len(run.records)}{total}", state))
    walls = [r["time/wall"] for r in run.records if "time/wall" in r]
    if len(walls) > 1:
        each = statistics.median(b - a for a, b in itertools.pairwise(walls))
        span = metrics.clock(walls[-1] - walls[0])
        tiles.append(_tile("first to last step", span, f"{_num(each)} s a step"))
    return tiles


def _tile(label, value, below, tone="soft"):
    label, below = f'<span class="soft">{label}</span>', f'<span class="{tone}">{below}</span>'
    return f'<div class="card tile">{label}<b>{value}</b>{below}</div>'


def _non_finite(run):
    """Name the metrics that were NaN or infinite, with the first step."""
    bad: dict[str, list[float]] = {}
    for record in run.records:
        for key, value in record.items():
            if not math.isfinite(value):
                bad.setdefault(key, []).append(record["step"])
    count = len(run.records)
    return [
        f"{key} was not a finite number at {len(at)} of {count} steps, first at step {at[0]}."
        for key, at in bad.items()
    ]


# ------------------------------------------------------------------------------ videos


def _films(runs):
    """Show the same prompts side by side: the first samples, then the last ones of each run."""
    sampled = [run for run in runs if run.samples]
    if not sampled:
        return ""
    start = min(sampled[0].samples)
    columns = [("Before", f"step {start}", sampled[0].samples[start])]
    for run in sampled:
        last = max(run.samples)
        name = f"{run.name}, " if len(runs) > 1 else ""
        if run is not sampled[0] or last > start:
            columns.append(("After", f"{name}step {last}", run.samples[last]))
    rows, room = [], _VIDEO_BYTES
    for first in columns[0][2][:_VIDEO_ROWS]:
        cells = []
        for label, where, samples in columns:
            for sample in samples:
                size = paths.size(sample.path)
                same = (sample.path.name, sample.prompt) == (first.path.name, first.prompt)
                if same and 0 < size <= room:
                    room -= size
                    cells.append(_film(label, where, sample))
        if cells:
            prompt = f'<p class="prompt">{escape(first.prompt or first.path.stem)}</p>'
            rows.append(f'<div class="card">{prompt}<div class="row">{"".join(cells)}</div></div>')
    total = len(columns[0][2])
    which = f"The first {len(rows)} of {total}" if len(rows) < total else f"All {total}"
    about = f"{which} sample prompts, in their order; the same prompt starts from the same noise."
    rows = "".join(rows)
    return f'<h2>Videos</h2><p class="soft">{about}</p><div class="films">{rows}</div>'


def _film(label, where, sample):
    data = base64.b64encode(sample.path.read_bytes()).decode()
    scores = "".join(f"<br>{escape(key)} {_num(value)}" for key, value in sample.scores.items())
    source = f'src="data:video/mp4;base64,{data}"'
    return (
        f'<div class="film"><video autoplay loop muted playsinline {source}></video>'
        f'<b>{label}</b> <span class="soft">{escape(where)}{scores}</span></div>'
    )


# ------------------------------------------------------------------------------ curves


@dataclass(frozen=True)
class _Series:
    name: str
    colour: int
    dash: str  # an attribute of its strokes
    steps: list[int]
    values: list[float]


def _curves(runs):
    keys = dict.fromkeys(key for run in runs for record in run.curves for key in record)
    shown = [key for key in keys if key != "step" and not key.startswith("time/")]
    sections: dict[str, list[str]] = {title: [] for title in _SECTIONS}
    for base in dict.fromkeys(metrics.split_name(key)[0] for key in shown):
        series = [s for n, run in enumerate(runs) for s in _series(run, n, base, len(runs) > 1)]
        parts = base.split("/")
        fits = (any(part.startswith(words) for part in parts) for words in _SECTIONS.values())
        section = next(itertools.compress(_SECTIONS, fits))
        sections[section].append(_chart(base, series))
    return "\n".join(
        f'<h2>{title}</h2><div class="charts">{"".join(charts)}</div>'
        for title, charts in sections.items()
        if charts
    )


def _series(run, n, base, several):
    """Return the curves of a metric in run n: a colour per expert, or per run if several."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in run.curves:
        for key, value in record.items():
            name, expert = metrics.split_name(key)
            if name == base:
                steps, values = found.setdefault(expert, ([], []))
                steps.append(int(record["step"]))
                values.append(value)
    if len(found) > 1 and all(curve == found[min(found)] for curve in found.values()):
        found = {"": found[min(found)]}  # such as a learning rate that both experts share
    series = []
    for expert, (steps, values) in sorted(found.items()):
        low = expert == "low"
        name = f"{run.name if several else ''} {expert}".strip()
        colour = n % _COLOURS if several else int(low)
        dash = ' stroke-dasharray="5 4"' if several and low else ""
        series.append(_Series(name, colour, dash, *_thin(steps, values)))
    return series


def _thin(steps, values):
    """Average a long curve over equal bins; a bin with a non-finite value is non-finite."""
    size = math.ceil(len(steps) / _POINTS)
    bins = range(0, len(steps), size)
    return [steps[i] for i in bins], [statistics.fmean(values[i : i + size]) for i in bins]


def _smooth(values):
    """Return the running mean over the last ~n/25 finite values, NaN where the value is not."""
    decay = 1 - 1 / max(len(values) / 25, 1)
    total = weight = 0.0
    out = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight if math.isfinite(value) else math.nan)
    return out


def _chart(title, series):
    """Draw one metric: the values, or thin values and their thick running mean if they are many."""
    left, right, top, bottom = 48, _WIDTH - 6, 10, _HEIGHT - 22
    finite = [v for s in series for v in s.values if math.isfinite(v)]
    x0, x1 = min(s.steps[0] for s in series), max(s.steps[-1] for s in series)
    ticks = _ticks(min(finite, default=0.0), max(finite, default=1.0))
    scale = (bottom - top) / (ticks[-1] - ticks[0])

    def x(step):
        return round(left + (step - x0) / max(x1 - x0, 1) * (right - left), 1)

    def y(value):
        return round(bottom - (value - ticks[0]) * scale, 1)

    svg = []
    for tick, label in zip(ticks, _tick_labels(ticks), strict=True):
        svg.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}"/>')
        svg.append(_text(left - 6, y(tick) + 3.5, "end", label))
    for step, anchor in {x0: "start", x1: "end"}.items():
        svg.append(_text(x(step), _HEIGHT - 6, anchor, step))
    svg.append(_text((left + right) / 2, _HEIGHT - 6, "middle", "step"))
    for s in series:
        many = len(s.values) > 30
        if many:
            svg.append(_path(s, s.values, x, y, 'stroke-width="1" opacity="0.3"'))
        svg.append(_path(s, _smooth(s.values) if many else s.values, x, y, 'stroke-width="2"'))
        bad = [step for step, v in zip(s.steps, s.values, strict=True) if not math.isfinite(v)]
        svg += [f'<circle class="bad" cx="{x(step)}" cy="{bottom}" r="3"/>' for step in bad]
    svg.append(f'<line class="cursor" style="display:none" y1="{top}" y2="{bottom}"/>')
    curves = [{"name": s.name, "x": s.steps, "y": [_num(v) for v in s.values]} for s in series]
    hover = json.dumps({"box": [left, right, _WIDTH], "x0": x0, "x1": x1, "series": curves})
    last = _num(series[0].values[-1]) if len(series) == 1 else ""
    return (
        f'<figure class="card"><figcaption><h3>{escape(title)}</h3><span>{last}</span></figcaption>'
        f"{_legend([s for s in series if s.name])}"
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(title)}"'
        f' data-c="{escape(hover)}">{"".join(svg)}</svg></figure>'
    )


def _text(x, y, anchor, text):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _path(series, values, x, y, style):
    """Draw a stroke through the finite values; one between two gaps is a dot."""
    parts, pen = [], "M"
    for step, value in zip(series.steps, values, strict=True):
        if math.isfinite(value):
            parts.append(f"{pen}{x(step)} {y(value)}" + ("h0.01" if pen == "M" else ""))
        pen = "L" if math.isfinite(value) else "M"
    return f'<path d="{"".join(parts)}" stroke="var(--s{series.colour})" {style}{series.dash}/>'


def _legend(series):
    items = []
    for s in series:
        style = f'stroke="var(--s{s.colour})" stroke-width="3"{s.dash}'
        key = f'<svg viewBox="0 0 18 10"><line x1="1" x2="17" y1="6" y2="6" {style}/></svg>'
        items.append(f"<span>{key}{escape(s.name)}</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def _ticks(low, high):
    """Return about four round numbers that enclose low and high.

    >>> _ticks(0.12, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(i * size, 12 - math.floor(math.log10(size))) for i in range(first, last + 1)]


def _tick_labels(ticks):
    """Return the shortest fixed-point labels that tell the ticks apart, or powers of ten."""
    if not 1e-4 <= max(map(abs, ticks)) < 1e5:
        return [_num(tick) for tick in ticks]
    for digits in range(8):
        labels = [f"{tick:.{digits}f}" for tick in ticks]
        pairs = zip(map(float, labels), ticks, strict=True)
        if all(math.isclose(label, tick, abs_tol=1e-12) for label, tick in pairs):
            break
    return [label.replace("-", "−") for label in labels]


# ------------------------------------------------------------------------------ time and facts


def _phases(runs):
    """Draw a bar per run: mean seconds of each phase, without the first step, which compiles."""
    bars = []
    for run in runs:
        records = run.records[1:] or run.records
        keys = dict.fromkeys(key for r in records for key in r if key.startswith("time/"))
        # parts of a phase, such as time/collect/rollout, overlap and would count twice
        keys = [key for key in keys if key != "time/wall" and key.count("/") == 1]
        means = {key: sum(r.get(key, 0.0) for r in records) / len(records) for key in keys}
        total = sum(means.values())
        if not total > 0:
            continue
        blocks, legend = [], []
        for n, (key, seconds) in enumerate(means.items()):
            fill = f"var(--s{n % _COLOURS})"
            label = f"{key.removeprefix('time/')} {_num(seconds)} s ({seconds / total:.0%})"
            blocks.append(f'<div style="flex:{seconds} 0 0;background:{fill}"></div>')
            key = f'<rect width="14" height="10" rx="2" fill="{fill}"/>'
            legend.append(f'<span><svg viewBox="0 0 18 10">{key}</svg>{escape(label)}</span>')
        title = (f"{run.name}: " if len(runs) > 1 else "") + f"{_num(total)} s a step"
        bar = f'<div class="bar">{"".join(blocks)}</div><div class="legend">{"".join(legend)}</div>'
        bars.append(_card(title, bar, "wide"))
    return f"<h2>Where the time goes</h2>{''.join(bars)}" if bars else ""


def _facts(runs):
    parts = ["<h2>Settings</h2>"]
    if len(runs) > 1:
        parts.append(_config_differences(runs))
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        cards = [_card(name + of, _table(values)) for name, values in run.facts.items()]
        if cards:
            parts.append(f'<div class="facts wide">{"".join(cards)}</div>')
        if run.changes:
            parts.append(_card(f"Changes on resuming{of}", _changes(run.changes), "wide"))
        if run.schedule:
            parts.append(_card(f"Schedule{of}", f"<pre>{escape(run.schedule)}</pre>", "wide"))
        if run.config:
            shown = "" if len(runs) > 1 else " open"
            title = f"<summary><b>Config{escape(of)}</b></summary>"
            table = _table(_settings(run.config))
            parts.append(f'<details class="card wide"{shown}>{title}{table}</details>')
    return "\n".join(parts)


def _changes(changes):
    columns = ("step", "key", "old", "new")
    rows = [columns, *([change[name] for name in columns] for change in changes)]
    cells = ("".join(f"<td>{escape(str(value))}</td>" for value in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _config_differences(runs):
    flats = [_settings(run.config) for run in runs]
    rows = []
    for key in dict.fromkeys(key for flat in flats for key in flat):
        values = [flat.get(key, "(absent)") for flat in flats]
        if len(set(values)) > 1:
            rows.append("".join(f"<td>{escape(text)}</td>" for text in (key, *values)))
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = "".join(f"<tr>{row}</tr>" for row in [f"<th></th>{head}", *rows])
    return _card("What differs in the configs", f"<table>{body}</table>", "wide")


def _card(title, body, extra=""):
    return f'<div class="card {extra}"><h3>{escape(title)}</h3>{body}</div>'


def _table(values):
    cells = [(escape(str(key)), escape(str(value))) for key, value in values.items()]
    rows = "".join(f"<tr><td>{key}</td><td>{value}</td></tr>" for key, value in cells)
    return f"<table>{rows}</table>"


def _settings(config):
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in trees.dotted(config).items()
    }


def _num(value):
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _percent(value):
    return f"{100 * value:.1f}\u00a0%"


if __name__ == "__main__":
    main()
