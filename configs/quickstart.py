"""GRPO with LoRA on both experts of the embedded TinyWan2.2, rewarded for correct moving shapes.

    bash scripts/quickstart.sh
    python -m wanjax.train --config configs/quickstart.py

Hardware: two CPU cores and 2 GB, about 5 minutes. Three steps without guidance are too few for the
model to finish a clip, but cheap: GRPO has something to gain, and time for many small steps.
64 clips per step give a noisy gradient; one initial noise per group, a low rank, one standard
deviation for all groups and a learning rate that decays to zero keep the noise down.
Training uses one half of the one-object captions, evaluation the other.
"""

from configs import default


def get_config(preset: str = ""):
    """The quickstart has no presets."""
    if preset:
        raise ValueError(f"preset {preset!r} is unknown; quickstart has none")
    c = default.get_config()
    c.name = "quickstart"
    c.model.path = "tinywan22"
    c.model.dtype = c.model.param_dtype = c.model.vae_dtype = c.model.text_dtype = "float32"
    c.model.remat = "full"  # faster on CPUs than keeping intermediates
    c.lora.rank, c.lora.alpha = 4, 8.0
    c.sampling.height = c.sampling.width = 64
    c.sampling.frames = 17
    c.sampling.steps = 3
    c.sampling.grid, c.sampling.sigmas = "explicit", (1.0, 0.5, 0.25)  # one high, two low
    c.sampling.batch = 32
    c.guidance.high = c.guidance.low = 1.0
    c.sde.eta = 0.7
    c.sde.strategy, c.sde.window = "dual_window", 1
    c.same_noise = True
    c.prompts = "shapes:train:1:0/2"
    c.prompts_per_step, c.group_size = 8, 8
    c.micro_samples = 32
    c.reward.shapes = 1.0
    c.advantage = "flow_grpo_global"
    c.steps, c.save_every, c.sample_every = 30, 5, 0
    c.clip.high = c.clip.low = 1e-3
    for optim in (c.optim.high, c.optim.low):
        optim.lr, optim.decay = 2e-3, 30
    c.eval.prompts = "shapes:train:1:1/2"  # the captions not trained on
    c.eval.number = 78
    return c
