"""A two-expert model with random weights, small enough for every test: 5 frames of 16x16, latents
[2,2,2,4]."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import time

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np

from configs import default
from convert import save
from scripts import tiny_tokenizer
from wanjax import schedule, settings, trees
from wanjax.algorithms import grpo
from wanjax.models import clip, presets, umt5, vae, wan
from wanjax.run import checkpoint

WAN = wan.WanConfig(
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=2,
    ffn_dim=48,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    freq_dim=16,
    patch_size=(1, 1, 1),
    text_len=40,
)
VAE = vae.VAEConfig(
    base_dim=4,
    z_dim=4,
    dim_mult=(1, 2, 2),
    num_res_blocks=1,
    temperal_downsample=(True, True),
    patch_size=2,
    in_channels=12,
    out_channels=12,
    latents_mean=(0.0,) * 4,
    latents_std=(1.0,) * 4,
)
TEXT = umt5.UMT5Config(vocab_size=64, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
TARGETS = (r"blocks/attn1/to_q", r"blocks/ffn\.net\.2")  # few leaves compile fast
MODEL = presets.ModelConfig(
    "tiny",
    WAN,
    presets.Sampling(3.0, presets.Guidance(3.0, 2.0), steps=6, frames=5, height=16, width=16),
    vae=VAE,
    text=TEXT,
    experts=("high", "low"),
    boundary=0.875,
)


@functools.cache
def parameters(seed: int = 0, model: presets.ModelConfig = MODEL) -> dict:
    """Random parameters of every component, drawn by numpy (compiling the draws takes longer)."""
    rng = np.random.default_rng(seed)

    def draw(init, config):
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
        return trees.map_paths(lambda path, leaf: jnp.asarray(fill(path, leaf.shape)), shapes)

    def fill(path, shape):
        if path.endswith(("/scale", "gamma")):
            return np.ones(shape, np.float32)
        if path.endswith("/bias"):
            return np.zeros(shape, np.float32)
        fan_in = np.prod(shape[-4:-1]) if "embedding" not in path.split("/")[-1] else 1
        return (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)

    return {
        **{expert: draw(wan.init, model.wan) for expert in model.experts},
        "vae": draw(vae.init, model.vae),
        "text_encoder": draw(umt5.init, model.text),
        **({"image_encoder": draw(clip.init, model.image)} if model.image else {}),
    }


def make_setup(model: presets.ModelConfig = MODEL, **changes) -> settings.Setup:
    """A GRPO Setup of 2 prompts x 4 samples; changes go to the section that has the field."""
    sections = {
        "schedule": dict(grid="simple", steps=6, shift=3.0, boundary=model.boundary),
        "sampling": dict(
            guidance=model.sampling.guidance, guidance_mode="batch", height=16, width=16, frames=5,
            solver="euler", batch=4, vae_tile=0,
        ),
        "strategy": dict(name="dual_window", window=1),
        "sde": dict(kind="flow", eta=0.7),
        "lora": dict(rank=2, alpha=4.0, targets=TARGETS),
        "optim": dict(lr=1e-2),
        "algorithm": dict(
            group_size=4, prompts_per_step=2, micro_samples=4,
            clip={"high": 1e-3, "low": 1e-3}, kl_beta={"high": 0.0, "low": 0.0},
        ),
        "setup": dict(seed=0, steps=1, experts=model.experts),
    }  # fmt: skip
    for key, value in changes.items():
        section, _, field = key.partition("__")
        sections[section][field] = value
    plan = schedule.make_schedule(**sections["schedule"])
    fields = sections["setup"]
    optims = {e: adamw(**sections["optim"]) for e in fields.pop("experts")}
    setup = settings.Setup(
        model=model,
        roles={},
        sampling=settings.SamplingConfig(schedule=plan, **sections["sampling"]),
        sde=settings.SdeConfig(schedule.Strategy(**sections["strategy"]), **sections["sde"]),
        training=settings.TrainingConfig(
            settings.LoraConfig(**sections["lora"]), {"student": optims}
        ),
        rewards=settings.RewardConfig({"mean": 1.0}, "stop"),
        algorithm=algorithm_config(grpo, **sections["algorithm"]),
        **fields,
    )
    return shared(setup)


def adamw(**changes) -> settings.OptimConfig:
    """An expert's optimizer of configs/default.py with some fields changed."""
    return settings.OptimConfig(**default.get_config().optim.high.to_dict() | changes)


def algorithm_config(algorithm, roles=None, **changes):
    """The Config of an algorithm by configs/default.py with some fields changed."""
    roles = dict.fromkeys(algorithm.ROLES, MODEL) | (roles or {})
    return dataclasses.replace(algorithm.make_config(default.get_config(), roles), **changes)


def replace_sampling(setup: settings.Setup, **changes) -> settings.Setup:
    """The same Setup with some fields of the sampler changed."""
    return dataclasses.replace(setup, sampling=dataclasses.replace(setup.sampling, **changes))


