"""Time wanjax at real Wan sizes on this machine's GPU; one JSON line per figure.

    python scripts/bench/ours.py forward lora_step grpo nft dmd2 checkpoint vae_decode umt5 …

Random bf16 weights, no checkpoint needed. Medians of repeated calls after a warm-up call; every
call ends by fetching a value to the host. scripts/bench/compare.py runs this against the same
arithmetic in diffusers and writes the ratios.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from report_table import timed

from configs import default, dmd2_wan22, grpo_wan22, nft_wan22
from wanjax import optim, sampler, sampling, settings, trees
from wanjax import setup as setups
from wanjax.algorithms import Tools, dmd2, grpo, nft
from wanjax.data import Item
from wanjax.losses import flow
from wanjax.models import attention, lora, presets, quant, umt5, vae, wan
from wanjax.parallel import runtime, sharding
from wanjax.run import checkpoint

MODEL = presets.MODELS["wan2.2_t2v_a14b"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=40, help="use fewer to try the script")
    parser.add_argument("--size", default="480x832x81", help="height x width x frames")
    parser.add_argument("--remat", default="full", help="training policy")
    parser.add_argument("--batch", type=int, default=1, help="clips (forward, lora_step)")
    parser.add_argument("--mesh", default="", help="axis=size,... (forward, lora_step)")
    parser.add_argument(
        "--weights",
        default="bfloat16",
        choices=["bfloat16", *quant.DTYPES],
        help="dtype of the base",
    )
    parser.add_argument("--offload", action="store_true", help="experts in host memory (grpo, nft)")
    parser.add_argument("--text_rows", type=int, default=512, help="per prompt, excluding padding")
    parser.add_argument("--folder", help="where to write checkpoints")
    parser.add_argument(
        "--kernels", action="store_true", help="profile where a call spends its time"
    )
    args = parser.parse_args()
    axes = {k: int(v) for k, v in (pair.split("=") for pair in args.mesh.split(",") if pair)}
    runtime.set_flags(args.remat, axes)
    mesh = sharding.make_mesh(axes) if axes else None
    for name in args.figures:
        with sharding.use_mesh(mesh):
            row = {"figure": name, **FIGURES[name](args), "layers": args.layers}
        stats = [device.memory_stats() or {} for device in jax.devices()]
        peak = max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 2**30
        stack = f"jax {jax.__version__}, {attention.resolve('auto', 'bfloat16', 128)}"
        print(json.dumps({**row, "peak_gib": round(peak, 1), "stack": stack}), flush=True)
        jax.clear_caches()


def forward(args) -> dict:
    """One forward pass without guidance; with one-byte weights also the relative error of the whole
    velocity against bf16 weights."""
    config, x, ctx = _inputs(args, remat="none")
    run = jax.jit(lambda *a: wan.denoise(*a, config=config))
    inputs = lambda i: (None, x, jnp.full((args.batch,), 900.0 - i), ctx)
    exact = None
    if args.weights != "bfloat16":
        exact = run(random_params(config, 0, "bfloat16"), *inputs(0))
    params = random_params(config, 0, args.weights)
    call = lambda i: float(run(params, *inputs(i))[0, 0, 0, 0, 0])
    row = _timed(args, call, args.batch * wan.forward_flops(config, _grid(x)))
    if exact is not None:
        norm = jnp.linalg.norm
        row["error"] = float(norm(run(params, *inputs(0)) - exact) / norm(exact))
    return row


def lora_step(args) -> dict:
    """One optimizer step of a rank-32 adapter: flow-matching loss, backward, AdamW."""
    config, x0, ctx = _inputs(args, remat=args.remat)
    params = random_params(config, 0, args.weights)
    adapter = {"high": _place(lora.init(jax.random.key(1), params, rank=32, alpha=32.0))}
    own = {"high": settings.OptimConfig(**default.get_config().optim.high.to_dict())}
    opt = {"high": optim.make(own["high"]).init(adapter["high"])}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(adapter, opt, params, x0, ctx, t):
        def loss(_, adapter, t):
            noise = sampler.initial_noise(jax.random.key(2), t.astype(jnp.int32), x0.shape[1:])
            x_t = flow.add_noise(x0, noise, t / 1000)
            v = wan.denoise(params, adapter, x_t, t, ctx, config=config)
            value, _ = flow.flow_loss(v, x0, noise)
            return value, {"loss": value}

        return optim.step(loss, adapter, opt, {"high": (t,)}, own)

    def call(i):
        nonlocal adapter, opt
        t = jnp.full((1, args.batch), 900.0 - i)  # one micro-batch
        adapter, opt, metrics = step(adapter, opt, params, x0, ctx, t)
        return float(metrics["loss/high"][0])

    warm_up = 2 if args.remat == "offload" else 1  # host memory is pinned in the first two calls
    flops = 3 * args.batch * wan.forward_flops(config, _grid(x0))
    return _timed(args, call, flops, warm_up)


def grpo_iteration(args) -> dict:
    """Rollout, decode and update with the shipped config, at the miles recipe's size."""
    return _iteration(grpo, grpo_wan22.get_config("small"), args)


