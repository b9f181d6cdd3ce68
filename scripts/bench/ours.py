"""Time wanjax at real Wan sizes on this machine's GPU; one JSON line per figure.

    python scripts/bench/ours.py forward lora_step grpo vae_decode vae_encode umt5

Random bf16 weights, no checkpoint needed. Medians of repeated calls after a warm-up call; every
call ends with a value that the host fetched. scripts/bench/compare.py runs this beside the same
arithmetic in diffusers and writes the ratios.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from report_table import timed

from wanjax import optim, sampler, schedule, sharding
from wanjax import state as states
from wanjax.algorithms import grpo
from wanjax.losses import flow
from wanjax.models import blocks, lora, presets, umt5, vae, wan

MODEL = presets.MODELS["wan2.2_t2v_a14b"]
GRPO = dict(height=480, width=480, frames=5, steps=10, samples=16, rank=64)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=40, help="fewer to try the script")
    parser.add_argument("--size", default="480x832x81", help="height x width x frames")
    parser.add_argument("--remat", default="full", help="policy of lora_step")
    parser.add_argument("--batch", type=int, default=1, help="clips (forward, lora_step)")
    parser.add_argument("--mesh", default="", help="axis=size,... (forward, lora_step)")
    args = parser.parse_args()
    blocks.set_xla_flags(args.remat)
    axes = {k: int(v) for k, v in (pair.split("=") for pair in args.mesh.split(",") if pair)}
    mesh = sharding.make_mesh(axes) if axes else None
    for name in args.figures:
        with sharding.use_mesh(mesh):
            row = {"figure": name, **FIGURES[name](args), "layers": args.layers}
        stats = [device.memory_stats() or {} for device in jax.devices()]
        peak = max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 2**30
        stack = f"jax {jax.__version__}"
        print(json.dumps({**row, "peak_gib": round(peak, 1), "stack": stack}), flush=True)
        jax.clear_caches()


def forward(args) -> dict:
    """One forward pass without guidance."""
    config, x, ctx = _inputs(args, remat="none")
    params = random_params(config, seed=0)
    run = jax.jit(lambda *a: wan.denoise(*a, config=config)[:, 0, 0, 0, 0].sum())
    call = lambda i: float(run(params, None, x, jnp.full((args.batch,), 900.0 - i), ctx))
    return _timed(call, args.repeats, args.batch * wan.forward_flops(config, _grid(x)))


def lora_step(args) -> dict:
    """One optimizer step of a rank-32 adapter: flow-matching loss, backward, AdamW."""
    config, x0, ctx = _inputs(args, remat=args.remat)
    params = random_params(config, seed=0)
    adapter = {"high": _place(lora.init(jax.random.key(1), params, rank=32, alpha=32.0))}
    settings = {"high": optim.OptimConfig()}
    opt = {"high": optim.make(settings["high"]).init(adapter["high"])}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapter, opt, params, x0, ctx, t):
        def loss(adapter, micro):
            t = micro["high"]
            noise = sampler.initial_noise(jax.random.key(2), t.astype(jnp.int32), x0.shape[1:])
            x_t = flow.add_noise(x0, noise, t / 1000)
            v = wan.denoise(params, adapter["high"], x_t, t, ctx, config=config)
            value, _ = flow.flow_loss(v, x0, noise)
            return value, {"high": {"loss": value}}

        return optim.step(loss, adapter, opt, {"high": t}, settings)

    def call(i):
        nonlocal adapter, opt
        t = jnp.full((1, args.batch), 900.0 - i)  # one micro-batch
        adapter, opt, metrics = step(adapter, opt, params, x0, ctx, t)
        return float(metrics["loss/high"][0])

    return _timed(call, args.repeats, 3 * args.batch * wan.forward_flops(config, _grid(x0)))


def grpo_iteration(args) -> dict:
    """Rollout, decode and update at the size of the miles recipe, both experts resident."""
    config = dataclasses.replace(MODEL.wan, dtype="bfloat16", remat="full", num_layers=args.layers)
    model = dataclasses.replace(MODEL, wan=config)
    K, side = GRPO["samples"], ("height", "width", "frames")
    setup = states.Setup(
        model=model,
        sampling=states.SamplingConfig(
            schedule=schedule.make_schedule("simple", GRPO["steps"], 12.0, model.boundary),
            guidance=model.sampling.guidance, batch=4, **{name: GRPO[name] for name in side},
        ),
        sde=states.SdeConfig(schedule.Strategy("dual_window", window=1), "flow", 0.7),
        lora=states.LoraConfig(rank=GRPO["rank"], alpha=2.0 * GRPO["rank"]),
        experts=("high", "low"),
        optim={e: optim.OptimConfig() for e in ("high", "low")},
        seed=0,
        algorithm=grpo.Config(
            group_size=K, prompts_per_step=1, micro_samples=2,
            clip={"high": 1e-4, "low": 1e-3}, kl_beta={"high": 0.0, "low": 0.0},
        ),
        rewards={"mean": 1.0},
    )  # fmt: skip
    grpo.check(setup)
    params = {e: random_params(config, seed=i) for i, e in enumerate(setup.experts)}
    state = grpo.init(jax.random.key(2), setup, {"student": params})
    keys = jax.random.split(jax.random.key(3), 2)
    ctx, uncond = (jax.random.normal(key, (1, 512, 4096), jnp.float32) for key in keys)
    brightness = lambda video, prompts: ({"mean": video.mean((1, 2, 3, 4), dtype=np.float64)}, {})
    tools = states.Tools(_vae_params(model.vae), uncond, brightness)
    parts = {"collect_s": [], "update_s": []}
    ratio = []

    def call(i):
        nonlocal state
        start = time.perf_counter()
        batch = grpo.collect(state, setup, states.Item(["p"], ctx), tools)
        jax.block_until_ready(batch.trajectory)
        middle = time.perf_counter()
        state, metrics = grpo.update(state, setup, batch)
        names = [f"grpo/ratio_{m}/{e}" for m in ("min", "max") for e in setup.experts]
        ratio.append(max(abs(float(metrics[name]) - 1) for name in names))
        parts["collect_s"].append(middle - start)
        parts["update_s"].append(time.perf_counter() - middle)

    passes = K * GRPO["steps"] * 2 + K * 2 * 2 * 3  # in forwards; a backward pass counts two
    row = _timed(call, 2, passes * wan.forward_flops(config, (2, 30, 30)))
    medians = {name: round(statistics.median(values[1:]), 2) for name, values in parts.items()}
    return row | medians | {"first_ratio_gap": ratio[0]}


def vae_decode(args) -> dict:
    """Latents of one clip to pixels, bf16."""
    _, z, _ = _inputs(args)
    params = _vae_params(MODEL.vae)
    run = jax.jit(functools.partial(vae.decode, config=MODEL.vae))
    z = z.astype(jnp.bfloat16)
    return _timed(lambda i: float(run(params, z + i)[0, 0, 0, 0, 0]), args.repeats)


def vae_encode(args) -> dict:
    """Pixels of one clip to latents, bf16."""
    height, width, frames = map(int, args.size.split("x"))
    params = _vae_params(MODEL.vae)
    run = jax.jit(functools.partial(vae.encode, config=MODEL.vae))
    shape = (1, frames, height, width, 3)
    x = jax.random.uniform(jax.random.key(0), shape, jnp.bfloat16, -1, 1)
    return _timed(lambda i: float(run(params, x * (1 - i / 100))[0, 0, 0, 0, 0]), args.repeats)


def text_encoder(args) -> dict:
    """UMT5-XXL on 8 prompts of 512 tokens, bf16."""
    del args
    config = MODEL.text
    shapes = jax.eval_shape(lambda: umt5.init(jax.random.key(0), config))
    params = _draw(shapes, 0, lambda leaf: jnp.bfloat16)
    ids = jax.random.randint(jax.random.key(1), (8, 512), 2, config.vocab_size)
    run = jax.jit(functools.partial(umt5.encode, config=config))
    mask = jnp.ones((8, 512), bool)
    return _timed(lambda i: float(run(params, (ids + i) % config.vocab_size, mask)[0, 0, 0]), 5)


def random_params(config, seed: int):
    """Normal bf16 matmul weights (float32 where the model stores it)."""
    shapes = jax.eval_shape(lambda: wan.store(wan.init(jax.random.key(0), config), jnp.bfloat16))
    return _draw(shapes, seed, lambda leaf: leaf.dtype)


def _draw(shapes, seed, dtype_of):
    """Leaf by leaf, so that nothing is held twice; on the mesh in use as training places it."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(shapes))))

    def draw(x, where=None):
        normal = lambda key: jax.random.normal(key, x.shape, dtype_of(x)) * 0.02
        return jax.jit(normal, out_shardings=where)(next(keys))

    return jax.tree.map(draw, shapes, *_shardings(shapes))


