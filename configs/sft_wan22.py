"""Supervised fine-tuning with LoRA on both experts of Wan2.2-T2V-A14B, on cached clips.

    python -m wanjax.data cache clips --model /models/Wan2.2-T2V-A14B-Diffusers --out cache \
        --fps 16 --size 480x832 --size 832x480 --frames 81 --frames 49
    python -m wanjax.train --config configs/sft_wan22.py \
        --config.model.path=/models/Wan2.2-T2V-A14B-Diffusers --config.data.path=cache

clips/ holds videos, each with a .txt caption of the same name; config.data.path can also point to
FastVideo's latent parquet files. Every clip trains each expert once per step, at a time drawn from
the expert's own range of shifted times. For Wan2.2-I2V-A14B, pass that model to both commands:
first frames are cached with the clips.

Hardware: eight 80 GB devices, across which the frozen weights of both experts are sharded; for a
different number, set mesh.fsdp, micro_samples, data.batch and sampling.batch to it. Minutes per
step: not measured. Curve to expect: not measured; watch eval/loss/high and eval/loss/low, the error
on held-out clips, which should fall below its value at step 0.
"""

from configs import default


def get_config(preset: str = ""):
    """Presets: "" = both experts; "high" and "low" = one each, for two separate jobs."""
    if preset not in ("", "high", "low"):
        raise ValueError(f"preset {preset!r} is unknown; sft_wan22 has '', 'high' and 'low'")
    c = default.get_config()
    c.name = f"sft_wan22_{preset}" if preset else "sft_wan22"
    c.algorithm = "sft"
    c.experts = (preset,) if preset else ("high", "low")
    c.lora.rank, c.lora.alpha = 32, 32.0
    c.mesh.fsdp = 8
    c.data.batch, c.micro_samples = 8, 8  # every micro-batch is sharded over the mesh
    c.sft.density = "logit_normal"
    c.sampling.height, c.sampling.width, c.sampling.frames = 480, 832, 81
    c.sampling.grid, c.sampling.solver, c.sampling.steps = "unipc", "unipc", 30
    c.sampling.batch = c.eval.samples = 8  # a batch of sample videos is made in any case
    c.steps, c.save_every, c.sample_every, c.eval_every = 1000, 50, 200, 100
    for optim in (c.optim.high, c.optim.low):
        optim.lr, optim.warmup, optim.weight_decay = 1e-4, 20, 1e-2
    return c
