"""Which steps and noise levels each expert of a few-step student owns, and is scored at.

The student's steps are the run's schedule. The first of two experts ends at the level σ_s where the
second begins (Phased DMD, 2510.27684); teacher and critic may change experts at other levels, which
cuts the scored times into regions. Exit steps and regions are drawn on the host from (seed, step,
expert, pass). Times u are unshifted: σ = S(u; shift).
"""

from dataclasses import dataclass

import numpy as np

from wanjax import schedule
from wanjax.settings import Setup

PASSES = ("student", "critic", "warm")
MARGIN = 0.02  # of the unshifted time between σ_s and the levels scored, where v* has a pole


@dataclass(frozen=True)
class Phase:
    """The part of the trajectory that one expert of the student owns."""

    steps: range
    sigma_s: float  # level at which it ends
    u: tuple[float, float]  # unshifted times that are scored


@dataclass(frozen=True)
class Region:
    """Unshifted times that teacher and critic serve with one expert each."""

    u: tuple[float, float]
    teacher: str
    critic: str


def phase(setup: Setup, expert: str) -> Phase:
    """The phase of an expert of the student.

    The first of two experts is scored inside its range and above σ_s, the second inside its range,
    and an expert that owns every step everywhere. Students that sample with fresh noise end at
    σ_s = 0: their clip at σ_s is a noised x0 anyhow.
    """
    plan = setup.sampling.schedule
    split, steps = plan.high_steps, plan.steps
    own = range(split) if expert == "high" else range(split, steps)
    if split in (0, steps):
        return Phase(own, 0.0, (0.0, 1.0))
    u_b = schedule.unshift_map(plan.boundary, plan.shift)
    if expert == "low":
        return Phase(own, 0.0, (0.0, u_b))
    sigma_s = 0.0 if setup.sampling.solver == "renoise" else float(plan.sigmas[split])
    end = schedule.unshift_map(plan.sigmas[split], plan.shift)
    return Phase(own, sigma_s, (max(u_b, end + MARGIN), 1.0))


def regions(setup: Setup, expert: str) -> list[Region]:
    """The times that an expert is scored at, cut where teacher or critic change experts."""
    lo, hi = phase(setup, expert).u
    shift = setup.sampling.schedule.shift
    models = [setup.roles.get(role, setup.model) for role in ("teacher", "critic")]
    edges = {schedule.unshift_map(m.boundary, shift) for m in models if m.boundary}
    cuts = [lo, *sorted(u for u in edges if lo < u < hi), hi]

    def serving(model, u):
        low = model.boundary and schedule.shift_map(sum(u) / 2, shift) < model.boundary
        return "low" if low else "high"

    parts = zip(cuts[:-1], cuts[1:], strict=True)
    return [Region(u, *(serving(model, u) for model in models)) for u in parts]


def draw(setup: Setup, step: int, expert: str, name: str) -> tuple[int, Region]:
    """Exit step of an expert's pass, and the region that is scored, drawn by its length."""
    steps, found = phase(setup, expert).steps, regions(setup, expert)
    rng = np.random.default_rng((setup.seed, step, number(expert), PASSES.index(name)))
    exit_step = int(rng.integers(steps.start, steps.stop))
    lengths = np.array([region.u[1] - region.u[0] for region in found])
    return exit_step, found[rng.choice(len(found), p=lengths / lengths.sum())]


def teacher_schedule(setup: Setup) -> schedule.Schedule:
    """The teacher's schedule for pairs: every step of the student in warm_substeps parts."""
    plan, n = setup.sampling.schedule, setup.algorithm.warm_substeps
    u = np.minimum(schedule.unshift_map(plan.sigmas, plan.shift), 1.0)  # σ_0 = 1 may round up
    levels = [np.linspace(a, b, n, endpoint=False) for a, b in zip(u[:-1], u[1:], strict=True)]
    boundary = setup.roles.get("teacher", setup.model).boundary
    return schedule.make_schedule(
        "explicit", n * plan.steps, plan.shift, boundary, np.concatenate(levels)
    )


def number(expert: str) -> int:
    """0 for expert high, 1 for low, to draw from."""
    return ("high", "low").index(expert)
