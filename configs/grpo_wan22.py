"""GRPO with LoRA on both experts of Wan2.2-T2V-A14B, 480x480x5, from the miles-diffusion recipe.

    python -m wanjax.train --config configs/grpo_wan22.py:small \
        --config.model.path=/models/Wan2.2-T2V-A14B-Diffusers --config.prompts=prompts.txt

Preset miles follows the original: one stochastic step among steps 1 to 3, all in the high expert,
with --config.reward="{'pickscore?model=/models/PickScore_v1': 1.0}". The other presets take one
stochastic step per expert, so that both learn.

Hardware: one H200 or 80 GB H100 for preset small (1 prompt x 16 samples per step: about 27 s for
the rollout and 17 s for the update, 72.5 GiB, see scripts/bench/RESULTS.md; with
--config.model.remat=save_matmuls 14 s for the update and 98 GiB, so H200 only). The default 48 x
16, 64 samples at a time, is for a pod, where `mesh.data` splits the samples (one per chip on
v5p:4x4x4, planned in scripts/bench/plan.md); with fewer chips, lower sampling.batch and
micro_samples.

Bring your own reward: an import path "package.module:function", called as function(video uint8
[B,T,H,W,3], prompts, meta) -> (scores [B], info). Set it below or in a copy of this file.
"""

from configs import default


def get_config(preset: str = ""):
    """Presets: "" = 48 prompts x 16 on many chips; "miles" = the same, high expert only; "small" =
    1 prompt x 16 on one GPU."""
    if preset not in ("", "miles", "small"):
        raise ValueError(f"preset {preset!r} is unknown; grpo_wan22 has '', 'miles' and 'small'")
    c = default.get_config()
    c.name = "grpo_wan22_miles" if preset == "miles" else "grpo_wan22"
    c.lora.rank, c.lora.alpha = 64, 128.0
    c.sampling.height = c.sampling.width = 480
    c.sampling.frames, c.sampling.steps = 5, 10
    c.sde.kind, c.sde.eta = "flow", 0.9
    c.sde.strategy, c.sde.window = "dual_window", 1
    c.prompts_per_step, c.group_size, c.updates = 48, 16, 2
    c.advantage = "miles"
    c.sampling.batch, c.micro_samples = 64, 64
    c.steps, c.save_every, c.sample_every = 200, 5, 20
    c.optim.high.lr = c.optim.low.lr = 1e-4
    c.optim.high.weight_decay = c.optim.low.weight_decay = 1e-4
    if preset == "miles":
        c.experts = ("high",)
        c.sde.strategy, c.sde.range = "global_window", (1, 4)
    if preset == "small":
        c.prompts_per_step, c.updates = 1, 1
        c.sampling.batch, c.micro_samples = 4, 2
    return c
