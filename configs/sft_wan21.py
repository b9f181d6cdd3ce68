"""Supervised fine-tuning with LoRA on Wan2.1-T2V-1.3B, on cached clips.

    python -m wanjax.data cache clips --model /models/Wan2.1-T2V-1.3B-Diffusers --out cache \
        --fps 16 --size 480x832 --frames 81
    python -m wanjax.train --config configs/sft_wan21.py \
        --config.model.path=/models/Wan2.1-T2V-1.3B-Diffusers --config.data.path=cache

Like configs/sft_wan22.py, with one expert. Hardware: one 80 GB GPU; for several, set mesh.fsdp,
micro_samples, data.batch and sampling.batch to multiples of their number. Time and curve: not
measured.
"""

from configs import sft_wan22


def get_config(preset: str = ""):
    """Only preset ""."""
    if preset:
        raise ValueError(f"preset {preset!r} is unknown; sft_wan21 has ''")
    c = sft_wan22.get_config()
    c.name = "sft_wan21"
    c.experts = ("high",)  # the only expert of a single model
    c.mesh.fsdp = 1
    c.data.batch, c.micro_samples, c.sampling.batch = 4, 1, 1
    c.eval.samples = 2
    return c
