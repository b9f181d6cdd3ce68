"""Time the 14B transformer and one GRPO iteration of the two-expert A14B on this machine's GPU.

    python scripts/bench/wan14b.py --out scripts/bench/RESULTS.md

Random bf16 weights, no checkpoint needed; at least 78 GiB of device memory. Measured: the forward
pass at 480x832x81, and a GRPO step (rollout, decode, update of both experts' LoRA) at 480x480x5
with one prompt and K = 16, 10 steps with guidance. Medians of repeated calls after a warm-up
call; every call ends with a value fetched by the host.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from report_table import write_section

from wanjax import schedule
from wanjax import state as states
from wanjax.algorithms import grpo
from wanjax.models import presets, vae, wan
from wanjax.optim import OptimConfig

MODEL = presets.MODELS["wan2.2_t2v_a14b"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="markdown file to update")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--layers", type=int, default=MODEL.wan.num_layers, help="fewer to try the script"
    )
    args = parser.parse_args()
    config = dataclasses.replace(MODEL.wan, dtype="bfloat16", remat="full", num_layers=args.layers)
    rows = [forward(config, args.repeats), *grpo_iteration(config)]
    card = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.layers} layers"
    write_section(args.out, "wan14b.py", card, rows)


def forward(config, repeats) -> dict:
    """One forward pass without guidance at 480x832x81."""
    params = random_params(config, seed=0)
    grid = (21, 30, 52)
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (1, 21, 60, 104, 16), jnp.float32)
    ctx = jax.random.normal(keys[1], (1, 512, 4096), jnp.float32)
    run = jax.jit(functools.partial(wan.denoise, config=config))
    start = time.perf_counter()
    run(params, None, x, jnp.full((1,), 900.0), ctx).block_until_ready()
    compile_s = time.perf_counter() - start
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        v = run(params, None, x, jnp.full((1,), 900.0 - i), ctx)
        float(v[0, 0, 0, 0, 0])
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(np.asarray(v)).all()
    median = statistics.median(seconds)
    tflops = wan.forward_flops(config, grid) / median / 1e12
    row = {
        "figure": "DiT forward, 14B, 480x832x81, bf16",
        "seconds": round(median, 3),
        "TFLOP/s": round(tflops),
        "peak GiB": peak_gib(),
        "first call s": round(compile_s, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def grpo_iteration(config) -> list[dict]:
    """Rollout, decode and update at the size of the miles recipe, both experts resident."""
    model = dataclasses.replace(MODEL, wan=config)
    plan = schedule.make_schedule("simple", 10, 12.0, model.boundary)
    setup = states.Setup(
        model=model,
        sampling=states.SamplingConfig(
            schedule=plan,
            guidance=model.sampling.guidance,
            height=480,
            width=480,
            frames=5,
            batch=4,
        ),
        sde=states.SdeConfig(schedule.Strategy("dual_window", window=1), "flow", 0.7),
        lora=states.LoraConfig(rank=64, alpha=128.0),
        experts=("high", "low"),
        optim={e: OptimConfig() for e in ("high", "low")},
        seed=0,
        algorithm=grpo.Config(
            group_size=16,
            prompts_per_step=1,
            micro_samples=2,
            clip={"high": 1e-4, "low": 1e-3},
            kl_beta={"high": 0.0, "low": 0.0},
        ),
        rewards={"mean": 1.0},
    )
    grpo.check(setup)
    params = {e: random_params(config, seed=i) for i, e in enumerate(setup.experts)}
    decoder = jax.jit(
        lambda k: jax.tree.map(lambda x: x.astype(jnp.bfloat16), vae.init(k, model.vae))
    )
    vae_params = decoder(jax.random.key(5))
    state = grpo.init(jax.random.key(2), setup, {"student": params})
    keys = jax.random.split(jax.random.key(3), 2)
    ctx = jax.random.normal(keys[0], (1, 512, 4096), jnp.float32)
    uncond = jax.random.normal(keys[1], (1, 512, 4096), jnp.float32)
    brightness = lambda video, prompts: ({"mean": video.mean((1, 2, 3, 4), dtype=np.float64)}, {})
    forward_flop = wan.forward_flops(config, (2, 30, 30))
    times = {"rollout and decode": [], "update": []}
    for i in range(3):
        start = time.perf_counter()
        batch = grpo.collect(
            state, setup, states.Item(["p"], ctx), states.Tools(vae_params, uncond, brightness)
        )
        jax.block_until_ready(batch.trajectory)
        middle = time.perf_counter()
        state, metrics = grpo.update(state, setup, batch)
        ratio = max(
            abs(float(metrics[f"grpo/ratio_{m}/{e}"]) - 1)
            for m in ("min", "max")
            for e in state.opt
        )
        gap = {e: float(metrics[f"grpo/logp_gap/{e}"]) for e in state.opt}
        end = time.perf_counter()
        line = {"iteration": i, "collect s": round(middle - start, 2)}
        line |= {"update s": round(end - middle, 2), "max |ratio-1|": ratio, "logp gap": gap}
        print(json.dumps(line | {"peak GiB": peak_gib()}), flush=True)
        if i:
            times["rollout and decode"].append(middle - start)
            times["update"].append(end - middle)
    passes = {"rollout and decode": 16 * 10 * 2, "update": 16 * 2 * 2 * 3}  # forward equivalents
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows.append({
            "figure": f"GRPO A14B 480x480x5, K=16, 10 steps with guidance, r64: {name}",
            "seconds": round(median, 2),
            "TFLOP/s": round(passes[name] * forward_flop / median / 1e12),
            "peak GiB": peak_gib(),
            "first call s": "",
        })  # fmt: skip
    return rows


def random_params(config, seed: int):
    """Normal bf16 matmul weights (float32 where the model stores it), leaf by leaf so that
    nothing is held twice."""
    shapes = jax.eval_shape(lambda: wan.store(wan.init(jax.random.key(0), config), jnp.bfloat16))
    leaves, treedef = jax.tree.flatten(shapes)
    draw = jax.jit(
        lambda key, shape, dtype: jax.random.normal(key, shape, dtype) * 0.02, static_argnums=(1, 2)
    )
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef, [draw(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )


def peak_gib() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return round(stats.get("peak_bytes_in_use", 0) / 2**30, 1)


if __name__ == "__main__":
    main()
