"""The same figures as ours.py in diffusers, PEFT and torch.compile; one JSON line per figure.

    python scripts/bench/peer.py forward lora_step grpo nft dmd2 checkpoint vae_decode umt5 …

Needs torch with CUDA, diffusers, peft and transformers. Random bf16 weights. The transformer's
blocks are compiled (compile_repeated_blocks) with cuDNN attention unless --attention names another
diffusers backend; training uses gradient checkpointing.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from report_table import timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRPO = dict(steps=10, samples=16, rank=64, shift=12.0, boundary=0.875)
NFT = dict(steps=12, samples=16, rank=64, shift=12.0, boundary=0.875, timesteps=2)
DMD2 = dict(sigmas=(1.0, 0.75, 0.5, 0.25), rank=64, shift=5.0, boundary=0.875)
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=40, help="use fewer to try the script")
    parser.add_argument("--size", default="480x832x81", help="height x width x frames")
    parser.add_argument("--attention", default="_native_cudnn", help="diffusers backend")
    parser.add_argument("--text_rows", type=int, default=512, help="per prompt, zero-padded to 512")
    parser.add_argument("--folder", help="where to write checkpoints")
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.figures:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = {"figure": name, **FIGURES[name](args), "layers": args.layers}
        peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
        import diffusers

        stack = f"torch {torch.__version__}, diffusers {diffusers.__version__}, {args.attention}"
        print(json.dumps({**row, "peak_gib": round(peak, 1), "stack": stack}), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def forward(args) -> dict:
    model, (x, ctx) = transformer(args), inputs(args)
    model.requires_grad_(False)

    @torch.no_grad()
    def call(i):
        t = torch.full((1,), 900.0 - i, device=DEVICE)
        return float(model(x, t, ctx, return_dict=False)[0].flatten()[0])

    return timed(call, args.repeats)


def lora_step(args) -> dict:
    model, (x0, ctx) = transformer(args, rank=32, checkpointing=True), inputs(args)
    parameters = adapter(model)
    optimizer = torch.optim.AdamW(parameters, 1e-4)

    def call(i):
        t = torch.full((1,), 900.0 - i, device=DEVICE)
        noise = torch.randn_like(x0, dtype=torch.float32)
        sigma = t[0] / 1000
        x_t = ((1 - sigma) * x0.float() + sigma * noise).to(x0.dtype)
        v = model(x_t, t, ctx, return_dict=False)[0]
        loss = F.mse_loss(v.float(), noise - x0.float())
        loss.backward()
        optimize(parameters, optimizer)
        return float(loss.detach())

    return timed(call, args.repeats)


def grpo_iteration(args) -> dict:
    """K samples of one prompt from both experts, with guidance and one SDE step each, decoded; then
    one policy-gradient step per expert over micro-batches of 2 samples."""
    experts = [transformer(args, rank=GRPO["rank"], checkpointing=True) for _ in range(2)]
    parameters = [adapter(m) for m in experts]
    optimizers = [torch.optim.AdamW(p, 1e-4) for p in parameters]
    decoder = vae()
    ctx, uncond = text(args), text(args)
    steps, shift, K = GRPO["steps"], GRPO["shift"], GRPO["samples"]
    sigmas = shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()
    owner = [0 if s >= GRPO["boundary"] else 1 for s in sigmas[:-1]]
    stored = {owner.index(1) - 2, owner.index(1)}  # one step per expert
    guidance = [(uncond, 4.0), (uncond, 3.0)]

    def transition(x, v, s, n):  # Flow-GRPO's kernel, eta 0.7
        g = 0.7 * (s / (1 - min(s, sigmas[1]))) ** 0.5
        mean = x * (1 - g * g / (2 * s) * (s - n)) - v * (1 + g * g / (2 * s) * (1 - s)) * (s - n)
        return mean, g * (s - n) ** 0.5

    def log_prob(x_next, mean, std):
        return -(((x_next - mean) ** 2).mean((1, 2, 3, 4)) / (2 * std**2))

    @torch.no_grad()
    def collect(_):
        kept, scores = [], []
        for _ in range(0, K, 4):
            x = torch.randn(4, 16, 2, 60, 60, device=DEVICE)
            for i in range(steps):
                s, n = sigmas[i], sigmas[i + 1]
                v = velocity(experts[owner[i]], x, 1000 * s, ctx, guidance[owner[i]])
                if i in stored:
                    mean, std = transition(x, v, s, n)
                    x_next = mean + std * torch.randn_like(x)
                    kept.append((owner[i], s, n, x, x_next, log_prob(x_next, mean, std)))
                    x = x_next
                else:
                    x = x - (s - n) * v
            scores.append(brightness(decoder, x))
        return kept, advantages(scores)

    def update(_, kept, adv):
        seen = [0, 0]
        for e, s, n, x, x_next, old in kept:
            first = seen[e]
            seen[e] += len(x)
            for j in range(0, len(x), 2):
                v = velocity(experts[e], x[j : j + 2], 1000 * s, ctx, guidance[e])
                mean, std = transition(x[j : j + 2], v, s, n)
                ratio = (log_prob(x_next[j : j + 2], mean, std) - old[j : j + 2]).exp()
                a = adv[first + j : first + j + 2]
                loss = -torch.minimum(ratio * a, ratio.clamp(1 - 1e-4, 1 + 1e-4) * a).mean()
                (loss * 2 / K).backward()
        for group, optimizer in zip(parameters, optimizers, strict=True):
            optimize(group, optimizer)

    return iteration(args, collect, update)


def nft_iteration(args) -> dict:
    """K samples of one prompt from the old policy, without guidance, decoded; then one NFT step per
    expert over micro-batches of 2 samples at one of their T levels.

    Forward passes per sample, a backward pass counting as two: collect K·12 = 192, update 2 experts
    · K·T · (3 trained + 1 old + 1 base) = 320.
    """
    from diffusers import UniPCMultistepScheduler

    steps, K, T = NFT["steps"], NFT["samples"], NFT["timesteps"]
    experts = [transformer(args, NFT["rank"], True, ("default", "old")) for _ in range(2)]
    trained, old = ([adapter(m, name) for m in experts] for name in ("default", "old"))
    ema = [[p.detach().clone() for p in group] for group in trained]
    for e in range(2):
        follow(old[e], trained[e], 0.0)
    optimizers = [torch.optim.AdamW(p, 1e-4, weight_decay=0.0) for p in trained]
    decoder, ctx = vae(), text(args)
    solver = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=NFT["shift"]
    )
    solver.set_timesteps(steps)
    split = int((solver.timesteps >= 1000 * NFT["boundary"]).sum())

    @torch.no_grad()
    def collect(_):
        for model in experts:
            use(model, "old")
        latents = []
        for _ in range(0, K, 4):
            x = torch.randn(4, 16, 2, 60, 60, device=DEVICE)
            solver.set_timesteps(steps)
            for i, t in enumerate(solver.timesteps.tolist()):
                v = velocity(experts[i >= split], x, t, ctx)
                x = solver.step(v, t, x, return_dict=False)[0]
            latents.append(x)
        return torch.cat(latents), advantages([brightness(decoder, x) for x in latents])

    def micro_batches(x0, adv, first, stop):  # a level in each of T parts of the expert's steps
        u_KT = (torch.arange(T) + torch.rand(K, T)) / T
        step_KT = (first + (u_KT * (stop - first)).long()).clamp(max=stop - 1)
        sigma_KT, t_KT = (a[step_KT].to(DEVICE) for a in (solver.sigmas, solver.timesteps))
        for j, k in itertools.product(range(0, K, 2), range(T)):
            x, s = x0[j : j + 2], sigma_KT[j : j + 2, k].reshape(-1, 1, 1, 1, 1)
            yield x, (1 - s) * x + s * torch.randn_like(x), s, t_KT[j : j + 2, k], adv[j : j + 2]

    def update(step, x0, adv):
        for e, model in enumerate(experts):
            micro = list(micro_batches(x0, adv, *((0, split), (split, steps))[e]))
            fixed = []  # for all micro-batches before the trained policy, to switch adapters rarely
            for name in ("old", None):
                use(model, name)
                with torch.no_grad():
                    fixed.append([velocity(model, x_t, t, ctx) for _, x_t, _, t, _ in micro])
            use(model, "default")
            for (x, x_t, s, t, a), v_old, v_ref in zip(micro, *fixed, strict=True):
                loss = nft_loss(velocity(model, x_t, t, ctx), v_old, v_ref, x, x_t, s, a)
                (loss / len(micro)).backward()
            optimize(trained[e], optimizers[e])
            follow(ema[e], trained[e], min((2 + step) / (11 + step), 0.9))
            follow(old[e], trained[e], min(0.001 * (step + 1), 0.5))

    return iteration(args, collect, update)


def nft_loss(v, v_old, v_ref, x0, x_t, sigma, adv, beta=0.1, kl=1e-4, adv_max=5.0):
    """wanjax.losses.nft.nft_loss; sigma [B, 1, 1, 1, 1]."""

    def normalised(error):
        weight = error.detach().abs().mean((1, 2, 3, 4)).clamp(min=1e-5)
        return (error**2).mean((1, 2, 3, 4)) / weight

    r = adv.clamp(-adv_max, adv_max) / adv_max / 2 + 0.5
    error, moved = x_t - x0 - sigma * v_old, beta * sigma * (v - v_old)
    policy = r * normalised(error - moved) + (1 - r) * normalised(error + moved)
    return adv_max * policy.mean() / beta + kl * F.mse_loss(v, v_ref)


def dmd2_step(args) -> dict:
    """One clip of --size through phased DMD2: per expert, the student's step against the guided
    teacher (the base) and the critic, then the critic's step on a different clip.

    Forward passes per clip, a backward pass counting as two: collect the sum of the four exit steps
    plus 2 for the last calls of the critic's clips = 9, 9, 10 in steps 0, 1, 2; update 2 experts ·
    (3 student + 2 teacher + 1 critic, then 3 critic) = 18.
    """
    experts = [transformer(args, DMD2["rank"], True, ("default", "critic")) for _ in range(2)]
    roles = ("default", 1e-4), ("critic", 2e-5)
    trained = [[adapter(m, name) for m in experts] for name, _ in roles]
    ema = [[p.detach().clone() for p in group] for group in trained[0]]
    optimizers = [
        [torch.optim.AdamW(p, lr, (0.0, 0.999), weight_decay=0.0) for p in groups]
        for groups, (_, lr) in zip(trained, roles, strict=True)
    ]
    (clip, ctx), uncond = inputs(args), text(args)
    guidance = [(uncond, 4.0), (uncond, 3.0)]
    sigmas = [shifted(u, DMD2["shift"]) for u in DMD2["sigmas"]]
    ends = (sigmas[2], 0.0)  # σ_s: the high expert owns steps 0 and 1, the low one 2 and 3
    edge = shifted(DMD2["boundary"], 1 / DMD2["shift"])
    scored = (
        (edge, 1.0, 875.0, 980.0),
        (0.0, edge, 20.0, 875.0),
    )  # u and t ranges that are compared

    def exit_step(step, e, turn):  # as wanjax.algorithms.dmd2 draws it, so both sides do equal work
        return int(np.random.default_rng((0, step, e, turn)).integers(2 * e, 2 * e + 2))

    @torch.no_grad()
    def collect(step):
        for model in experts:
            use(model, "default")
        clips = {}
        for turn, e in itertools.product(range(2), range(2)):
            stop = exit_step(step, e, turn)
            levels = sigmas[: stop + 1] + ([ends[e]] if turn else [])  # to σ_s for the critic
            x = torch.randn_like(clip, dtype=torch.float32)
            for i, (s, n) in enumerate(itertools.pairwise(levels)):
                x = x + (n - s) * velocity(experts[i // 2], x, 1000 * s, ctx)
            clips[turn, e] = x, sigmas[stop]
        return (clips,)

    def noised(e, x_s):
        u_lo, u_hi, t_lo, t_hi = scored[e]
        u = u_lo + (u_hi - u_lo) * torch.rand(1, device=DEVICE)
        t = (1000 * shifted(u, DMD2["shift"])).clamp(t_lo, t_hi)
        return t, *phased_noise(x_s, torch.randn_like(x_s), t / 1000, ends[e])

    def student_loss(e, x, sigma):
        model = experts[e]
        use(model, "default")
        v = velocity(model, x, 1000 * sigma, ctx)
        x0 = x - sigma * v
        with torch.no_grad():
            t, x_t, _ = noised(e, x + (ends[e] - sigma) * v)
            use(model, None)
            real = x_t - t / 1000 * velocity(model, x_t, t, ctx, guidance[e])
            use(model, "critic")
            fake = x_t - t / 1000 * velocity(model, x_t, t, ctx)
        use(model, "default")  # checkpointing reruns the blocks
        return generator_loss(x0, fake, real)

    def critic_loss(e, x_s, _):
        use(experts[e], "critic")
        t, x_t, target = noised(e, x_s)
        return F.mse_loss(velocity(experts[e], x_t, t, ctx), target)

    def update(_, clips):
        for (turn, e), found in clips.items():
            (student_loss, critic_loss)[turn](e, *found).backward()
            optimize(trained[turn][e], optimizers[turn][e])
        for e in range(2):
            follow(ema[e], trained[0][e], 0.0)  # a plain copy for the first 200 updates

    return iteration(args, collect, update)


def phased_noise(x_s, noise, s, n):
    """wanjax.losses.dmd2.phased_noise: x_s at level n up to s, and the velocity there."""
    alpha = (1 - s) / (1 - n)
    beta = ((s - n) / (1 - n) * (s + alpha * n)) ** 0.5
    gain = (s + alpha * n**2 / (1 - n)) / beta
    return alpha * x_s + beta * noise, gain * noise - x_s / (1 - n)


def generator_loss(x0, fake, real, floor=1e-4):
    """wanjax.losses.dmd2.generator_loss of one clip."""
    fixed = x0.detach()
    return 0.5 * F.mse_loss(x0, fixed - (fake - real) / (fixed - real).abs().mean().clamp(floor))


def checkpoints(args) -> dict:
    """Save with torch.save and fsync, and load, both experts' adapters and their moments."""
    sizes = [(5120, 5120)] * 8 + [(5120, 13824), (13824, 5120)]
    shapes = [shape for i, o in sizes for shape in ((64, i), (o, 64))]
    draw = lambda: [torch.randn(s, device=DEVICE) for _ in range(args.layers) for s in shapes]
    state = {f"{expert}.{part}": draw() for expert in range(2) for part in ("adapter", "mu", "nu")}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = os.path.join(folder, "state.pt")

        def save(_):
            with open(file, "wb") as out:
                torch.save(state, out)
                out.flush()
                os.fsync(out.fileno())

        def restore(_):
            torch.load(file, map_location=DEVICE, weights_only=True)
            synchronize()

        row, back = timed(save, args.repeats), timed(restore, args.repeats)
    return row | {"restore_s": back["seconds"]}


