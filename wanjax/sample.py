"""Sample videos from a model and adapters; the trainer's evaluation uses the same functions.

    python -m wanjax.sample --model tinywan22 --out samples \
        --prompt "a red circle moving left and a blue square moving up on a gray background"
    python -m wanjax.sample --model /models/Wan2.2-T2V-A14B-Diffusers --out samples \
        --lora x_high_noise.safetensors --lora x_low_noise.safetensors@0.8 --prompt "..."

Shapes: B samples, P prompts.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from convert import lora as convert_lora
from convert import weights
from wanjax import sampler, schedule, sharding
from wanjax import state as states
from wanjax.data import text, video
from wanjax.models import lora, presets, umt5


def generate(setup, policy, vae_params, ctx_BSE, uncond_1SE, *, seed: int, first_id: int = 0):
    """uint8 videos [B, frames, height, width, 3] of B contexts by the ODE solver of setup.

    policy: {expert: (params, adapter)}. Sample i starts from the noise of (seed, first_id + i),
    whatever the batching.
    """
    count, size = len(ctx_BSE), setup.sampling.batch
    videos = []
    for first in range(0, count, size):
        rows = np.minimum(
            np.arange(first, first + size), count - 1
        )  # the last batch keeps its shape
        x0 = states.sample_latents(
            policy, jnp.asarray(ctx_BSE[rows]), uncond_1SE, jax.random.key(seed),
            jnp.asarray(rows + first_id), setup=setup,
        )  # fmt: skip
        videos.append(states.decode(vae_params, x0, config=setup.model.vae))
    return np.concatenate([sharding.fetch(v) for v in videos])[:count]


def make_encoder(model: presets.ModelConfig, params: dict, prompts):
    """A function list of prompts -> ctx_PSE (numpy float32) by the model's own tokenizer and text
    encoder.

    prompts: all that will be asked for; the longest one sets S, so that everything compiles once.
    Encodings are cached.
    """
    tokenizer = text.load_tokenizer(model.tokenizer)
    _, mask = text.tokenize(tokenizer, list(dict.fromkeys(prompts)), model.wan.text_len)
    S = text.bucket(int(mask.sum(1).max()), model.wan.text_len)
    run = jax.jit(functools.partial(umt5.encode, config=model.text))
    cache: dict = {}

    def encode(prompts):
        ctx_PSE = text.encode_prompts(
            lambda ids, mask: sharding.fetch(run(params["text_encoder"], ids, mask)),
            tokenizer, prompts, length=model.wan.text_len, cache=cache,
        )  # fmt: skip
        ctx_PSE = np.pad(ctx_PSE, ((0, 0), (0, S - ctx_PSE.shape[1]), (0, 0)))
        return ctx_PSE.astype(np.float32)

    return encode


def load_model(
    path, *, dtype="float32", param_dtype="float32", attention="auto", remat="none", mesh=None
):
    """(params, ModelConfig) with the run-time fields of the transformer set."""
    params, model = weights.load(path, mesh=mesh, dtype=jnp.dtype(param_dtype))
    run = dataclasses.replace(model.wan, dtype=dtype, attention=attention, remat=remat)
    return params, dataclasses.replace(model, wan=run)


def main(argv=None) -> None:
    """Command line: see the file docstring and --help."""
    parser = argparse.ArgumentParser(
        prog="python -m wanjax.sample", description="Sample videos from a model."
    )
    add = parser.add_argument
    add("--model", required=True, help="diffusers folder, any Wan checkpoint, or tinywan22")
    add("--lora", action="append", default=[], help="FILE[:high|low][@strength], repeatable")
    add("--prompt", action="append", required=True, help="repeatable")
    add("--negative", help="negative prompt; default: the model's")
    add("--out", required=True, help="folder for mp4 files")
    add("--steps", type=int)
    add("--solver", default="unipc", choices=sorted(sampler.SOLVERS))
    add("--grid", help="sigma grid; default: unipc for --solver unipc, else simple")
    add("--shift", type=float)
    add("--guidance_high", type=float)
    add("--guidance_low", type=float)
    add("--height", type=int)
    add("--width", type=int)
    add("--frames", type=int)
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=1, help="samples per device call")
    add("--dtype", default="float32" if jax.default_backend() == "cpu" else "bfloat16")
    args = parser.parse_args(argv)
    try:
        _run(args)
    except ValueError as error:
        sys.exit(f"wanjax.sample: {error}")


def _run(args) -> None:
    params, model = load_model(args.model, dtype=args.dtype, param_dtype=args.dtype)
    defaults = model.sampling
    pick = lambda given, default: default if given is None else given
    guidance = presets.Guidance(
        pick(args.guidance_high, defaults.guidance.high),
        pick(args.guidance_low, defaults.guidance.low),
    )
    grid = args.grid or ("unipc" if args.solver == "unipc" else "simple")
    plan = schedule.make_schedule(
        grid, pick(args.steps, defaults.steps), pick(args.shift, defaults.shift), model.boundary
    )
    sampling = states.SamplingConfig(
        schedule=plan, guidance=guidance, height=pick(args.height, defaults.height),
        width=pick(args.width, defaults.width), frames=pick(args.frames, defaults.frames),
        solver=args.solver, batch=args.batch,
    )  # fmt: skip
    setup = states.sampling_setup(model, sampling)
    states.latent_shape(setup)
    scales = {"high": guidance.high, "low": guidance.low}
    print(schedule.describe(plan, scales), flush=True)
    for expert, adapter, strength in _adapters(args.lora, model):
        params[expert] = lora.merge(params[expert], adapter, strength)
    negative = pick(args.negative, defaults.negative_prompt)
    encode = make_encoder(model, params, [negative, *args.prompt])
    uncond = jnp.asarray(encode([negative]))
    policy = {expert: (params[expert], {}) for expert in model.experts}
    out = pathlib.Path(args.out)
    for i, prompt in enumerate(args.prompt):
        ctx = encode([prompt])
        frames = generate(setup, policy, params["vae"], ctx, uncond, seed=args.seed, first_id=i)[0]
        video.write_mp4(out / f"{i:03d}.mp4", frames, defaults.fps)
        (out / f"{i:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
        print(f"{out / f'{i:03d}.mp4'}  {prompt}", flush=True)


def _adapters(arguments: list[str], model) -> list[tuple]:
    """[(expert, adapter tree, strength)] of FILE[:high|low][@strength] arguments."""
    found = []
    for argument in arguments:
        rest, _, strength = argument.rpartition("@") if "@" in argument else (argument, "", "1")
        path, _, expert = (
            rest.rpartition(":") if rest.endswith((":high", ":low")) else (rest, "", "")
        )
        if not _is_number(strength):
            raise ValueError(f"--lora {argument}: strength {strength!r} is not a number")
        adapters = convert_lora.load(path, model, expert=expert or None)
        for name, tree in adapters.items():
            if name not in model.experts:
                raise ValueError(
                    f"--lora {argument} is for expert {name!r}; the model has {model.experts}"
                )
            found.append((name, tree, float(strength)))
    return found


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


if __name__ == "__main__":
    main()
