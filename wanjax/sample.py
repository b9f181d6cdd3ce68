"""Sample videos from a model and adapters; the trainer's evaluation uses the same functions.

    python -m wanjax.sample --model tinywan22 --out samples \
        --prompt "a red circle moving left and a blue square moving up on a gray background"
    python -m wanjax.sample --model /models/Wan2.2-T2V-A14B-Diffusers --out samples \
        --lora x_high_noise.safetensors --lora x_low_noise.safetensors@0.8 --prompt "..."
    python -m wanjax.sample --model /models/Wan2.2-I2V-A14B-Diffusers --out samples \
        --image first_frame.png --prompt "..."

    python -m wanjax.sample … --mesh fsdp=2,context=4 --offload     # 8 GPUs, experts in host memory
    python -m wanjax.sample … --param_dtype int8                    # both experts of A14B in 29 GB

Files of wanjax say how they were trained to be sampled: steps, levels, shift, boundary, solver and
guidance come from there unless --steps, --grid, --shift or --solver is given.

Adapters are applied as in training, in two products beside each layer; several of one expert
become one of their ranks together. --merge folds them into the weights instead, which saves the
products and says how much of the change the dtype of the weights could hold.

All devices of the machine make one video together unless --mesh says otherwise. The text encoder,
then the image encoder, are gone before the experts are read.

Shapes: P prompts, S text rows, E text dim, H W pixels.
"""

import argparse
import dataclasses
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

from convert import disk, weights
from convert import lora as convert_lora
from convert.lora import read as lora_files
from wanjax import paths, sampler, sampling, schedule, settings, setup
from wanjax.data import text
from wanjax.data import video as videos
from wanjax.models import condition, lora, presets, quant, wan
from wanjax.parallel import distributed, runtime, sharding


def main(argv=None) -> None:
    """Command line: see the file docstring and --help."""
    distributed.claim_memory()
    runtime.set_flags("none", {})
    parser = argparse.ArgumentParser(
        prog="python -m wanjax.sample", description="Sample videos from a model."
    )
    add = parser.add_argument
    add("--model", required=True, help="diffusers folder, any Wan checkpoint, or tinywan22")
    add("--lora", action="append", default=[], help="FILE[:high|low][@strength], repeatable")
    add("--merge", action="store_true", help="fold adapters into the weights, which rounds them")
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
    add("--batch", type=int, help="samples per device call; default: data*fsdp of the mesh")
    add("--vae_tile", type=int, default=0, help="decode in tiles of so many pixels")
    add("--mesh", default="context=-1", help="axis=size,… as config.mesh; default: %(default)s")
    add("--offload", action="store_true", help="keep the experts in host memory")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    add("--dtype", choices=setup.DTYPES, default=dtype)
    kept = (*setup.DTYPES, *quant.DTYPES)
    add("--param_dtype", choices=kept, help="of the experts' weights; default: --dtype")
    args = parser.parse_args(argv)
    try:
        _run(args)
    except (ValueError, OSError) as error:  # keys of a config are flags here
        sys.exit(f"wanjax.sample: {re.sub(r'config[.](sampling[.]|(?=mesh))', '--', str(error))}")