def nft_iteration(args) -> dict:
    """The same for DiffusionNFT's config: no guidance, a different sampler, two extra policies."""
    return _iteration(nft, nft_wan22.get_config("small"), args)


def dmd2_step(args) -> dict:
    """One clip of --size through phased DMD2: rollouts, student and critic steps, both experts."""
    config = dmd2_wan22.get_config()
    height, width, frames = map(int, args.size.split("x"))
    config.sampling.update(height=height, width=width, frames=frames)
    config.prompts_per_step = config.sampling.batch = config.micro_samples = 1
    config.dmd2.student_every = 1  # every step runs all passes
    return _iteration(dmd2, config, args)


def _iteration(algorithm, config, args) -> dict:
    """An algorithm's collect and update, both experts resident, with mean brightness as the reward;
    first_s is how long a run waits from loaded weights to its first finished step."""
    run = dict(dtype="bfloat16", remat=args.remat, num_layers=args.layers)
    model = dataclasses.replace(MODEL, wan=dataclasses.replace(MODEL.wan, **run))
    roles = {"teacher": model, "critic": model} if algorithm is dmd2 else {}
    setup = setups.make(config, model, roles)
    setup = dataclasses.replace(setup, rewards=settings.RewardConfig({"mean": 1.0}, "stop"))
    algorithm.check(setup)
    keep = sharding.to_host if args.offload else lambda tree: tree
    draw = lambda seed: keep(random_params(model.wan, seed, args.weights))
    params = {e: draw(i) for i, e in enumerate(model.experts)}
    state = algorithm.init(jax.random.key(2), setup, {"student": params})
    prompts = config.prompts_per_step
    ctx = jax.random.normal(jax.random.key(3), (prompts, args.text_rows, 4096))
    uncond = jax.random.normal(jax.random.key(4), (1, args.text_rows, 4096))
    brightness = lambda video, prompts: ({"mean": video.mean((1, 2, 3, 4), dtype=np.float64)}, {})
    tools = Tools(_vae_params(model.vae), uncond, brightness)
    item = Item(["p"] * prompts, ctx)
    parts = {"collect_s": [], "update_s": []}
    first = {}

    def collect():
        batch = algorithm.collect(state, setup, item, tools)
        jax.block_until_ready(list(vars(batch).values()))
        return batch

    def update(batch):
        nonlocal state
        state, metrics = algorithm.update(state, setup, batch)
        return {name: float(value) for name, value in metrics.items()}

    def call(i):
        start = time.perf_counter()
        batch = collect()
        middle = time.perf_counter()
        metrics = update(batch)
        first.update(metrics if i == 0 else {})
        parts["collect_s"].append(middle - start)
        parts["update_s"].append(time.perf_counter() - middle)

    counted = getattr(algorithm, "forwards", lambda setup: {})  # a backward pass counts as two
    grid = sampling.token_grid(model, sampling.latent_shape(model, setup.sampling))
    flops = sum(counted(setup).values()) * wan.forward_flops(model.wan, grid)
    warm_up = 2 if args.offload or args.remat == "offload" else 1  # see lora_step
    profiled = {"collect kernels": collect, "all kernels": lambda: update(collect())}
    few = argparse.Namespace(**vars(args) | {"repeats": min(args.repeats, 2)})  # as in peer.py
    row = _timed(few, call, flops, warm_up, profiled)
    medians = {name: round(statistics.median(v[warm_up:]), 2) for name, v in parts.items()}
    gaps = [abs(v - 1) for k, v in first.items() if "/ratio_m" in k and "mean" not in k]
    return row | medians | ({"first_ratio_gap": max(gaps)} if gaps else {})


