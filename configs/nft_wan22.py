"""DiffusionNFT with LoRA on both experts of Wan2.2-T2V-A14B, 480x480x5, sampling without guidance.

    python -m wanjax.train --config configs/nft_wan22.py:small \
        --config.model.path=/models/Wan2.2-T2V-A14B-Diffusers --config.prompts=prompts.txt \
        --config.reward="{'pickscore?model=/models/PickScore_v1': 1.0}"

Hardware: one H200 or 80 GB H100 for preset small (1 prompt x 16 samples per step: about 17 s for
the rollout and 31 s for the update, 73 GiB, see scripts/bench/RESULTS.md). The default 48 x 16, 64
samples at a time, is for a pod, where `mesh.data` splits the samples (one per chip on v5p:4x4x4,
planned in scripts/bench/plan.md); with fewer chips, lower sampling.batch and micro_samples. Curve:
not measured. Watch the reward, not the loss, which by design does not fall (see
wanjax/losses/nft.py).

Guidance is 1: the trained policy learns what guidance would add, so early samples look worse than
the model's usual ones. config.nft.loss = "awm" or "dpo" selects a related loss.
"""

from configs import default


def get_config(preset: str = ""):
    """Presets: "" = 48 prompts x 16 on many chips; "small" = 1 prompt x 16 on one GPU."""
    if preset not in ("", "small"):
        raise ValueError(f"preset {preset!r} is unknown; nft_wan22 has '' and 'small'")
    c = default.get_config()
    c.name, c.algorithm = "nft_wan22", "nft"
    c.lora.rank, c.lora.alpha = 64, 128.0
    c.sampling.height = c.sampling.width = 480
    c.sampling.frames, c.sampling.steps = 5, 12
    c.sampling.grid, c.sampling.solver = "unipc", "unipc"
    c.guidance.high = c.guidance.low = 1.0
    c.kl.high = c.kl.low = 1e-4
    c.prompts_per_step, c.group_size = 48, 16
    c.advantage = "flow_grpo"
    c.sampling.batch, c.micro_samples = 64, 64
    c.steps, c.save_every, c.sample_every = 200, 5, 20
    c.optim.high.lr = c.optim.low.lr = 1e-4
    if preset == "small":
        c.prompts_per_step = 1
        c.sampling.batch, c.micro_samples = 4, 2
    return c
