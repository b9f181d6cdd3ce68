"""Pre-train TinyWan2.2, the embedded two-expert text-to-video model, on a GPU or on CPU cores.

    python scripts/make_tinywan.py vae --out DIR        render clips, train the VAE
    python scripts/make_tinywan.py encode --out DIR     render clips, encode them for the experts
    python scripts/make_tinywan.py dit --out DIR        train text encoder and both experts
    python scripts/make_tinywan.py evaluate --out DIR   strict success by steps and guidance
    python scripts/make_tinywan.py all --out DIR        the four above, in order
    python scripts/make_tinywan.py export --out DIR --to wanjax/assets/tinywan22

Every command stops after --minutes with its state in DIR and resumes from there when run again.
Clips are rendered on the device and split across devices if there are several (two CPU devices,
JAX_NUM_CPU_DEVICES=2, use two cores better than one device does). The VAE learns reconstruction
with a small KL term:

    |x - d(z)| + (x - d(z))^2 + kl * KL(q(z|x) || N(0, 1)),   means over pixels and over latents.

Both experts learn rectified flow, x_t = (1 - s) x0 + s eps, v = eps - x0, in one step on the same
clips: loss = |v_high(x_t) - v|^2 at t >= 1000 * boundary + |v_low(x_t) - v|^2 below, with s =
shift(u) and u uniform inside each expert's range. One caption in ten is replaced by the empty one
for classifier-free guidance. Training ends when the averaged weights reach --target strict success
on held-out captions with two objects, so that post-training has something left to gain.

B clips  T frames  H W pixels or latents  C channels  S text tokens  E text width  M bank of clips
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
import tiny_tokenizer

from wanjax import sampler, schedule, trees
from wanjax.data import text
from wanjax.models import presets, umt5, vae, wan
from wanjax.parallel import sharding
from wanjax.rewards import shapes

Z = 16
VAE = vae.VAEConfig(
    base_dim=16,
    z_dim=Z,
    dim_mult=(1, 2, 3),
    num_res_blocks=1,
    temperal_downsample=(True, True),
    latents_mean=(0.0,) * Z,  # replaced by the statistics of the trained encoder
    latents_std=(1.0,) * Z,
    in_channels=12,
    out_channels=12,
    patch_size=2,
)
TEXT = umt5.UMT5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
WAN = wan.WanConfig(
    num_attention_heads=4, attention_head_dim=32, num_layers=4, ffn_dim=384, text_dim=64
)
FAST = (  # on CPUs recomputing blocks is faster than storing them
    dict(dtype="float32", remat="full")
    if jax.default_backend() == "cpu"
    else dict(dtype="bfloat16", remat="none")
)
TRAIN = dataclasses.replace(WAN, attention="xla", **FAST)
SHIFT, BOUNDARY, GUIDANCE, STEPS = 5.0, 0.875, 2.0, 10
LATENT = (1 + (shapes.FRAMES - 1) // 4, shapes.SIZE // 8, shapes.SIZE // 8, Z)
CHUNK = LATENT[0] - 1  # all latent frames after the first, at once
TOKENS = 17  # longest caption plus end token; rows up to 512 are zero and accounted for exactly
UNFINISHED = """
**Unfinished.** Pre-training was stopped before it reached its target success. The files are
complete and load everywhere, but samples barely match their captions.
"""
CATEGORIES = [(split, count) for split in ("train", "heldout") for count in (1, 2)]


def main():
    args = _arguments()
    jax.config.update(
        "jax_cpu_enable_async_dispatch", False
    )  # see wanjax.parallel.distributed.start
    args.deadline = time.time() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{args.command} on {jax.devices()[0].device_kind}, state in {args.out}", flush=True)
    stages = {"vae": train_vae, "encode": encode_bank, "dit": train_dit, "evaluate": evaluate}
    chosen = {"all": list(stages.values()), "export": [export]}
    for stage in chosen.get(args.command) or [stages[args.command]]:
        with sharding.use_mesh(sharding.make_mesh({"data": -1})):
            done = stage(args)
        if not done:
            print(f"{stage.__name__}: out of time, run the same command again", flush=True)
            break


# ---- VAE ----


def train_vae(args):
    """Train the VAE and measure its latents; returns False when out of time."""
    state, done = _load(args.out, "vae", "vae_mu", "vae_nu"), _info(args.out, "vae")
    step = done.get("step", 0)
    if step >= args.vae_steps:
        return True
    table = caption_table()[0]
    if args.vae:
        from convert import weights

        params = weights.load(args.vae)[0]["vae"]
        _save(args.out, vae=params)
        info = {"step": args.vae_steps, "trained": args.vae_trained}
        _save_info(args.out, "vae", info | _vae_report(params, table, args))
        return True
    params = state[0] if step else _vae_init()
    rate = optax.warmup_cosine_decay_schedule(
        0, args.vae_rate, args.vae_steps // 20, args.vae_steps, 1e-5
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=1e-3))
    opt = _with_moments(tx.init(params), state[1:], step) if step else tx.init(params)

    def loss_fn(params, key):
        k_pick, k_draw, k_noise = jax.random.split(key, 3)
        x = draw(k_draw, table, pick(k_pick, table, args.vae_batch))
        mean, logvar = vae.posterior(params, x, config=VAE, step=CHUNK)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(k_noise, mean.shape)
        error = vae.decode(params, z, config=VAE, step=CHUNK) - x
        kl = 0.5 * (mean**2 + jnp.exp(logvar) - 1 - logvar).mean()
        mse = (error**2).mean()
        return jnp.abs(error).mean() + mse + args.kl * kl, {"mse": mse, "kl": kl}

    @functools.partial(jax.jit, donate_argnames=("params", "opt"))
    def update(params, opt, step):
        grads, aux = jax.grad(loss_fn, has_aux=True)(params, jax.random.fold_in(SEED(1), step))
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, aux

    start = time.time()
    while step < args.vae_steps and time.time() < args.deadline:
        for _ in range(min(100, args.vae_steps - step)):
            params, opt, aux = update(params, opt, step)
            step += 1
        aux = {k: round(float(v), 6) for k, v in aux.items()}  # also waits for the device
        if step % 500 == 0 or step == args.vae_steps:
            print(f"vae {step} {aux} {time.time() - start:.0f} s", flush=True)
    mu, nu = _moments(opt)
    _save(args.out, vae=params, vae_mu=mu, vae_nu=nu)
    seconds = done.get("seconds", 0) + time.time() - start
    info = {"step": step, "seconds": seconds, "trained": f"{seconds:.0f} s on {_machine()}"}
    if step == args.vae_steps:
        info |= _vae_report(params, table, args)
    _save_info(args.out, "vae", info)
    return step == args.vae_steps


def _vae_init():
    """Random parameters that train from the first step.

    Output starts near grey, since decode()'s clamp has no gradient outside [-1, 1]; and grey input
    must not map to a zero vector, where the gradient of the channel norm is 1e12.
    """
    params = vae.init(jax.random.key(0), VAE)
    params["decoder"]["conv_out"]["kernel"] *= 0.1
    bias = params["encoder"]["conv_in"]["bias"]
    params["encoder"]["conv_in"]["bias"] = 0.5 * jax.random.normal(SEED(0), bias.shape)
    return params


def _vae_report(params, table, args):
    """Latent mean and std per channel; PSNR in dB and strict success of reconstructions."""
    encode = jax.jit(functools.partial(vae.encode, config=VAE, step=CHUNK))
    decode = jax.jit(functools.partial(vae.decode, config=VAE, step=CHUNK))
    draw_rows, render = jax.jit(draw), jax.jit(shapes.render)
    z = []
    for i in range(16):
        rows = pick(jax.random.fold_in(SEED(2), i), table, args.vae_batch)
        z.append(np.asarray(encode(params, draw_rows(SEED(i), table, rows))))
    z = np.concatenate(z).reshape(-1, Z).astype(np.float64)
    info = {"mean": z.mean(0).tolist(), "std": z.std(0).tolist()}
    for split, count in CATEGORIES:
        captions = captions_of(split, count, args.prompts, seed=1)
        x = render(SEED(3), shapes.pack([shapes.parse(c) for c in captions])) * 2 - 1
        y = decode(params, encode(params, x))
        mse = np.asarray(((x - y) ** 2).mean((1, 2, 3, 4)) / 4)
        info[f"psnr_{split}_{count}"] = float((-10 * np.log10(mse)).mean())
        info[f"strict_{split}_{count}"] = success(np.asarray(y), captions)
    print("vae report", {k: v for k, v in info.items() if k not in ("mean", "std")}, flush=True)
    return info


def vae_config(info):
    """The VAE's config with the measured statistics, rounded as stored."""
    mean, std = (tuple(round(v, 4) for v in info[k]) for k in ("mean", "std"))
    return dataclasses.replace(VAE, latents_mean=mean, latents_std=std)