def vae_decode(args) -> dict:
    model, (z, _) = vae(), inputs(args)
    decode = torch.no_grad()(
        lambda i: float(model.decode(z + i, return_dict=False)[0].flatten()[0])
    )
    return timed(decode, args.repeats)


def vae_encode(args) -> dict:
    model = vae()
    height, width, frames = map(int, args.size.split("x"))
    x = random(1, 3, frames, height, width).clamp(-1, 1)
    encode = torch.no_grad()(
        lambda i: float(model.encode(x * (1 - i / 100)).latent_dist.mean.sum())
    )
    return timed(encode, args.repeats)


def text_encoder(args) -> dict:
    del args
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", is_gated_act=True, dense_act_fn="gelu_new",
    )  # fmt: skip
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = UMT5EncoderModel(config).eval()
        torch.set_default_dtype(torch.float32)
    model = torch.compile(model)
    ids = torch.randint(2, 256384, (8, 512), device=DEVICE)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def call(i):
        out = model(input_ids=(ids + i) % 256384, attention_mask=mask).last_hidden_state
        return float(out.flatten()[0])

    return timed(call, 5)


def iteration(args, collect, update) -> dict:
    """Time update(step, *collect(step)), in total and by part."""
    parts = {"collect_s": [], "update_s": []}

    def call(step):
        start = time.perf_counter()
        batch = collect(step)
        synchronize()
        middle = time.perf_counter()
        update(step, *batch)
        synchronize()
        parts["collect_s"].append(middle - start)
        parts["update_s"].append(time.perf_counter() - middle)
        print({name: round(v[-1], 2) for name, v in parts.items()}, file=sys.stderr, flush=True)

    row = timed(call, min(args.repeats, 2))
    return row | {name: round(statistics.median(v[1:]), 2) for name, v in parts.items()}


