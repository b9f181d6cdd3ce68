"""Configs of scripts/fullsize.sh: --config scripts/bench/fullsize_config.py:ALGORITHM,FOLDER.

The recipes for Wan2.2-T2V-A14B with the checkpoints and prompts in FOLDER, a checkpoint after each
step, and evaluations of four previews. GRPO and NFT are their presets for one GPU; of SFT and DMD2,
which are meant for several, one GPU gets short clips and few samples.
"""

import pathlib
import urllib.parse

from configs import dmd2_wan22, grpo_wan22, nft_wan22, sft_wan22


def get_config(preset: str = ""):
    """preset: ALGORITHM,FOLDER with grpo, nft, sft or dmd2."""
    name, _, folder = preset.partition(",")
    recipes = {
        "grpo": lambda: grpo_wan22.get_config("small"),
        "nft": lambda: nft_wan22.get_config("small"),
        "sft": sft_wan22.get_config,
        "dmd2": dmd2_wan22.get_config,
    }
    if name not in recipes or not folder:
        raise ValueError(f"preset {preset!r} is not ALGORITHM,FOLDER with one of {tuple(recipes)}")
    c, out = recipes[name](), pathlib.Path(folder)
    c.name, c.workdir = name, str(out / "runs")
    c.model.path, c.prompts = str(out / "model"), str(out / "prompts.txt")
    c.text_cache, c.compile_cache = str(out / "text"), str(out / "compiled")
    c.save_every, c.keep_last, c.sample_every, c.eval_every = 1, 1, 0, 0
    c.eval.number, c.eval.samples = 4, 2
    if name in ("grpo", "nft"):
        c.reward[f"pickscore?model={urllib.parse.quote(str(out / 'tower'))}"] = 1.0
    if name in ("sft", "dmd2"):
        c.mesh.fsdp = 1
        c.sampling.frames, c.sampling.batch, c.micro_samples = 5, 1, 1
    if name == "sft":
        c.data.path, c.data.batch = str(out / "latents"), 4
    if name == "dmd2":
        c.prompts_per_step, c.dmd2.student_every = 2, 1
    return c