# ---- text encoder and experts ----


def encode_bank(args):
    """Render and encode the clips the experts learn from; False when out of time."""
    if (args.out / "bank.safetensors").is_file():
        return True
    config, vae_params = vae_config(_info(args.out, "vae")), _load(args.out, "vae")[0]
    table, size = caption_table()[0], min(128, args.bank)

    @jax.jit
    def chunk(vae_params, number):
        k_pick, k_draw = jax.random.split(jax.random.fold_in(SEED(12), number))
        rows = pick(k_pick, table, size, args.ones)
        z = vae.encode(vae_params, draw(k_draw, table, rows), config=config, step=CHUNK)
        return z.astype(jnp.float16), rows

    parts = []
    for number in range(math.ceil(args.bank / size)):
        if time.time() > args.deadline:
            return False
        parts.append(jax.tree.map(np.asarray, chunk(vae_params, number)))
    latents, rows = (np.concatenate(part) for part in zip(*parts, strict=True))
    _save(args.out, bank={"latents": latents, "rows": rows})
    return True


def train_dit(args):
    """Train text encoder and experts, round by round; False when out of time.

    Until --image_steps, clips are reduced to their first frames, which teach words, shapes and
    positions at a fraction of the cost. Until --shared_steps, one network learns all times; two
    copies of it then become the experts. The rate is constant between warm-up and the last
    --decay_steps.
    """
    done = _info(args.out, "dit")
    if done.get("finished") or done.get("step", 0) >= args.dit_steps:
        _save_info(args.out, "dit", done | {"finished": True})
        return True
    if not (args.out / "bank.safetensors").is_file():
        raise SystemExit(f"{args.out} has no bank.safetensors; run the command encode first")
    config, vae_params, bank = vae_config(_info(args.out, "vae")), *_load(args.out, "vae", "bank")
    step, history = done.get("step", 0), done.get("history", [])
    if step:
        params, ema, *moments = _load(args.out, "params", "ema", "mu", "nu")
    else:
        params = {"high": _expert_init(SEED(10)), "text": umt5.init(SEED(13), text_config())}
        ema = jax.tree.map(jnp.copy, params)
    flat = args.dit_steps - args.decay_steps
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0, args.rate, 500),
            optax.linear_schedule(args.rate, 0.02 * args.rate, args.decay_steps),
        ],
        [flat],
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.01))
    opt = _with_moments(tx.init(params), moments, step) if step else tx.init(params)
    grad = jax.grad(_dit_loss, has_aux=True)

    @functools.partial(
        jax.jit, static_argnames=("images",), donate_argnames=("params", "ema", "opt")
    )
    def update(params, ema, opt, bank, step, images):
        batch = args.image_batch if images else args.batch
        picked, key = _pick_batch(bank, jax.random.fold_in(SEED(11), step), batch, images)
        grads, losses = grad(params, *picked, key)
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        weight = jnp.maximum(args.ema, 1 / (1 + step.astype(jnp.float32)))
        return params, trees.lerp(ema, params, weight), opt, losses

    start, spent, finished = time.time(), done.get("seconds", 0), False
    run = _sampler(config, STEPS, args.prompts)
    while not finished and time.time() < args.deadline:
        if "low" not in params and step >= args.shared_steps:
            params, ema, mu, nu = (_fork(tree) for tree in (params, ema, *_moments(opt)))
            opt = _with_moments(tx.init(params), (mu, nu), step)
        sums = []
        for _ in range(args.round_steps):
            images = step < args.image_steps
            params, ema, opt, losses = update(params, ema, opt, bank, jnp.int32(step), images)
            sums.append(losses)
            step += 1
        record = {k: round(float(np.mean([s[k] for s in sums])), 4) for k in losses}
        for split, count in CATEGORIES if step > args.image_steps else ():
            captions = captions_of(split, count, args.prompts, seed=20)
            frames = run(ema, vae_params, captions, GUIDANCE)
            record[f"{split}_{count}"] = success(frames, captions)
        record |= {"step": step, "seconds": round(spent + time.time() - start, 1)}
        history.append(record)
        print(f"dit {record}", flush=True)
        finished = "low" in params and (
            record.get("heldout_2", 0) >= args.target or step >= args.dit_steps
        )
        mu, nu = _moments(opt)
        _save(args.out, params=params, ema=ema, mu=mu, nu=nu)
        seconds = spent + time.time() - start
        info = {"step": step, "history": history, "finished": finished, "seconds": seconds}
        info |= {"trained": f"{seconds:.0f} s on {_machine()}"}
        _save_info(args.out, "dit", info)
    return finished