def checkpoints(args) -> dict:
    """Save what a LoRA run of both experts keeps (rank-64 adapters and two moments each), then find
    it, verify its digests and restore it, as a resumed run does."""
    config = dataclasses.replace(MODEL.wan, num_layers=args.layers)
    shapes = jax.eval_shape(
        lambda key: lora.init(key, wan.init(key, config), rank=64, alpha=64.0), jax.random.key(0)
    )
    names = [f"{e}/{part}" for e in MODEL.experts for part in ("adapter", "mu", "nu")]
    draw = jax.jit(lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), shapes))
    state = {name: draw(jax.random.key(i)) for i, name in enumerate(names)}
    restored = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:

        def resume(_):
            step = checkpoint.latest_good(folder)
            tree, _ = checkpoint.restore(folder, step, state)
            restored[:] = [float(leaf.ravel()[-1]) for leaf in jax.tree.leaves(tree)]

        row = timed(lambda i: checkpoint.save(folder, 1, state, {}), args.repeats)
        back = timed(resume, args.repeats)
    if restored != [float(leaf.ravel()[-1]) for leaf in jax.tree.leaves(state)]:
        raise ValueError("the restored state differs from the saved one")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return row | {"restore_s": back["seconds"], "gb": round(size / 1e9, 2)}


def vae_decode(args) -> dict:
    """One clip's latents to pixels, bf16."""
    _, z, _ = _inputs(args)
    params = _vae_params(MODEL.vae)
    run = jax.jit(functools.partial(vae.decode, config=MODEL.vae))
    z = z.astype(jnp.bfloat16)
    return _timed(args, lambda i: float(run(params, z + i)[0, 0, 0, 0, 0]))


def vae_encode(args) -> dict:
    """One clip's pixels to latents, bf16."""
    height, width, frames = map(int, args.size.split("x"))
    params = _vae_params(MODEL.vae)
    run = jax.jit(functools.partial(vae.encode, config=MODEL.vae))
    shape = (1, frames, height, width, 3)
    x = jax.random.uniform(jax.random.key(0), shape, minval=-1, maxval=1).astype(jnp.bfloat16)
    return _timed(args, lambda i: float(run(params, x * (1 - i / 100))[0, 0, 0, 0, 0]))


def text_encoder(args) -> dict:
    """UMT5-XXL on 8 prompts of 512 tokens, bf16."""
    config = MODEL.text
    shapes = trees.flatten(jax.eval_shape(lambda: umt5.init(jax.random.key(0), config)))
    params = trees.unflatten(_draw(shapes, 0, lambda path, x: [(path, x.astype(jnp.bfloat16))]))
    ids = jax.random.randint(jax.random.key(1), (8, 512), 2, config.vocab_size)
    run = jax.jit(functools.partial(umt5.encode, config=config))
    mask = jnp.ones((8, 512), bool)
    call = lambda i: float(run(params, (ids + i) % config.vocab_size, mask)[0, 0, 0])
    return _timed(args, call)