def replace_training(setup: settings.Setup, *, role="student", optim=None, **lora):
    """The same Setup with other optimizers of a role, or some fields of its adapters changed."""
    optims = setup.training.optim | ({} if optim is None else {role: optim})
    training = settings.TrainingConfig(dataclasses.replace(setup.training.lora, **lora), optims)
    return dataclasses.replace(setup, training=training)


def update(algorithm, state, setup: settings.Setup, batch):
    """algorithm.update on a copy of the state, which it replaces in place: tests compare before and
    after. Leaves that are shared stay shared."""
    copies: dict[int, jax.Array] = {}
    copy = jax.tree.map(lambda x: copies.setdefault(id(x), jnp.copy(x)), state)
    return algorithm.update(copy, setup, batch)


_SETUPS: dict[str, settings.Setup] = {}


def shared(setup: settings.Setup) -> settings.Setup:
    """The first Setup that was equal to this one: its programs are traced already."""
    return _SETUPS.setdefault(repr(setup), setup)


def contexts(prompts: int = 2, rows: int = 5):
    """Random text rows [P,S,E] and one unconditional row set [1,S,E]."""
    rng = np.random.default_rng(3)
    draw = lambda n: jnp.asarray(rng.normal(size=(n, rows, WAN.text_dim)), jnp.float32)
    return draw(prompts), draw(1)


def mean_reward(video, prompts):
    """Brightness as the reward, with its spread as info."""
    del prompts
    video = video.astype(np.float32) / 255
    return {"mean": video.mean((1, 2, 3, 4))}, {"spread": video.std((1, 2, 3, 4))}


def brightness(video, prompts, meta):
    """The same as a user's reward by import path."""
    del meta
    scores, info = mean_reward(video, prompts)
    return scores["mean"], info


def save_model(folder, model: presets.ModelConfig = MODEL) -> str:
    """Write the random model as a diffusers folder with a tokenizer; returns the path."""
    tokenizer = pathlib.Path(folder) / "tok"
    words = tiny_tokenizer.build_tiny_tokenizer(["red", "blue", "circle"], tokenizer)
    text = dataclasses.replace(TEXT, vocab_size=words)
    model = dataclasses.replace(model, text=text, tokenizer=str(tokenizer))
    save.save_diffusers(parameters(0, model), model, pathlib.Path(folder) / "model")
    return str(pathlib.Path(folder) / "model")


def make_config(model: str, workdir, **changes):
    """A ConfigDict of three short GRPO steps on the saved model; changes are dotted keys with
    __."""
    c = default.get_config()
    c.name, c.workdir, c.model.path = "run", str(workdir), model
    c.model.dtype = c.model.param_dtype = c.model.vae_dtype = c.model.text_dtype = "float32"
    c.model.remat = "none"
    c.text_cache = str(pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "text")
    c.lora.rank, c.lora.alpha = 2, 4.0
    c.sampling.steps, c.sampling.batch = 6, 8
    c.sampling.height = c.sampling.width = 16
    c.negative_prompt = ""
    prompts = pathlib.Path(model).parent / "prompts.txt"
    if not prompts.exists():  # several processes may share it
        prompts.write_text("red circle\nblue circle\nred\nblue\n")
    c.prompts = c.eval.prompts = str(prompts)
    c.eval.number, c.eval.samples = 2, 1
    c.prompts_per_step, c.group_size, c.micro_samples = 2, 4, 8
    c.reward["tests.tiny:brightness"] = 1.0
    c.steps, c.save_every, c.sample_every = 3, 2, 0
    c.optim.high.lr = c.optim.low.lr = 1e-2
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = c
        for name in parents:
            node = node[name]
        node[last] = value
    return c


CLIPS = {  # name: frames, frames a second, encoder
    "one.mp4": (1, 16, "libx264"),
    "two.mp4": (2, 16, "libx264"),
    "five.mp4": (5, 24, "libx264"),
    "more/half.mkv": (24, 24, "ffv1"),
    "more/three.mp4": (49, 16, "libx264"),
    "more/whole.mkv": (81, 24, "ffv1"),
}


def settle(run, step: int) -> None:
    """Wait until checkpoint `step`, which is written while training goes on, is complete."""
    until = time.monotonic() + 60
    while checkpoint.latest_good(run) != step:
        assert time.monotonic() < until, f"no checkpoint {step} in {run}"
        time.sleep(0.02)


def write_clips(folder) -> pathlib.Path:
    """Write CLIPS, 24x32 pixels of a moving test card, with captions; returns the folder."""
    folder = pathlib.Path(folder)
    for number, (name, (frames, fps, codec)) in enumerate(CLIPS.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = f"testsrc2=size=32x24:rate={fps},hue=h={40 * number}"
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", "-f", "lavfi"]
        command += ["-i", source, "-frames:v", str(frames), "-c:v", codec, str(path)]
        subprocess.run(command, check=True)
        path.with_suffix(".txt").write_text(("red circle", "blue", "red")[number % 3] + "\n")
    return folder


def replace_algorithm(setup: settings.Setup, **changes) -> settings.Setup:
    """The same Setup with some fields of the algorithm changed."""
    algorithm = dataclasses.replace(setup.algorithm, **changes)
    return shared(dataclasses.replace(setup, algorithm=algorithm))