def _expert_init(key):
    """Random parameters with open gates and zero output; they learn faster than wan.init's."""
    params = wan.init(key, WAN)
    table = params["blocks"]["scale_shift_table"]
    params["blocks"]["scale_shift_table"] = (0.1 * table).at[:, :, 2::3].set(1.0)
    params["condition_embedder.time_proj"]["kernel"] *= 0.3
    params["proj_out"]["kernel"] *= 0
    return params


def _fork(tree):
    """Give expert low a copy of expert high."""
    return tree | {"low": jax.tree.map(jnp.copy, tree["high"])}


def _pick_batch(bank, key, batch, images):
    """(latents, rows) of clips from the bank, or of their first frames, and a key for the loss."""
    k_pick, key = jax.random.split(key)
    chosen = jax.random.randint(k_pick, (batch,), 0, len(bank["rows"]))
    latents = bank["latents"][:, :1] if images else bank["latents"]
    latents = _split(latents[chosen].astype(jnp.float32))
    return (latents, bank["rows"][chosen]), key


def _dit_loss(params, x0, rows, key):
    """Sum of the experts' flow losses on one batch, and the individual losses."""
    _, ids_MS, mask_MS = caption_table()
    k_drop, k_low, k_high = jax.random.split(key, 3)
    rows = jnp.where(jax.random.uniform(k_drop, rows.shape) < 0.1, len(ids_MS) - 1, rows)
    ids_BS, mask_BS = jnp.asarray(ids_MS)[rows], jnp.asarray(mask_MS)[rows]
    ctx = umt5.encode(params["text"], ids_BS, mask_BS, config=text_config())
    edge = schedule.unshift_map(BOUNDARY, SHIFT)
    ranges = {"high": (k_high, edge, 1.0), "low": (k_low, 0.0, edge)}
    if "low" not in params:
        ranges = {"high": (k_high, 0.0, 1.0)}
    losses = {}
    for expert, (k_expert, low, high) in ranges.items():
        k_time, k_noise = jax.random.split(k_expert)
        u_B = jax.random.uniform(k_time, rows.shape, minval=low, maxval=high)
        s_B = schedule.shift_map(u_B, SHIFT)
        s_B1111 = s_B[:, None, None, None, None]
        eps = _split(jax.random.normal(k_noise, x0.shape))
        x_t = (1 - s_B1111) * x0 + s_B1111 * eps
        v = wan.denoise(params[expert], None, x_t, 1000 * s_B, ctx, config=TRAIN)
        losses[expert] = ((v - (eps - x0)) ** 2).mean()
    return sum(losses.values()), losses


