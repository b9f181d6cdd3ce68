"""A diffusers scheduler over the levels of a few-step student; wanjax.export copies this file.

From σ to the next level σ': x + (σ' − σ)·v, or with fresh noise (1 − σ')·(x − σ·v) + σ'·ε. It sits
in scheduler/ of a model folder, beside the levels in scheduler_config.json, and diffusers runs it
when the folder is loaded with trust_remote_code=True.

Dimensions: I sampler steps.
"""

from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)


class FewStepScheduler(FlowMatchEulerDiscreteScheduler):
    """Steps over fixed sigmas [I] in (0, 1], without the final 0; timesteps [I] go to the model."""

    @register_to_config
    def __init__(self, sigmas, timesteps, num_train_timesteps=1000, stochastic_sampling=False):
        super().__init__(num_train_timesteps, stochastic_sampling=stochastic_sampling)

    def set_timesteps(self, num_inference_steps=None, device=None):
        """Take the student's levels; any other number of steps is a ValueError."""
        given = {key: self.config[key] for key in ("sigmas", "timesteps")}
        if num_inference_steps != (steps := len(given["sigmas"])):
            raise ValueError(
                f"num_inference_steps is {num_inference_steps} but scheduler_config.json has the "
                f"{steps} levels of a few-step student; pass num_inference_steps={steps}"
            )
        super().set_timesteps(**given, device=device)  # pyright: ignore[reportArgumentType]

    def step(self, model_output, timestep, sample, **given):
        """Keep the latents in float32 between steps, as in training."""
        return super().step(model_output.float(), timestep, sample, **given)