def random_params(config, seed: int, weights: str):
    """Normally distributed matmul weights, stored as in training."""
    shapes = trees.flatten(jax.eval_shape(lambda: wan.init(jax.random.key(0), config)))
    return trees.unflatten(_draw(shapes, seed, _storing(weights)))


def _draw(shapes, seed, store):
    """{path: leaf}, drawn leaf by leaf and layer by layer so that nothing large is held twice;
    placed on the current mesh as in training."""
    found = {}
    for path, key in zip(shapes, jax.random.split(jax.random.key(seed), len(shapes)), strict=True):
        found |= trees.flatten(_leaf(path, shapes[path].shape, store, jax.sharding.get_mesh())(key))
    return found


@functools.cache  # the second expert reuses the first's compiled functions
def _leaf(path, shape, store, mesh):
    """key -> a random leaf as training stores it."""
    stacked = path.startswith(f"{wan.STACK}/")
    draw = lambda key: jax.random.normal(
        key, shape[stacked:]
    )  # drawn in bfloat16 it would have 128 values
    normal = lambda key: (draw(key) * 0.02).astype(jnp.bfloat16)
    one = lambda key: trees.unflatten(dict(store(path, normal(key))))
    many = lambda key: jax.lax.map(one, jax.random.split(key, shape[0]))
    make = many if stacked else one
    where = _shardings(jax.eval_shape(make, jax.random.key(0)))
    return jax.jit(make, out_shardings=where[0] if where else None)


@functools.cache
def _storing(weights: str):
    return lambda path, leaf: wan.store_leaf(path, leaf, weights)


def _place(tree):
    """The tree, placed on the current mesh as in training."""
    return jax.tree.map(jax.device_put, tree, *_shardings(tree))


def _shardings(tree):
    """[its shardings on the current mesh], or [] without a mesh."""
    mesh = jax.sharding.get_mesh()
    return [sharding.tree_shardings(mesh, tree, wan.logical_axes)] if mesh.shape else []


def _vae_params(config):
    """As drawn by vae.init (activations keep their scale), in bf16."""
    return jax.jit(
        lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), vae.init(key, config))
    )(jax.random.key(5))


def _inputs(args, **run):
    """(WanConfig, latents of one clip, text rows)."""
    config = dataclasses.replace(MODEL.wan, dtype="bfloat16", num_layers=args.layers, **run)
    height, width, frames = map(int, args.size.split("x"))
    shape = (args.batch, (frames - 1) // 4 + 1, height // 8, width // 8, 16)
    keys = jax.random.split(jax.random.key(1), 2)
    ctx = jax.random.normal(keys[1], (args.batch, args.text_rows, 4096), jnp.float32)
    return config, jax.random.normal(keys[0], shape, jnp.float32), ctx


def _grid(x_BTHWC):
    _, T, H, W, _ = x_BTHWC.shape
    return T, H // 2, W // 2


def _timed(args, call, flops=None, warm_up=1, profiled=None) -> dict:
    """A figure's row; --kernels adds the kernels of `profiled`, {name: function}, by default of the
    call."""
    row = timed(call, args.repeats, warm_up)
    if flops:
        row["tflops"] = round(flops / row["seconds"] / 1e12, 1)
    profiled = profiled or {"kernels": lambda: call(0)}
    found = {name: kernels.by_kind(run) for name, run in profiled.items()} if args.kernels else {}
    return row | found


FIGURES = {
    "forward": forward,
    "lora_step": lora_step,
    "grpo": grpo_iteration,
    "nft": nft_iteration,
    "dmd2": dmd2_step,
    "checkpoint": checkpoints,
    "vae_decode": vae_decode,
    "vae_encode": vae_encode,
    "umt5": text_encoder,
}


if __name__ == "__main__":
    main()