# ---- evaluation ----


def evaluate(args):
    """Write strict success by steps and guidance, and sample clips, to DIR."""
    config, vae_params = vae_config(_info(args.out, "vae")), _load(args.out, "vae")[0]
    ema = _load(args.out, "ema")[0]
    rows = _info(args.out, "evaluate").get("rows", [])
    captions = {c: captions_of(*c, args.prompts, seed=30) for c in CATEGORIES}
    for steps in args.steps:
        run = _sampler(config, steps, args.prompts)
        for guidance in args.guidances:
            if any((r["steps"], r["guidance"]) == (steps, guidance) for r in rows):
                continue
            if time.time() > args.deadline:
                return False
            row = {"steps": steps, "guidance": guidance}
            for split, count in CATEGORIES:
                texts = captions[split, count]
                frames = run(ema, vae_params, texts, guidance)
                row[f"{split}_{count}"] = success(frames, texts)
            rows.append(row)
            print(f"evaluate {row}", flush=True)
            _save_info(args.out, "evaluate", {"prompts": args.prompts, "rows": rows})
    texts = [c for key in CATEGORIES for c in captions[key][:4]]
    frames = _sampler(config, STEPS, len(texts))(ema, vae_params, texts, GUIDANCE)
    np.savez_compressed(args.out / "samples.npz", frames=_bytes(frames), captions=texts)
    return True


