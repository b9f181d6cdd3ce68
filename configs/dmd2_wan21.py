"""DMD2 with full weights: Wan2.1-T2V-1.3B into a 4-step student, 480x832x81, from prompts only.

    python -m wanjax.train --config configs/dmd2_wan21.py \
        --config.model.path=/models/Wan2.1-T2V-1.3B-Diffusers --config.prompts=prompts.txt
    python -m wanjax.train --config configs/dmd2_wan21.py:14b ...
        --config.roles.teacher.path=/models/Wan2.1-T2V-14B-Diffusers

Preset "14b" uses a larger teacher and starts with regression on its trajectories; the critic stays
1.3B. The numbers are Self-Forcing's for a 14B teacher (batch 64, 600 to 3000 steps).

Hardware: meant for 8 x 80 GB. Time: not measured. Curve: not measured; critic/loss should
fall within the first tens of steps, then dmd2/grad_abs slowly; dmd2/x0_std must not grow.
"""

from configs import default


def get_config(preset: str = ""):
    """Presets: "" = the teacher is the model itself; "14b" = a separate teacher."""
    if preset not in ("", "14b"):
        raise ValueError(f"preset {preset!r} is unknown; dmd2_wan21 has '' and '14b'")
    c = default.get_config()
    c.name = "dmd2_wan21" + (f"_{preset}" if preset else "")
    c.algorithm = "dmd2"
    c.experts = ("high",)
    c.lora.rank = 0
    c.model.param_dtype = "float32"
    c.mesh.data, c.mesh.fsdp = 1, -1
    c.sampling.grid, c.sampling.sigmas = "explicit", (1.0, 0.75, 0.5, 0.25)
    c.sampling.shift, c.sampling.solver = 5.0, "renoise"
    c.sampling.height, c.sampling.width, c.sampling.frames = 480, 832, 81
    c.guidance.high = c.guidance.low = 1.0
    c.dmd2.guidance.high = 4.0
    c.prompts_per_step, c.group_size = 64, 1
    c.sampling.batch = c.micro_samples = c.eval.samples = 8
    c.steps, c.save_every, c.sample_every = 3000, 50, 100
    student, critic = c.optim.high, c.roles.critic.optim.high
    student.lr, critic.lr = 2e-6, 4e-7
    student.b1 = critic.b1 = 0.0
    student.weight_decay = critic.weight_decay = 0.01
    if preset == "14b":
        c.dmd2.warm_steps = 200
    return c