def velocity(model, x, t, ctx, guidance=None):
    """Velocity in float32 at t, a number or one per sample; guidance: (negative context, scale),
    with both contexts in one call."""
    texts = [ctx] if guidance is None else [ctx, guidance[0]]
    rows = torch.cat([a.expand(len(x), -1, -1) for a in texts])
    t = t + torch.zeros(len(rows), device=DEVICE)
    many = torch.cat([x] * len(texts)).to(torch.bfloat16)
    v = model(many, t, rows, return_dict=False)[0].float()
    if guidance is None:
        return v
    c, u = v.chunk(2)
    return u + guidance[1] * (c - u)


def shifted(u, k):
    """Shift noise levels by k; the inverse is a shift by 1/k."""
    return k * u / (1 + (k - 1) * u)


def brightness(decoder, x):
    """Each sample's reward, from decoded latents."""
    video = decoder.decode(x.to(torch.bfloat16), return_dict=False)[0]
    return video.float().mean((1, 2, 3, 4))


def advantages(scores):
    scores = torch.cat(scores)
    return (scores - scores.mean()) / (scores.std() + 1e-4)


def optimize(parameters, optimizer):
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def follow(average, parameters, decay):
    """average <- decay·average + (1 − decay)·parameters."""
    torch._foreach_lerp_(average, parameters, 1 - decay)


