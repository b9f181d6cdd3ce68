"""Noise schedules, expert assignment and SDE step strategies: host data in float64, never traced.

x_t = (1 − σ)·x0 + σ·ε and t = 1000·σ. A grid gives σ_0 > … > σ_{I−1} > σ_I = 0 through the shift
map S(u; k) = k·u / (1 + (k − 1)·u), for which S(S(u; a); b) = S(u; a·b) and S⁻¹(u; k) = S(u; 1/k).
Step i uses expert "high" when t_i ≥ 1000·boundary. That comparison flips on rounding (shift 3, 10
steps puts t_3 on 875), so it is made here once, in float64, and never inside jit.

Some grids (see `GRIDS`) have integer timesteps, which are truncated: the model gets floor(1000·σ)
while the solver uses the exact σ.

Dimensions: I sampler steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Grid -> its n levels u before the shift k.
GRIDS: dict[str, Any] = {
    # diffusers FlowMatchEuler: low end shifted twice
    "euler": lambda n, k: np.linspace(1.0, shift_map(0.001, k), n),
    "linspace": lambda n, k: np.linspace(1.0, 1 / n, n),  # FlowMatchEuler given sigmas
    "eulerlin": lambda n, k: np.linspace(1.0, 1 / n, n),  # another name of it
    "simple": lambda n, k: np.linspace(1.0, 0.0, n + 1)[:-1],  # DanceGRPO, UniRL
    "unipc": lambda n, k: np.linspace(1.0, 0.001, n + 1)[:-1],  # diffusers UniPC
    # original Wan UniPC, diffusers DPM++; their 0.999 is a float32 above the decimal number, which
    # would give integer timesteps one lower
    "wan_unipc": lambda n, k: np.linspace(float(np.float32(0.999)), 0.0, n + 1)[:-1],
    "wan_dpm": lambda n, k: np.linspace(1.0, 0.0, n + 1)[:-1],  # original Wan DPM++
    "explicit": None,  # they are given: diffusers set_timesteps(sigmas=...)
}
INTEGER_TIMESTEPS = ("unipc", "wan_unipc", "wan_dpm")


@dataclass(frozen=True, eq=False)
class Schedule:
    """sigmas [I+1] in 0..1 and timesteps [I] in 0..1000, float64; expert [I] int, 1 = high."""

    sigmas: np.ndarray
    timesteps: np.ndarray
    expert: np.ndarray
    grid: str
    shift: float
    boundary: float | None

    @property
    def steps(self) -> int:
        """Number of sampler steps I."""
        return len(self.timesteps)

    @property
    def high_steps(self) -> int:
        """Number of leading steps served by the high-noise expert."""
        return int(self.expert.sum())


@dataclass(frozen=True)
class Strategy:
    """Which steps are stochastic and trained (config section `sde`).

    name: a key of STRATEGIES.
    window: steps per window (for fraction: steps drawn at random, 0 = all).
    low_window: steps of expert low's window, for dual_window; 0 = as many as expert high's.
    range: [lo, hi) of allowed steps; None = every step except the last.
    fraction: (from, to) of the trajectory, for fraction.
    candidates: steps to draw from, for global_window; None = the range.
    iters, decay: epochs spent on one window by mix_progressive, constant (None) or falling as the
      window advances: "linear" to 1, "exp" by e^-0.1 a step from step 13.
    stride: steps by which it advances (0 = window); roll_back: start over after the last window.
    include_last: allow the last step, whose Gaussian is too peaked for usual clip ranges.
    """

    name: str
    window: int = 0
    low_window: int = 0
    range: tuple[int, int] | None = None
    fraction: tuple[float, float] = (0.0, 1.0)
    candidates: tuple[int, ...] | None = None
    iters: int = 25
    stride: int = 0
    decay: str | None = None
    roll_back: bool = True
    include_last: bool = False


def shift_map(u, k: float):
    """S(u; k) = k·u / (1 + (k − 1)·u)."""
    return k * u / (1 + (k - 1) * u)


def unshift_map(s, k: float):
    """Invert `shift_map`: u with S(u; k) = s."""
    return shift_map(s, 1 / k)


def make_schedule(grid: str, steps: int, shift: float, boundary=None, sigmas=None) -> Schedule:
    """Build a Schedule of `steps` steps.

    boundary: steps with t ≥ 1000·boundary belong to expert high; None means one expert, "high".
    sigmas: for grid "explicit", decreasing levels [steps] in (0, 1], before the shift, without the
      final 0.
    """
    if grid not in GRIDS:
        raise ValueError(f"sampling.grid is {grid!r}; expected one of {', '.join(GRIDS)}")
    if steps < 1:
        raise ValueError(f"sampling.steps is {steps}; expected at least 1")
    if not shift > 0:
        raise ValueError(f"sampling.shift is {shift}; expected a positive number")
    if boundary is not None and not 0 < boundary < 1:
        raise ValueError(f"model boundary is {boundary}; expected None or a fraction in (0, 1)")
    if (grid == "explicit") != (sigmas is not None):
        raise ValueError(
            f"sampling.sigmas is {sigmas} with sampling.grid {grid!r}; set both or neither"
        )
    u = np.asarray(GRIDS[grid](steps, shift) if sigmas is None else sigmas, np.float64)
    if u.shape != (steps,):
        raise ValueError(
            f"sampling.sigmas has shape {u.shape}; expected sampling.steps = {steps} levels"
        )
    if not (u[0] <= 1 and u[-1] > 0 and np.all(np.diff(u) < 0)):
        raise ValueError(f"sampling.sigmas is {u.tolist()}; expected decreasing levels in (0, 1]")
    levels = shift_map(u, shift)
    if grid == "unipc":
        levels[0] -= 1e-6  # keeps log((1 − σ)/σ) finite
    timesteps = 1000 * levels
    if grid in INTEGER_TIMESTEPS:
        timesteps = np.floor(timesteps)
    expert = (timesteps >= 1000 * (boundary or 0)).astype(np.int64)
    return Schedule(np.append(levels, 0.0), timesteps, expert, grid, float(shift), boundary)


def describe(schedule: Schedule, guidance: dict[str, float], steps=()) -> str:
    """Return the step table as text: step, sigma, t, expert, guidance and SDE (steps listed) or
    ODE."""
    head = f"grid {schedule.grid}, {schedule.steps} steps, shift {schedule.shift:g}"
    head += f", boundary {schedule.boundary:g}" if schedule.boundary is not None else ", one expert"
    lines = [head, "step    sigma         t  expert  guidance  kind"]
    for i, (sigma, t) in enumerate(zip(schedule.sigmas[:-1], schedule.timesteps, strict=True)):
        expert = expert_name(schedule, i)
        kind = "SDE" if i in steps else "ODE"
        lines.append(f"{i:4d}  {sigma:.6f}  {t:8.3f}  {expert:6s}  {guidance[expert]:8g}  {kind}")
    return "\n".join(lines)


def expert_name(schedule: Schedule, step: int) -> str:
    """Name of the expert that serves a step."""
    return "high" if schedule.expert[step] else "low"


def slot_table(schedule: Schedule, steps) -> np.ndarray:
    """slot_I int32 for `sampler.rollout`: position of each step among `steps`, −1 for an ODE
    step."""
    slots = np.full(schedule.steps, -1, np.int32)
    slots[np.asarray(steps, np.int64)] = np.arange(len(steps))
    return slots


def sde_steps(schedule: Schedule, strategy: Strategy, *, epoch=0, seed=0) -> np.ndarray:
    """Return the sorted indices of the SDE steps of an epoch: a pure function of its arguments.

    Draws use numpy's default_rng(seed + epoch), and torch's randperm for global_window, so that
    the windows of Flow-GRPO, miles, Flow-Factory, MixGRPO and UniRL come out for the same seeds.
    """
    name = strategy.name
    if name not in STRATEGIES:
        raise ValueError(f"sde.strategy is {name!r}; expected one of {', '.join(STRATEGIES)}")
    if strategy.low_window and name != "dual_window":
        raise ValueError(
            f"sde.low_window is {strategy.low_window} but sde.strategy is {name!r}; set "
            "it to 0, or the strategy to 'dual_window'"
        )
    steps = np.arange(*_range(schedule, strategy))
    chosen = STRATEGIES[name](steps, schedule, strategy, epoch, seed)
    if len(chosen) == 0:
        raise ValueError(
            f"sde.strategy {name!r} selects no step of {schedule.steps}; widen sde.range"
        )
    return np.sort(np.asarray(chosen, np.int64))


def _range(schedule, strategy):
    """[lo, hi) of steps that may be stochastic; the last step only with include_last."""
    last = schedule.steps if strategy.include_last else schedule.steps - 1
    lo, hi = strategy.range or (0, last)
    if not 0 <= lo < hi <= last:
        raise ValueError(
            f"sde.range is [{lo}, {hi}); expected a non-empty range inside [0, {last}) of "
            f"{schedule.steps} steps (the last step needs sde.include_last)"
        )
    return lo, hi


def _draw_window(steps, window, rng, where, key="sde.window"):
    """Draw `window` consecutive entries of the list of steps; errors name where and config key."""
    if not 1 <= window <= len(steps):
        raise ValueError(
            f"{key} is {window} but {where} has {len(steps)} steps to draw from; "
            f"set {key} to 1..{len(steps)}, or change sde.range, sampling.steps or "
            f"sampling.shift"
        )
    start = int(rng.integers(0, len(steps) - window + 1))
    return steps[start : start + window]


def _fraction(steps, schedule, strategy, epoch, seed):
    (a, b), window = strategy.fraction, strategy.window
    if not 0 <= a < b <= 1:
        raise ValueError(f"sde.fraction is ({a}, {b}); expected 0 <= from < to <= 1")
    # 1e-9: 0.29·100 is 28.999999999999996
    first, stop = (int(f * schedule.steps + 1e-9) for f in (a, b))
    steps = steps[(steps >= first) & (steps < stop)]
    if window == 0:
        return steps
    if not 1 <= window <= len(steps):
        raise ValueError(f"sde.window is {window} but sde.fraction leaves {len(steps)} steps")
    return np.random.default_rng(seed + epoch).choice(steps, window, replace=False)


def _window(steps, schedule, strategy, epoch, seed):
    return _draw_window(steps, strategy.window, np.random.default_rng(seed + epoch), "sde.range")


def _high_window(steps, schedule, strategy, epoch, seed):
    high = steps[schedule.expert[steps] == 1]
    return _draw_window(high, strategy.window, np.random.default_rng(seed + epoch), "expert high")


def _dual_window(steps, schedule, strategy, epoch, seed):
    """One window per expert from one generator, high first; sde.range restricts only the high
    window."""
    if schedule.boundary is None:
        raise ValueError("sde.strategy is 'dual_window' but the model has one expert; use 'window'")
    rng = np.random.default_rng(seed + epoch)
    low = np.arange(schedule.high_steps, schedule.steps - (not strategy.include_last))
    high = _draw_window(steps[schedule.expert[steps] == 1], strategy.window, rng, "expert high")
    key = "sde.low_window" if strategy.low_window else "sde.window"
    window = strategy.low_window or strategy.window
    return np.concatenate([high, _draw_window(low, window, rng, "expert low", key)])


def _global_window(steps, schedule, strategy, epoch, seed):
    candidates, window = strategy.candidates or tuple(steps), strategy.window
    if not set(candidates) <= set(steps) or len(set(candidates)) < len(candidates):
        raise ValueError(
            f"sde.candidates is {list(candidates)}; expected distinct steps in [{steps[0]}, "
            f"{steps[-1] + 1}) (the last step needs sde.include_last)"
        )
    n = len(candidates)
    if not 1 <= window <= n:
        raise ValueError(f"sde.window is {window}; expected 1..{n} (sde.candidates)")
    return [candidates[i] for i in _torch_randperm(n, seed + epoch)[:window]]


def _mix_progressive(steps, schedule, strategy, epoch, seed):
    """MixGRPO (2507.21802): a window that walks from noisy to clean; full windows only, as slots
    are static."""
    window, stride, n = strategy.window, strategy.stride or strategy.window, len(steps)
    if not 1 <= window <= n:
        raise ValueError(f"sde.window is {window}; expected 1..{n} (the steps in sde.range)")
    if strategy.iters < 1:
        raise ValueError(f"sde.iters is {strategy.iters}; expected at least 1 epoch per window")
    first, last = steps[0], steps[-1] + 1
    start = first
    while epoch >= (spent := _window_iters(strategy, start, last)):
        epoch -= spent
        if start + stride + window <= last:
            start += stride
        elif strategy.roll_back:
            start = first
        else:
            break
    return range(start, start + window)


def _window_iters(strategy, start, last):
    """Epochs spent on the window that begins at `start`."""
    if strategy.decay is None:
        return strategy.iters
    if strategy.decay == "linear":
        progress = start / last
        return max(1, int(strategy.iters * (1 - progress) + progress))
    if strategy.decay == "exp":
        return int(np.ceil(strategy.iters * np.exp(-0.1 * max(0, start - 13))))
    raise ValueError(f"sde.decay is {strategy.decay!r}; expected None, 'linear' or 'exp'")


STRATEGIES = {
    "all": lambda steps, *_: steps,
    "fraction": _fraction,
    "window": _window,
    "high_window": _high_window,
    "dual_window": _dual_window,
    "global_window": _global_window,
    "mix_progressive": _mix_progressive,
    "mix_random": _window,  # MixGRPO's random windows are the same draw
}


def _torch_randperm(n: int, seed: int) -> list[int]:
    """torch.randperm(n) of a CPU generator with this seed: Fisher-Yates over raw mt19937 words."""
    words = np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)
    order = list(range(n))
    for i in range(n - 1):
        j = i + int(words[i]) % (n - i)
        order[i], order[j] = order[j], order[i]
    return order
