"""Sample videos from a model and adapters; the trainer's evaluation uses the same functions.

    python -m wanjax.sample --model tinywan22 --out samples \
        --prompt "a red circle moving left and a blue square moving up on a gray background"
    python -m wanjax.sample --model /models/Wan2.2-T2V-A14B-Diffusers --out samples \
        --lora x_high_noise.safetensors --lora x_low_noise.safetensors@0.8 --prompt "..."
    python -m wanjax.sample --model /models/Wan2.2-I2V-A14B-Diffusers --out samples \
        --image first_frame.png --prompt "..."

Files of wanjax say how they were trained to be sampled: steps, levels, shift, boundary, solver and
guidance come from there unless --steps, --grid, --shift or --solver is given.

Shapes: B samples, P prompts.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from convert import lora as convert_lora
from convert import weights
from wanjax import sampler, schedule
from wanjax import state as states
from wanjax.data import text, video
from wanjax.models import condition, lora, presets, quant, umt5
from wanjax.parallel import sharding

DTYPES = ("bfloat16", "float16", "float32")


def generate(
    setup, policy, vae_params, ctx_BSE, uncond_1SE, *, seed: int, first_id: int = 0, cond=None
):
    """uint8 videos [B, frames, height, width, 3] of B contexts by the ODE solver of setup.

    policy: {expert: (params, adapter)}; cond: first frames as of models.condition, or None. Sample
    i starts from the noise of (seed, first_id + i), whatever the batching.
    """
    count, size = len(ctx_BSE), setup.sampling.batch
    videos = []
    for first in range(0, count, size):
        rows = np.minimum(
            np.arange(first, first + size), count - 1
        )  # the last batch keeps its shape
        given = {name: a[rows] for name, a in (cond or {}).items()}
        x0 = states.sample_latents(
            policy, jnp.asarray(ctx_BSE[rows]), uncond_1SE, jax.random.key(seed),
            jnp.asarray(rows + first_id), given, setup=setup,
        )  # fmt: skip
        videos.append(states.decode(vae_params, x0, setup=setup))
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
    path, *, param_dtype="float32", mesh=None, experts_only=False, adapters=(), offload=False,
    **run,
):  # fmt: skip
    """(params, ModelConfig) with the run-time fields of the transformer set.

    run: dtype, attention, context, remat and interleave of WanConfig. adapters: [(path, expert or
    None, strength)], whose changes that are not low-rank are added to the weights. offload: keep
    the experts in host memory.
    """
    stored = param_dtype if param_dtype in quant.DTYPES else jnp.dtype(param_dtype)
    dense = convert_lora.dense_changes(path, adapters)
    params, model = weights.load(
        path, mesh=mesh, dtype=stored, experts_only=experts_only, dense=dense, offload=offload
    )
    run = dataclasses.replace(model.wan, **run)
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
    add("--image", action="append", default=[], help="first frame: one for all prompts, or each")
    add("--negative", help="negative prompt; default: the model's")
    add("--out", required=True, help="folder for mp4 files")
    add("--steps", type=int)
    add("--solver", choices=[*sorted(sampler.SOLVERS), "renoise"], help="default: unipc")
    add("--grid", help="sigma grid; default: unipc for --solver unipc, else simple")
    add("--shift", type=float)
    add("--guidance_high", type=float)
    add("--guidance_low", type=float)
    add("--height", type=int)
    add("--width", type=int)
    add("--frames", type=int)
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=1, help="samples per device call")
    add("--vae_tile", type=int, default=0, help="decode in tiles of so many pixels")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    add("--dtype", choices=DTYPES, default=dtype)
    args = parser.parse_args(argv)
    try:
        _run(args)
    except ValueError as error:
        sys.exit(f"wanjax.sample: {error}")


def _run(args) -> None:
    if args.batch < 1:
        raise ValueError(f"--batch is {args.batch}; expected at least 1")
    for flag in ("guidance_high", "guidance_low"):
        if not 0 <= (getattr(args, flag) or 0) < math.inf:
            raise ValueError(f"--{flag} is {getattr(args, flag)}; expected a number from 0 up")
    adapters = _arguments(args.lora)
    params, model = load_model(
        args.model, dtype=args.dtype, param_dtype=args.dtype, adapters=adapters
    )
    defaults = model.sampling
    pick = lambda given, default: default if given is None else given
    note = _sampler_note(args)
    solver = note.get("solver") or args.solver or "unipc"
    scales = dataclasses.asdict(defaults.guidance) | note.get("guidance", {})
    guidance = presets.Guidance(
        pick(args.guidance_high, scales["high"]), pick(args.guidance_low, scales["low"])
    )
    levels = note.get("sigmas") if note.get("grid") == "explicit" else None
    plan = schedule.make_schedule(
        note.get("grid") or args.grid or ("unipc" if solver == "unipc" else "simple"),
        note.get("steps") or pick(args.steps, defaults.steps),
        1.0 if levels else note.get("shift") or pick(args.shift, defaults.shift),
        note.get("boundary", model.boundary),
        levels,
    )
    sampling = states.SamplingConfig(
        schedule=plan, guidance=guidance, height=pick(args.height, defaults.height),
        width=pick(args.width, defaults.width), frames=pick(args.frames, defaults.frames),
        solver=solver, batch=args.batch, vae_tile=args.vae_tile,
    )  # fmt: skip
    setup = states.sampling_setup(model, sampling)
    states.latent_shape(setup)
    images = _images(args, model, sampling)
    scales = {"high": guidance.high, "low": guidance.low}
    print(schedule.describe(plan, scales), flush=True)
    for expert, adapter, strength in _adapters(adapters, model):
        params[expert] = lora.merge(params[expert], adapter, strength)
    negative = pick(args.negative, defaults.negative_prompt)
    encode = make_encoder(model, params, [negative, *args.prompt])
    uncond = jnp.asarray(encode([negative]))
    policy = {expert: (params[expert], {}) for expert in model.experts}
    encoders = {name: tree for name, tree in params.items() if name not in model.experts}
    frames_of = jax.jit(
        lambda encoders, image: condition.first_frame(
            encoders, image[None] / 127.5 - 1, sampling.frames, model=model
        )
    )
    first_frame = functools.partial(frames_of, encoders)
    out = pathlib.Path(args.out)
    for i, prompt in enumerate(args.prompt):
        ctx = encode([prompt])
        cond = first_frame(images[i]) if images else None
        frames = generate(
            setup, policy, params["vae"], ctx, uncond, seed=args.seed, first_id=i, cond=cond
        )[0]
        video.write_mp4(out / f"{i:03d}.mp4", frames, defaults.fps)
        (out / f"{i:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
        print(f"{out / f'{i:03d}.mp4'}  {prompt}", flush=True)


def _images(args, model, sampling) -> list[np.ndarray]:
    """The first frame [H, W, 3] of each prompt, cut to the size of the video; [] without images."""
    form = condition.kind(model)
    if form == "latents" and not args.image:
        raise ValueError(f"model {model.name} starts from an image; give its file with --image")
    if args.image and not form:
        raise ValueError(f"model {model.name} makes videos from text only; leave out --image")
    if len(args.image) not in (0, 1, len(args.prompt)):
        raise ValueError(
            f"{len(args.image)} --image for {len(args.prompt)} --prompt; expected one for all, or "
            "one each"
        )
    size = sampling.height, sampling.width
    images = [video.fit(video.read_image(path), *size) for path in args.image]
    return images * len(args.prompt) if len(images) == 1 else images


def sampler_note(setup) -> dict:
    """How a trained model is to be sampled, as exports say it: what makes the levels, and the
    levels themselves (sigmas, with the shift applied)."""
    sampling = setup.sampling
    plan = sampling.schedule
    return {
        "grid": plan.grid,
        "steps": plan.steps,
        "shift": plan.shift,
        "boundary": plan.boundary,
        "solver": sampling.solver,
        "guidance": dataclasses.asdict(sampling.guidance),
        "sigmas": plan.sigmas[:-1].tolist(),
    }


def _sampler_note(args) -> dict:
    """The note of the adapter files, or of the model folder; {} where none is or flags differ."""
    if args.steps or args.grid or args.shift or args.solver:
        return {}
    sources = [path for path, _, _ in map(_split, args.lora)]
    notes = [convert_lora.read(path).metadata.get("wanjax.sampler") for path in sources]
    folder = pathlib.Path(args.model) / "wanjax.json"
    if not any(notes) and folder.is_file():
        sources = [folder]
        notes = [json.dumps(json.loads(folder.read_text(encoding="utf-8")).get("sampler", {}))]
    found = {note: path for note, path in zip(notes, sources, strict=True) if note}
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(map(str, found.values()))} were trained with different samplers; say "
            "how to sample them together with --steps and --solver"
        )
    for note, path in found.items():
        print(f"sampler of {path}: {note}", flush=True)
        return json.loads(note)
    return {}


def _arguments(arguments: list[str]) -> list[tuple[str, str | None, float]]:
    """[(path, expert or None, strength)] of FILE[:high|low][@strength] arguments."""
    found = []
    for argument in arguments:
        path, expert, strength = _split(argument)
        if not _is_number(strength):
            raise ValueError(f"--lora {argument}: strength {strength!r} is not a number")
        found.append((path, expert or None, float(strength)))
    return found


def _adapters(sources: list[tuple], model) -> list[tuple]:
    """[(expert, adapter tree, strength)] of [(path, expert or None, strength)]."""
    found = []
    for path, expert, strength in sources:
        adapters = convert_lora.load(path, model, expert=expert, dense_merged=True)
        for name, tree in adapters.items():
            if name not in model.experts:
                raise ValueError(
                    f"--lora {path} is for expert {name!r}; the model has {model.experts}"
                )
            found.append((name, tree, strength))
    return found


def _split(argument: str) -> tuple[str, str, str]:
    """(path, expert or "", strength) of FILE[:high|low][@strength]."""
    rest, _, strength = argument.rpartition("@") if "@" in argument else (argument, "", "1")
    path, _, expert = rest.rpartition(":") if rest.endswith((":high", ":low")) else (rest, "", "")
    return path, expert, strength


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


if __name__ == "__main__":
    main()
