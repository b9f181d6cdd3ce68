"""Phased DMD2 with LoRA: Wan2.2-T2V-A14B into a 4-step student of both experts, 480x832x81.

    python -m wanjax.train --config configs/dmd2_wan22.py \
        --config.model.path=/models/Wan2.2-T2V-A14B-Diffusers --config.prompts=prompts.txt

Student, critic and teacher share one frozen base, so memory holds two experts and four adapters.
The high expert owns steps 1000 and 937.5, the low one 833.3 and 625. To train them one after the
other, use preset "high", then "low" with the first run's export as
--config.lora.start="('runs/dmd2_wan22_high/export/lora_high_noise.safetensors',)".

Hardware: meant for 8 x 80 GB or a pod. Time: not measured. Curve: not measured; critic/loss
should fall within the first tens of steps, then dmd2/grad_abs slowly; dmd2/x0_std must not grow.
"""

from configs import default


def get_config(preset: str = ""):
    """Presets: "" = both experts together; "high", "low" = one stage each."""
    if preset not in ("", "high", "low"):
        raise ValueError(f"preset {preset!r} is unknown; dmd2_wan22 has '', 'high' and 'low'")
    c = default.get_config()
    c.name = "dmd2_wan22" + (f"_{preset}" if preset else "")
    c.algorithm = "dmd2"
    c.experts = (preset,) if preset else ("high", "low")
    c.lora.rank, c.lora.alpha = 64, 64.0
    c.sampling.grid, c.sampling.sigmas = "explicit", (1.0, 0.75, 0.5, 0.25)
    c.sampling.shift, c.sampling.solver = 5.0, "euler"
    c.sampling.height, c.sampling.width, c.sampling.frames = 480, 832, 81
    c.guidance.high = c.guidance.low = 1.0
    c.dmd2.guidance.high, c.dmd2.guidance.low = 4.0, 3.0
    c.prompts_per_step, c.group_size = 64, 1
    c.sampling.batch = c.micro_samples = c.eval.samples = 8
    c.steps, c.save_every, c.sample_every = 3000, 50, 100
    for expert in ("high", "low"):
        student, critic = c.optim[expert], c.roles.critic.optim[expert]
        student.lr, critic.lr = 1e-4, 2e-5
        student.b1 = critic.b1 = 0.0
    return c
