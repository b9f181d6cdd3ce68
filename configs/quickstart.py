"""GRPO with LoRA on both experts of the embedded TinyWan2.2, rewarded for the right moving shapes.

    bash scripts/quickstart.sh
    python -m wanjax.train --config configs/quickstart.py

Hardware: two CPU cores and 2 GB, about 4 minutes.
"""

from configs import default


def get_config(preset: str = ""):
    """The quickstart has no presets."""
    if preset:
        raise ValueError(f"preset {preset!r} is unknown; quickstart has none")
    c = default.get_config()
    c.name = "quickstart"
    c.model.path = "tinywan22"
    c.model.dtype = c.model.param_dtype = "float32"
    c.model.remat = "full"  # quicker on CPUs than keeping intermediates
    c.lora.rank, c.lora.alpha = 16, 32.0
    c.sampling.height = c.sampling.width = 64
    c.sampling.frames = 17
    c.sampling.batch = 32
    c.sde.eta = 0.7
    c.sde.strategy, c.sde.window = "dual_window", 1
    c.prompts = "shapes:train:2"
    c.prompts_per_step, c.group_size = 8, 8
    c.micro_samples = 32
    c.reward.shapes = 1.0
    c.steps, c.save_every, c.sample_every = 20, 5, 0
    c.clip.high = c.clip.low = 1e-3
    for optim in (c.optim.high, c.optim.low):
        optim.lr = 1e-3
    c.eval.prompts = "shapes:heldout:2"
    return c
