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
import sys

import jax
import jax.numpy as jnp
import numpy as np

from convert import lora as convert_lora
from convert.lora import read as lora_files
from wanjax import paths, sampler, sampling, schedule, settings, setup
from wanjax.data import text, video
from wanjax.models import condition, lora, presets


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
    add("--dtype", choices=setup.DTYPES, default=dtype)
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
    out = paths.local(args.out)
    adapters = [convert_lora.parse_argument(argument) for argument in args.lora]
    params, model = setup.load_model(
        args.model, dtype=args.dtype, param_dtype=args.dtype, adapters=adapters
    )
    plan = _plan(args, model, _sampler_note(args, adapters))
    sampling.latent_shape(model, plan)
    images = _images(args, model, plan)
    print(schedule.describe(plan.schedule, dataclasses.asdict(plan.guidance)), flush=True)
    for expert, adapter, strength in _adapters(adapters, model):
        params[expert] = lora.merge(params[expert], adapter, strength)
    usual = model.sampling
    negative = usual.negative_prompt if args.negative is None else args.negative
    encode = text.make_encoder(model, params, [negative, *args.prompt])
    uncond = jnp.asarray(encode([negative]))
    policy = {expert: (params[expert], {}) for expert in model.experts}
    first_frame = _first_frames(params, model, plan)
    for i, prompt in enumerate(args.prompt):
        frames = sampling.generate(
            policy, params["vae"], encode([prompt]), uncond, model=model, plan=plan,
            seed=args.seed, first_id=i, cond=first_frame(images[i]) if images else None,
        )[0]  # fmt: skip
        video.write_mp4(out / f"{i:03d}.mp4", frames, usual.fps)
        (out / f"{i:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
        print(f"{out / f'{i:03d}.mp4'}  {prompt}", flush=True)


def _plan(args, model: presets.ModelConfig, note: dict) -> settings.SamplingConfig:
    """The sampler: of the note, of the flags where there is none, else of the model."""
    usual = model.sampling

    def given(flag: str):
        value = getattr(args, flag)
        return getattr(usual, flag) if value is None else value

    def scale(expert: str) -> float:
        value = getattr(args, f"guidance_{expert}")
        of_note = note.get("guidance", {}).get(expert)
        return value if value is not None else of_note or getattr(usual.guidance, expert)

    solver = note.get("solver") or args.solver or "unipc"
    levels = note.get("sigmas") if note.get("grid") == "explicit" else None
    steps = schedule.make_schedule(
        note.get("grid") or args.grid or ("unipc" if solver == "unipc" else "simple"),
        note.get("steps") or given("steps"),
        1.0 if levels else note.get("shift") or given("shift"),
        note.get("boundary", model.boundary),
        levels,
    )
    return settings.SamplingConfig(
        schedule=steps,
        guidance=presets.Guidance(high=scale("high"), low=scale("low")),
        guidance_mode="batch",
        height=given("height"),
        width=given("width"),
        frames=given("frames"),
        solver=solver,
        batch=args.batch,
        vae_tile=args.vae_tile,
    )


def _first_frames(params: dict, model: presets.ModelConfig, plan: settings.SamplingConfig):
    """A function image [H, W, 3] uint8 -> cond of the model, compiled once."""
    encoders = {name: tree for name, tree in params.items() if name not in model.experts}

    @jax.jit
    def encode(encoders, image):
        return condition.first_frame(encoders, image[None] / 127.5 - 1, plan.frames, model=model)

    return functools.partial(encode, encoders)


def _images(args, model, plan: settings.SamplingConfig) -> list[np.ndarray]:
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
    size = plan.height, plan.width
    images = [video.fit(video.read_image(path), *size) for path in args.image]
    return images * len(args.prompt) if len(images) == 1 else images


def _sampler_note(args, adapters: list[tuple]) -> dict:
    """The note of the adapter files, or of the model folder; {} where none is or flags differ."""
    if args.steps or args.grid or args.shift or args.solver:
        return {}
    sources = [path for path, _, _ in adapters]
    notes = [lora_files.read(path).metadata.get("wanjax.sampler") for path in sources]
    folder = paths.model(args.model) / "wanjax.json"
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


if __name__ == "__main__":
    main()
