"""DiffusionNFT with LoRA on Wan2.1-T2V-1.3B, 480x832x5, sampling without guidance.

    python -m wanjax.train --config configs/nft_wan21.py \
        --config.model.path=/models/Wan2.1-T2V-1.3B-Diffusers --config.prompts=prompts.txt \
        --config.reward="{'pickscore?model=/models/PickScore_v1': 1.0}"

Hardware: one 80 GB GPU for preset small (4 prompts x 16 samples per step); the default 48 x 16
needs several. Time and curve: not measured.
"""

from configs import nft_wan22


def get_config(preset: str = ""):
    """Presets: "" = 48 prompts x 16 on many chips; "small" = 4 prompts x 16 on one GPU."""
    c = nft_wan22.get_config(preset)
    c.name = "nft_wan21"
    c.experts = ("high",)  # the only expert of a single model
    c.lora.rank, c.lora.alpha = 128, 128.0
    c.sampling.height, c.sampling.width = 480, 832
    c.nft.timesteps = 4
    if preset == "small":
        c.prompts_per_step = 4
        c.sampling.batch, c.micro_samples = 16, 16
    return c
