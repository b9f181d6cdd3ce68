"""The same figures as ours.py in diffusers, PEFT and torch.compile; one JSON line per figure.

    python scripts/bench/peer.py forward lora_step grpo vae_decode vae_encode umt5

Needs torch with CUDA, diffusers, peft and transformers. Random bf16 weights. The transformer's
blocks are compiled (compile_repeated_blocks) over cuDNN attention unless --attention names another
backend of diffusers; training uses gradient checkpointing.
"""

import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from report_table import timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRPO = dict(steps=10, samples=16, rank=64, shift=12.0, boundary=0.875)
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figures", nargs="+", choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=40, help="fewer to try the script")
    parser.add_argument("--size", default="480x832x81", help="height x width x frames")
    parser.add_argument("--attention", default="_native_cudnn", help="backend of diffusers")
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)

    def call(i):
        t = torch.full((1,), 900.0 - i, device=DEVICE)
        noise = torch.randn_like(x0, dtype=torch.float32)
        sigma = t[0] / 1000
        x_t = ((1 - sigma) * x0.float() + sigma * noise).to(x0.dtype)
        v = model(x_t, t, ctx, return_dict=False)[0]
        loss = F.mse_loss(v.float(), noise - x0.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return timed(call, args.repeats)


def grpo_iteration(args) -> dict:
    """K samples of one prompt by both experts with guidance and one SDE step each, decoded; then
    one policy-gradient step per expert over micro-batches of 2 samples."""
    experts = [transformer(args, rank=GRPO["rank"], checkpointing=True) for _ in range(2)]
    parameters = [[p for p in m.parameters() if p.requires_grad] for m in experts]
    optimizers = [torch.optim.AdamW(p, 1e-4) for p in parameters]
    decoder = vae()
    ctx, uncond = (random(1, 512, 4096) for _ in range(2))
    steps, shift, K = GRPO["steps"], GRPO["shift"], GRPO["samples"]
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    sigmas = (shift * u / (1 + (shift - 1) * u)).tolist()
    owner = [0 if s >= GRPO["boundary"] else 1 for s in sigmas[:-1]]
    stored = {owner.index(1) - 2, owner.index(1)}  # one step of each expert
    parts = {"collect_s": [], "update_s": []}

    def velocity(model, x, sigma, scale):
        both = torch.cat([x, x]).to(torch.bfloat16)
        text = torch.cat([ctx.expand(len(x), -1, -1), uncond.expand(len(x), -1, -1)])
        t = torch.full((len(both),), 1000 * sigma, device=DEVICE)
        c, u = model(both, t, text, return_dict=False)[0].float().chunk(2)
        return u + scale * (c - u)

    def transition(x, v, s, n):  # Flow-GRPO's kernel, eta 0.7
        g = 0.7 * (s / (1 - min(s, sigmas[1]))) ** 0.5
        mean = x * (1 - g * g / (2 * s) * (s - n)) - v * (1 + g * g / (2 * s) * (1 - s)) * (s - n)
        return mean, g * (s - n) ** 0.5

    def log_prob(x_next, mean, std):
        return -(((x_next - mean) ** 2).mean((1, 2, 3, 4)) / (2 * std**2))

    @torch.no_grad()
    def collect():
        kept, scores = [], []
        for _ in range(0, K, 4):
            x = torch.randn(4, 16, 2, 60, 60, device=DEVICE)
            for i in range(steps):
                s, n = sigmas[i], sigmas[i + 1]
                v = velocity(experts[owner[i]], x, s, (4.0, 3.0)[owner[i]])
                if i in stored:
                    mean, std = transition(x, v, s, n)
                    x_next = mean + std * torch.randn_like(x)
                    kept.append((owner[i], s, n, x, x_next, log_prob(x_next, mean, std)))
                    x = x_next
                else:
                    x = x - (s - n) * v
            video = decoder.decode(x.to(torch.bfloat16), return_dict=False)[0]
            scores.append(video.float().mean((1, 2, 3, 4)))
        scores = torch.cat(scores)
        return kept, (scores - scores.mean()) / (scores.std() + 1e-4)

    def update(kept, adv):
        seen = [0, 0]
        for e, s, n, x, x_next, old in kept:
            first = seen[e]
            seen[e] += len(x)
            for j in range(0, len(x), 2):
                v = velocity(experts[e], x[j : j + 2], s, (4.0, 3.0)[e])
                mean, std = transition(x[j : j + 2], v, s, n)
                ratio = (log_prob(x_next[j : j + 2], mean, std) - old[j : j + 2]).exp()
                a = adv[first + j : first + j + 2]
                loss = -torch.minimum(ratio * a, ratio.clamp(1 - 1e-4, 1 + 1e-4) * a).mean()
                (loss * 2 / K).backward()
        for group, optimizer in zip(parameters, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(group, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def call(i):
        start = time.perf_counter()
        kept, adv = collect()
        float(adv[0])
        middle = time.perf_counter()
        update(kept, adv)
        synchronize()
        parts["collect_s"].append(middle - start)
        parts["update_s"].append(time.perf_counter() - middle)
        print({name: round(v[-1], 2) for name, v in parts.items()}, file=sys.stderr, flush=True)

    row = timed(call, min(args.repeats, 2))
    return row | {name: round(statistics.median(v[1:]), 2) for name, v in parts.items()}


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


def transformer(args, rank=0, checkpointing=False):
    """WanTransformer3DModel with random bf16 weights and, if rank, a bf16 adapter (float32 is
    slower in PEFT); its blocks are compiled."""
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
        model.add_adapter(config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    if checkpointing:
        model.train()
        model.enable_gradient_checkpointing()
    if DEVICE == "cuda":
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
        random(1, 512, 4096),
    )


def random(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


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
