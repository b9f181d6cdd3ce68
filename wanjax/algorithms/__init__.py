"""The contract of an algorithm: all that the trainer, the planner and the benchmarks call.

An algorithm is a module of this folder with the names of `Algorithm`, listed in setup.ALGORITHMS.
Nothing outside reads another name of it. Algorithms do not import each other; what two of them
share is in `groups` (scored groups of samples) and `steps` (optimizer steps over micro-batches).

A step is collect -> update. `programs` gives the planner the jitted functions behind both, with
the abstract arguments that they get.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from wanjax.data import Item
from wanjax.settings import Setup
from wanjax.state import State


@dataclass(frozen=True, eq=False)
class Tools:
    """What collecting needs beside the trained state."""

    vae: dict  # parameters
    uncond_1SE: Any  # text rows of the negative prompt
    reward: Any = None  # (video, prompts) -> ({name: scores}, info); None without rewards


@dataclass(frozen=True, eq=False)
class Program:
    """One jitted function of a step, as the planner compiles it.

    arguments: abstract outputs of the phases before it, by phase -> positional arguments
    (jax.ShapeDtypeStruct leaves, with shardings). What a phase returns that was not compiled, or
    was refused, has no shardings.
    """

    function: Any
    arguments: Callable[[dict[str, Any]], tuple]
    keywords: dict[str, Any] = field(default_factory=dict)  # static, or abstract as well
    flops: int = 0  # of the model, of one call
    calls: int = 1  # in a step


class Algorithm(Protocol):
    """The names that every algorithm's module has; those of `Extras` may be absent.

    Wherever `setup` is passed, setup.algorithm is what make_config returned.
    """

    @property
    def DATA(self) -> str:
        """What a step trains on: "prompts", "latents" (clips), or "either": clips where
        config.data.path is set."""
        ...

    @property
    def ROLES(self) -> tuple[str, ...]:
        """Roles beside the student, each a section of config.roles."""
        ...

    @property
    def EVALUATED(self) -> str:
        """The policy that is evaluated and exported, see state.rollout_params."""
        ...

    def make_config(self, config, roles: dict) -> Any:
        """The algorithm's own frozen settings from a run's ConfigDict.

        roles: ModelConfig of each of ROLES. Raises ValueError for keys that it cannot follow.
        """

    def check(self, setup: Setup) -> None:
        """Raise ValueError, before anything is loaded or compiled, for settings that cannot run."""

    def batches(self, setup: Setup) -> set[int]:
        """Sizes of the batches that an update gives the model, which the mesh must divide."""
        ...

    def describe(self, setup: Setup) -> str:
        """What one step works on, for the banner: "8 prompts x 8 = 64 samples, …"."""
        ...

    def init(self, key, setup: Setup, params: dict) -> State:
        """State at step 0 from loaded weights {role: {expert: tree}}; "student" is always there."""
        ...

    def collect(self, state: State, setup: Setup, item: Item, tools: Tools) -> Any:
        """The batch of a step: what the current policy makes of the item, scored. It has `version`,
        the step of that policy, and `metrics`, scalars for the log."""
        ...

    def update(self, state: State, setup: Setup, batch: Any) -> tuple[State, dict[str, Any]]:
        """(state at step + 1, metrics) after the step's optimizer steps; refuses a batch of
        a different version."""
        ...

    def programs(self, state: State, setup: Setup, tools: Tools) -> dict[str, Program]:
        """{phase: Program} of the jitted functions of collect and update, in the order they run.

        state and tools hold abstract arrays with shardings; called with the mesh in use.
        """
        ...


class Extras(Protocol):
    """Further names, of which an algorithm has those that it can give."""

    def validate(
        self, state: State, setup: Setup, item: Item, tools: Tools
    ) -> dict[str, np.ndarray]:
        """{"eval/…": value [P] of each clip} of held-out clips; absent: nothing is measured."""
        ...

    def sde_steps(self, setup: Setup, epoch: int) -> np.ndarray:
        """Stochastic steps of an epoch's rollouts, for the schedule table; absent: none."""
        ...

    def rollout_static(self, setup: Setup) -> dict[str, Any]:
        """Static arguments of sampling.rollout in collect: an evaluation by the run's own sampler
        runs the same program; absent: it has a program of its own."""
        ...

    def forwards(self, setup: Setup) -> dict[str, int]:
        """Model forwards of one sample in a step by phase ("collect", "update"), a backward pass
        counting two and recomputation nothing, for perf/mfu; absent: none is logged."""
        ...
