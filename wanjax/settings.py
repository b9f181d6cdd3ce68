"""Everything static in a run, as frozen dataclasses, of which a function takes what it needs.

setup.py makes them from a ConfigDict and configs/default.py holds the defaults, so no field here
has one. They are compared by identity (eq=False) where they hold arrays or dictionaries: a jitted
function that takes one as a static argument compiles once for each object.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wanjax import schedule
from wanjax.models import presets


@dataclass(frozen=True)
class LoraConfig:
    """Rank 0 trains full weights; targets are patterns of parameter paths, see models.lora."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW of one expert; warmup and decay count optimizer steps."""

    lr: float
    warmup: int  # linear rise to lr
    decay: int  # linear fall to 0 after it; 0 = constant
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float  # global norm of the gradient; 0 = off


@dataclass(frozen=True, eq=False)
class TrainingConfig:
    """What is trained, and by which optimizers."""

    lora: LoraConfig
    optim: dict[str, dict[str, OptimConfig]]  # role -> trained expert -> optimizer

    def experts(self, role: str = "student") -> tuple[str, ...]:
        """The experts of a role that are trained."""
        return tuple(self.optim.get(role, {}))


@dataclass(frozen=True, eq=False)
class SamplingConfig:
    """One sampler for rollouts, samples, evaluation and export; sizes in pixels."""

    schedule: schedule.Schedule
    guidance: presets.Guidance
    guidance_mode: str  # see sampler.GUIDANCE_MODES
    height: int
    width: int
    frames: int
    solver: str  # of ODE steps, or "renoise": the few-step sampler with fresh noise
    batch: int  # samples per device call
    vae_tile: int  # side in pixels of the tiles that are decoded one by one; 0 = whole frames


@dataclass(frozen=True, eq=False)
class SdeConfig:
    """Transition kernel of the stochastic steps and the strategy that chooses them."""

    strategy: schedule.Strategy
    kind: str
    eta: float


@dataclass(frozen=True, eq=False)
class RewardConfig:
    """Weights of the rewards by name, and what happens when one fails (see rewards.FAILURE)."""

    weights: dict[str, float]
    failure: str


@dataclass(frozen=True, eq=False)
class MicroConfig:
    """How one optimizer step is split into micro-batches; every algorithm's Config has these."""

    micro_samples: int  # samples per micro-batch; the last one holds what is left
    micro_steps: int  # timesteps or transitions of each of these samples per micro-batch
    mix_experts: bool  # a micro-batch holds all steps of its samples, of both experts


@dataclass(frozen=True, eq=False)
class GroupConfig(MicroConfig):
    """What algorithms on scored groups of samples share."""

    prompts_per_step: int
    group_size: int  # samples per prompt
    advantage: str  # see advantages.PRESETS
    adv_clip_max: float
    updates: int  # optimizer steps per rollout, each on its own share of the samples


@dataclass(frozen=True, eq=False)
class Setup:
    """All of a run's settings; algorithms take it whole and hand its parts on."""

    model: presets.ModelConfig
    roles: dict[str, presets.ModelConfig]  # roles beside the student, such as teacher and critic
    sampling: SamplingConfig
    sde: SdeConfig
    training: TrainingConfig
    rewards: RewardConfig
    algorithm: Any  # the Config of the algorithm
    seed: int
    steps: int  # of the whole run

    @property
    def experts(self) -> tuple[str, ...]:
        """The student's experts that are trained."""
        return self.training.experts()


def fields_of(kind: type, config: Mapping) -> dict[str, Any]:
    """The values of a config that have the names of a dataclass's fields."""
    return {field.name: config[field.name] for field in dataclasses.fields(kind)}
