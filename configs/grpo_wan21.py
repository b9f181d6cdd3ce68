"""GRPO with LoRA on Wan2.1-T2V-1.3B, 480x480x5, from the miles-diffusion recipe.

    python -m wanjax.train --config configs/grpo_wan21.py:small \
        --config.model.path=/models/Wan2.1-T2V-1.3B-Diffusers --config.prompts=prompts.txt \
        --config.reward="{'pickscore?model=/models/PickScore_v1': 1.0}"

Ten steps at shift 3; one stochastic step, drawn each epoch from steps 1 to 3. Hardware: one 80 GB
GPU for preset small (4 prompts x 16 samples per step); the default 48 x 16 needs several. Time and
curve: not measured.
"""

from configs import grpo_wan22


def get_config(preset: str = ""):
    """Presets: "" = 48 prompts x 16 on many chips; "small" = 4 prompts x 16 on one GPU."""
    c = grpo_wan22.get_config(preset)
    c.name = "grpo_wan21"
    c.experts = ("high",)  # the only expert of a single model
    c.sampling.shift = 3.0
    c.sde.strategy, c.sde.window, c.sde.range = "global_window", 1, (1, 4)
    if preset == "small":
        c.prompts_per_step = 4
        c.sampling.batch, c.micro_samples = 16, 16
    return c