def _sampler(config, steps, size):
    """Function (params, vae params, captions, guidance) -> frames [B,T,H,W,3] in [-1, 1].

    Takes up to `size` captions and always runs `size` of them, so that it compiles once.
    """
    plan = schedule.make_schedule("unipc", steps, SHIFT, BOUNDARY)

    @jax.jit
    def run(params, vae_params, ids_BS, mask_BS, guidance):
        ctx = umt5.encode(params["text"], ids_BS, mask_BS, config=text_config())

        def velocity(expert):
            def guided(x, t_B):
                pair, t = jnp.concatenate([x, x]), jnp.concatenate([t_B, t_B])
                v = wan.denoise(params.get(expert, params["high"]), None, pair, t, ctx, config=WAN)
                cond, uncond = jnp.split(v, 2)
                return uncond + guidance * (cond - uncond)

            return guided

        x = _split(sampler.initial_noise(SEED(40), jnp.arange(len(ids_BS) // 2), LATENT))
        experts = {name: velocity(name) for name in ("high", "low")}
        z = sampler.sample(experts, x, plan, solver="unipc")
        return vae.decode(vae_params, z, config=config, step=CHUNK)

    def sample(params, vae_params, captions, guidance):
        ids, mask = tokens([*np.resize(captions, size).tolist(), *[""] * size])
        frames = run(params, vae_params, ids, mask, jnp.float32(guidance))
        return np.asarray(frames)[: len(captions)]

    return sample


def success(frames, captions):
    """Fraction of strict successes for frames in [-1, 1]; chunks are scored in threads."""
    chunks = [slice(i, i + 16) for i in range(0, len(captions), 16)]
    score = lambda part: shapes.reward(_bytes(frames[part]), captions[part])[1]["strict"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return float(np.concatenate(list(pool.map(score, chunks))).mean())


def _bytes(frames):
    return np.round((np.asarray(frames) + 1) * 127.5).astype(np.uint8)


# ---- captions and clips ----


@functools.cache
def caption_table():
    """(packed specs, ids_MS, mask_MS) of all training captions; the last row of ids is empty."""
    specs = [spec for count in (1, 2) for spec in shapes.specs("train", count)]
    ids, mask = tokens([shapes.caption(spec) for spec in specs] + [""])
    return shapes.pack(specs), ids, mask


@functools.cache
def _tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        size = tiny_tokenizer.build_tiny_tokenizer(shapes.words(), folder)
        return text.load_tokenizer(folder), size


def tokens(captions):
    """Token ids and mask [B,S] of captions."""
    return text.tokenize(_tokenizer()[0], captions, TOKENS)


def text_config():
    """The text encoder's config with the tokenizer's vocabulary size."""
    return dataclasses.replace(TEXT, vocab_size=_tokenizer()[1])


def captions_of(split, count, most, seed):
    """A seeded draw of `most` captions, or all if there are fewer (60 held-out with one object)."""
    return shapes.prompts(split, count, min(most, len(shapes.specs(split, count))), seed)


def pick(key, table, number, share=0.3):
    """Rows of training captions; `share` of them have one object."""
    ones = len(shapes.specs("train", 1))
    k_count, k_one, k_two = jax.random.split(key, 3)
    one = jax.random.randint(k_one, (number,), 0, ones)
    two = jax.random.randint(k_two, (number,), ones, len(table["count_B"]))
    return jnp.where(jax.random.uniform(k_count, (number,)) < share, one, two)


def draw(key, table, rows):
    """Clips [B,T,H,W,3] in [-1, 1] of table rows."""
    packed = {name: jnp.asarray(values)[rows] for name, values in table.items()}
    return _split(shapes.render(key, packed) * 2 - 1)


def _split(x_BTHWC):
    return sharding.constrain(x_BTHWC, "batch", None, None, None, None)


# ---- export ----


def export(args):
    """Write the diffusers folder and its model card; returns True."""
    from convert import save  # only this command needs them
    from wanjax.data import video

    infos = {name: _info(args.out, name) for name in ("vae", "dit", "evaluate")}
    ema, vae_params = _load(args.out, "ema", "vae")
    params = {"high": ema["high"], "low": ema["low"], "text_encoder": ema["text"]}
    sampling = presets.Sampling(
        shift=SHIFT,
        guidance=presets.Guidance(high=args.guidance, low=args.guidance),
        steps=STEPS,
        frames=shapes.FRAMES,
        height=shapes.SIZE,
        width=shapes.SIZE,
        fps=8,
        negative_prompt="",
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer.build_tiny_tokenizer(shapes.words(), folder)
        config = presets.ModelConfig(
            name="tinywan22",
            wan=WAN,
            sampling=sampling,
            vae=vae_config(infos["vae"]),
            text=text_config(),
            experts=("high", "low"),
            boundary=BOUNDARY,
            tokenizer=folder,
        )
        save.save_diffusers(params | {"vae": vae_params}, config, args.to)
    samples = np.load(args.out / "samples.npz")
    video.frame_grid(args.to / "samples.png", list(samples["frames"]))
    counts = {name: trees.count(tree) for name, tree in (params | {"vae": vae_params}).items()}
    (args.to / "README.md").write_text(_card(args, infos, counts, list(samples["captions"])))
    print((args.to / "README.md").read_text())
    return True


def _card(args, infos, counts, captions):
    """The model card as Markdown."""
    rows = [(p.relative_to(args.to), p.stat().st_size) for p in sorted(args.to.rglob("*.*"))]
    files = "\n".join(f"| {name} | {size / 1e6:.2f} MB |" for name, size in rows)
    sizes = "\n".join(f"| {name} | {count:,} |" for name, count in counts.items())
    table = "\n".join(
        f"| {r['steps']} | {r['guidance']:g} | "
        + " | ".join(f"{100 * r[f'{split}_{count}']:.1f}" for split, count in CATEGORIES)
        + " |"
        for r in sorted(infos["evaluate"]["rows"], key=lambda r: (r["steps"], r["guidance"]))
    )
    quality = "\n".join(
        f"| {split}, {count} | {infos['vae'][f'psnr_{split}_{count}']:.1f} dB | "
        f"{100 * infos['vae'][f'strict_{split}_{count}']:.1f} % |"
        for split, count in CATEGORIES
    )
    status = "" if infos["dit"]["finished"] else UNFINISHED
    shown = "\n".join(f"{i + 1}. {c}" for i, c in enumerate(captions))
    dit = infos["dit"]
    loss = ", ".join(f"{dit['history'][-1][e]:g} ({e})" for e in ("high", "low"))
    return f"""# TinyWan2.2
{status}
A two-expert text-to-video model with Wan2.2's architecture and file layout, trained from scratch
on procedurally rendered clips: 17 frames of 64x64 pixels, one or two coloured shapes moving over a
plain background. It exists for tests, the quickstart and learning benchmarks. License: Apache-2.0.

Captions: "a COLOUR SHAPE moving DIRECTION [and a COLOUR SHAPE moving DIRECTION] on a BACKGROUND
background".

- colours: {", ".join(shapes.COLOURS)}
- shapes: {", ".join(shapes.SHAPES)}
- directions: {", ".join(shapes.DIRECTIONS)}
- backgrounds: {", ".join(shapes.BACKGROUNDS)}
- never rendered in training ("held out"): {", ".join(map(" ".join, sorted(shapes.HELD_OUT)))}

Sampling: UniPC (or any flow solver), shift {SHIFT:g}, {STEPS} steps, boundary {BOUNDARY:g},
guidance {args.guidance:g} for both experts, negative prompt "" (the null condition).

## Strict success (%)

{infos["evaluate"]["prompts"]} captions per cell (60 for held out, 1), fixed noise, UniPC. Success:
every object has the right colour, shape and direction, the background is right, and nothing else
appears.

| steps | guidance | train, 1 object | train, 2 objects | held out, 1 | held out, 2 |
|---|---|---|---|---|---|
{table}

## VAE reconstruction

| captions | PSNR | strict success |
|---|---|---|
{quality}

## Samples

First to last frame of 17, {STEPS} steps, guidance {GUIDANCE:g}: `samples.png`

{shown}

## Size

| part | parameters |
|---|---|
{sizes}

| file | size |
|---|---|
{files}

## How it was made

VAE {infos["vae"]["step"]} steps in {infos["vae"]["trained"]}; text encoder and experts
{dit["step"]} steps in {dit["trained"]}, to a flow loss of {loss}:

```
{args.recipe}
```
"""


# ---- state on disk ----


def SEED(number):
    """The random key for one purpose."""
    return jax.random.fold_in(jax.random.key(2022), number)


def _save(folder, **named):
    for name, tree in named.items():
        flat = {k: np.asarray(v) for k, v in trees.flatten(tree).items()}
        safetensors.numpy.save_file(flat, folder / f"{name}.safetensors")


def _load(folder, *names):
    paths = [folder / f"{name}.safetensors" for name in names]
    if not all(path.is_file() for path in paths):
        return [{}] * len(names)
    flats = [safetensors.numpy.load_file(path) for path in paths]
    return [trees.unflatten({k: jnp.asarray(v) for k, v in flat.items()}) for flat in flats]


def _info(folder, name):
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _save_info(folder, name, info):
    (folder / f"{name}.json").write_text(json.dumps(info, indent=1) + "\n")


def _machine():
    """The devices, as text."""
    devices = jax.devices()
    if devices[0].platform == "cpu":
        return f"{os.cpu_count()} CPU cores"
    return f"{len(devices)} x {devices[0].device_kind}"


def _moments(opt):
    """Adam's moments inside the optimizer state."""
    adam = opt[1][0]
    return adam.mu, adam.nu


def _with_moments(opt, moments, step):
    """The optimizer state after `step` steps."""
    mu, nu = moments  # a separate buffer per counter, since the state is donated
    inner = [s._replace(count=jnp.array(step)) if "count" in s._fields else s for s in opt[1]]
    return (opt[0], (inner[0]._replace(mu=mu, nu=nu), *inner[1:]))


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["vae", "encode", "dit", "evaluate", "all", "export"])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="state folder")
    parser.add_argument("--to", type=pathlib.Path, help="model folder to write (export)")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop and save after this long")
    parser.add_argument("--vae", type=pathlib.Path, help="use this model folder's VAE")
    parser.add_argument(
        "--vae_trained", default="282 s on one NVIDIA H100", help="how it was trained, for the card"
    )
    parser.add_argument("--vae_steps", type=int, default=5000)
    parser.add_argument("--vae_batch", type=int, default=64)
    parser.add_argument("--vae_rate", type=float, default=2e-3)
    parser.add_argument("--kl", type=float, default=3e-4)
    parser.add_argument("--bank", type=int, default=131072, help="clips the experts learn from")
    parser.add_argument("--ones", type=float, default=0.3, help="fraction of them with one object")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dit_steps", type=int, default=16000)
    parser.add_argument(
        "--shared_steps", type=int, default=4000, help="steps before the experts split"
    )
    parser.add_argument("--image_steps", type=int, default=4000, help="steps on single frames")
    parser.add_argument("--image_batch", type=int, default=512)
    parser.add_argument(
        "--decay_steps", type=int, default=4000, help="final steps, decaying to 2 %%"
    )
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--ema", type=float, default=1e-3, help="minimum weight of a step in the EMA"
    )
    parser.add_argument("--round_steps", type=int, default=1000, help="steps between evaluations")
    parser.add_argument("--target", type=float, default=0.6, help="held-out success that ends dit")
    parser.add_argument("--prompts", type=int, default=128, help="captions per evaluation")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--guidances", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--guidance", type=float, default=GUIDANCE, help="guidance of the preset")
    parser.add_argument("--recipe", default="python scripts/make_tinywan.py all --out DIR")
    return parser.parse_args()


if __name__ == "__main__":
    main()