def _run(args) -> None:
    for flag in ("guidance_high", "guidance_low"):
        if not 0 <= (getattr(args, flag) or 0) < math.inf:
            raise ValueError(f"--{flag} is {getattr(args, flag)}; expected a number from 0 up")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed is {args.seed}; expected a number in [0, 2**32)")
    if args.merge and args.param_dtype in quant.DTYPES:
        raise ValueError(
            f"--merge into {args.param_dtype} would round most of the change away; leave it out, "
            "so that the adapters are applied, or set --param_dtype bfloat16"
        )
    out, mesh = paths.local(args.out), _mesh(args.mesh)
    sources = [convert_lora.parse_argument(argument) for argument in args.lora]
    model = _model(args)
    plan = _plan(args, model, mesh, _sampler_note(args, sources))
    images = _images(args, model, plan)
    adapters = _adapters(sources, model)
    print(f"mesh     {dict(mesh.shape)}, {wan.describe(model.wan, dict(mesh.shape))}", flush=True)
    print(schedule.describe(plan.schedule, dataclasses.asdict(plan.guidance)), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with sharding.use_mesh(mesh):
        ctx_PSE, uncond_1SE = _contexts(args, model, mesh)
        vae, cond = _first_frames(args, model, mesh, plan, images)
        policy = _policy(args, model, mesh, sources, adapters)
        made = sampling.clips(
            policy, vae, ctx_PSE, uncond_1SE, model=model, plan=plan, seed=args.seed, cond=cond
        )
        frames = (video for batch, count in made for video in sharding.fetch(batch)[:count])
        for i, (prompt, video) in enumerate(zip(args.prompt, frames, strict=True)):
            videos.write_mp4(out / f"{i:03d}.mp4", video, model.sampling.fps)
            (out / f"{i:03d}.txt").write_text(prompt + "\n", encoding="utf-8")
            print(f"{out / f'{i:03d}.mp4'}  {prompt}", flush=True)


def _model(args) -> presets.ModelConfig:
    """The model from its headers; raises ValueError where a part that sampling needs is absent."""
    model = weights.model_config(args.model)
    needed = ["text_encoder", "vae", *["image_encoder"] * (model.wan.image_dim is not None)]
    if absent := [part for part in needed if part not in disk.read(args.model).tensors]:
        raise ValueError(
            f"{args.model} has no {' and no '.join(absent)}; give a whole model folder, such as "
            "convert.weights makes of single files"
        )
    return dataclasses.replace(model, wan=dataclasses.replace(model.wan, dtype=args.dtype))


def _mesh(text: str) -> jax.sharding.Mesh:
    """The mesh of --mesh, on the first devices of this machine."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if not re.fullmatch("-?[0-9]+", size) or axis in sizes:
            raise ValueError(f"--mesh is {text!r}; expected axis=size,… such as fsdp=2,context=4")
        sizes[axis] = int(size)
    named = None if -1 in sizes.values() else jax.devices()[: math.prod(sizes.values())]
    return sharding.make_mesh(sizes, named)


def _contexts(args, model: presets.ModelConfig, mesh):
    """(ctx_PSE of the prompts, uncond_1SE); the text encoder's weights come and go in here."""
    usual = model.sampling.negative_prompt
    negative = usual if args.negative is None else args.negative
    encode = text.Encoder(model, [negative, *args.prompt])  # a bad tokenizer shows before weights
    found, _ = setup.load_model(
        args.model, param_dtype=args.dtype, mesh=mesh, components=("text_encoder",)
    )
    encode.params = found["text_encoder"]
    return encode(args.prompt), jnp.asarray(encode([negative]))


def _first_frames(args, model: presets.ModelConfig, mesh, plan: settings.SamplingConfig, images):
    """(weights of the VAE, cond of the prompts or None); images: [H, W, 3] uint8, one for all
    prompts, or each. The image encoder's weights come and go in here."""
    found, _ = setup.load_model(
        args.model, param_dtype=args.dtype, mesh=mesh, components=("vae", "image_encoder")
    )
    if not images:
        return found["vae"], None
    cond = condition.first_frames(found, images, plan.frames, model=model)
    count = len(args.prompt)
    return found["vae"], {k: np.broadcast_to(x, (count, *x.shape[1:])) for k, x in cond.items()}


def _policy(args, model: presets.ModelConfig, mesh, sources: list[tuple], adapters: dict) -> dict:
    """{expert: (params, adapter tree or {})}; with --merge the adapters are in the params."""
    policy = {}
    for expert in model.experts:
        found, _ = setup.load_model(
            args.model, param_dtype=args.param_dtype or args.dtype, mesh=mesh,
            components=(expert,), adapters=sources, offload=args.offload,
        )  # fmt: skip
        adapter = adapters.pop(expert, {})
        at = sharding.tree_shardings(mesh, adapter, wan.logical_axes)
        adapter = jax.device_put(adapter, at)
        if args.merge and adapter:
            merged, rounding = lora.merge(found.pop(expert), adapter)
            print(f"merged   {expert}: {rounding}", flush=True)
            if rounding.large:
                print(
                    f"warning: expert {expert} has lost {rounding.relative:.0%} of its adapters' "
                    "change; leave out --merge, so that they are applied, or set --param_dtype "
                    "float32", flush=True,
                )  # fmt: skip
            found, adapter = {expert: merged}, {}
        policy[expert] = found[expert], adapter
    return policy


def _plan(args, model: presets.ModelConfig, mesh, note: dict) -> settings.SamplingConfig:
    """The sampler: of the note, of the flags where there is none, else of the model; raises
    ValueError for sizes that the model or the mesh cannot take."""
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
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch is {args.batch}; expected at least 1")
    sizes = dict(mesh.shape)
    plan = settings.SamplingConfig(
        schedule=steps,
        guidance=presets.Guidance(high=scale("high"), low=scale("low")),
        guidance_mode="batch",
        height=given("height"),
        width=given("width"),
        frames=given("frames"),
        solver=solver,
        batch=args.batch or sizes["data"] * sizes["fsdp"],
        vae_tile=args.vae_tile,
    )
    grid = sampling.token_grid(model, sampling.latent_shape(model, plan))
    wan.check_mesh(model.wan, sizes, plan.batch, math.prod(grid))
    return plan


def _images(args, model, plan: settings.SamplingConfig) -> list[np.ndarray]:
    """The first frames [H, W, 3], cut to the size of the video: none, one for all, or one each."""
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
    return [videos.fit(videos.read_image(path), *size) for path in args.image]


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


def _adapters(sources: list[tuple], model: presets.ModelConfig) -> dict:
    """{expert: one adapter tree} of [(path, expert or None, strength)]."""
    found: dict[str, list] = {}
    for path, expert, strength in sources:
        adapters = convert_lora.load(path, model, expert=expert, dense_merged=True)
        for name, tree in adapters.items():
            if name not in model.experts:
                raise ValueError(
                    f"--lora {path} is for expert {name!r}; the model has {model.experts}"
                )
            found.setdefault(name, []).append((tree, strength))
    return {expert: lora.combine(own) for expert, own in found.items()}


if __name__ == "__main__":
    main()