def adapter(model, name="default") -> list:
    """The parameters of one of a model's adapters."""
    return [p for path, p in model.named_parameters() if path.endswith(f".{name}.weight")]


def use(model, name):
    """Make a model run and train one of its adapters; None selects the base alone."""
    if name is None:
        model.disable_adapters()
    else:
        model.enable_adapters()
        model.set_adapter(name)


def transformer(args, rank=0, checkpointing=False, adapters=("default",)):
    """WanTransformer3DModel with compiled blocks, random bf16 weights and, if rank, bf16 adapters
    (float32 is slower in PEFT), the first one active."""
    from diffusers import WanTransformer3DModel

    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = WanTransformer3DModel(num_layers=args.layers)  # the defaults are 14B
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.eval().requires_grad_(False)
    if DEVICE == "cuda":
        model.set_attention_backend(args.attention)
    if rank:
        from peft import LoraConfig

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS)
        for name in adapters:
            model.add_adapter(config, name)
        use(model, adapters[0])
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    if checkpointing:
        model.train()
        model.enable_gradient_checkpointing()
    if DEVICE == "cuda":
        # each combination of adapter or base, gradients and batch compiles a block again (dmd2: 7
        # programs); figures share the limit (default 8), beyond which blocks run uncompiled
        torch._dynamo.config.recompile_limit = 64
        model.compile_repeated_blocks(fullgraph=not checkpointing)
    return model


def vae():
    from diffusers import AutoencoderKLWan

    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoencoderKLWan().eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    return model


def inputs(args):
    height, width, frames = map(int, args.size.split("x"))
    return (
        random(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8),
        text(args),
    )


def text(args):
    """One prompt's embedding, zero-padded like in diffusers' pipeline."""
    return F.pad(random(1, args.text_rows, 4096), (0, 0, 0, 512 - args.text_rows))


def random(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


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