def _place(tree):
    """The tree on the mesh in use as training places it."""
    return jax.tree.map(jax.device_put, tree, *_shardings(tree))


def _shardings(tree):
    """[its shardings on the mesh in use], or [] without a mesh."""
    mesh = jax.sharding.get_mesh()
    return [sharding.tree_shardings(mesh, tree, wan.logical_axes)] if mesh.shape else []


def _vae_params(config):
    """As vae.init draws them (activations keep their size), in bf16."""
    return jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), vae.init(key, config))
    )(jax.random.key(5))


def _inputs(args, **run):
    """(WanConfig, latents of one clip, text rows)."""
    config = dataclasses.replace(MODEL.wan, dtype="bfloat16", num_layers=args.layers, **run)
    height, width, frames = map(int, args.size.split("x"))
    shape = (args.batch, (frames - 1) // 4 + 1, height // 8, width // 8, 16)
    keys = jax.random.split(jax.random.key(1), 2)
    ctx = jax.random.normal(keys[1], (args.batch, 512, 4096), jnp.float32)
    return config, jax.random.normal(keys[0], shape, jnp.float32), ctx


def _grid(x_BTHWC):
    _, T, H, W, _ = x_BTHWC.shape
    return T, H // 2, W // 2


def _timed(call, repeats, flops=None) -> dict:
    row = timed(call, repeats)
    return row | ({"tflops": round(flops / row["seconds"] / 1e12, 1)} if flops else {})


FIGURES = {
    "forward": forward,
    "lora_step": lora_step,
    "grpo": grpo_iteration,
    "vae_decode": vae_decode,
    "vae_encode": vae_encode,
    "umt5": text_encoder,
}


if __name__ == "__main__":
    main()
