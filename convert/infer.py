"""Configs from tensor shapes, for files that carry none (original .pth, ComfyUI, GGUF)."""

import math
import re

from convert import files
from wanjax.models import presets, vae


def config(component: str, tensors: files.Tensors, hints: dict, where: str) -> dict:
    """Return the diffusers/transformers config of a component from tensors under diffusers names.

    hints: a config of either naming; only what shapes do not show is taken from it (number of
    heads, eps, latent statistics). ValueError names the tensor that is missing for it.
    """
    kinds = {"vae": _vae, "text_encoder": _text, "image_encoder": _image}
    try:
        return kinds.get(component, _transformer)({n: t.shape for n, t in tensors.items()}, hints)
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{where}: {component} lacks {error}, so its size is unknown; the file is incomplete"
        ) from None


def _count(shapes, pattern: str) -> int:
    """Number of layers; the group of the pattern is a layer's index."""
    return 1 + max((int(m[1]) for n in shapes if (m := re.match(pattern, n))), default=-1)


def _transformer(shapes, hints) -> dict:
    dim, in_channels, *patch = shapes["patch_embedding.weight"]
    heads = hints.get("num_attention_heads", hints.get("num_heads", max(dim // 128, 1)))
    image = "condition_embedder.image_embedder.norm1.weight"
    key = "blocks.0.attn2.add_k_proj.weight"
    position = "condition_embedder.image_embedder.pos_embed"
    layers, vace_fields = _count(shapes, r"blocks\.(\d+)\."), {}
    if "vace_patch_embedding.weight" in shapes:  # evenly spaced from block 0
        step = layers // _count(shapes, r"vace_blocks\.(\d+)\.")
        vace_fields["vace_layers"] = list(range(0, layers, step))
        vace_fields["vace_in_channels"] = shapes["vace_patch_embedding.weight"][1]
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "in_channels": in_channels,
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": layers,
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        "eps": hints.get("eps", 1e-6),
        "image_dim": shapes[image][0] if image in shapes else None,
        "added_kv_proj_dim": shapes[key][1] if key in shapes else None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": shapes[position][1] if position in shapes else None,
        **vace_fields,
    }


def _text(shapes, hints) -> dict:
    layer = "encoder.block.0.layer"
    bias = f"{layer}.0.SelfAttention.relative_attention_bias.weight"
    (vocab, d_model), (buckets, heads) = shapes["shared.weight"], shapes[bias]
    return {
        "vocab_size": vocab,
        "d_model": d_model,
        "d_kv": shapes[f"{layer}.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes[f"{layer}.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shapes, r"encoder\.block\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": hints.get("relative_attention_max_distance", 128),
        "layer_norm_epsilon": hints.get("layer_norm_epsilon", 1e-6),
    }


def _image(shapes, hints) -> dict:
    width, _, patch, _ = shapes["embeddings.patch_embedding.weight"]
    positions = shapes["embeddings.position_embedding.weight"][0]
    return {
        "hidden_size": width,
        "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": hints.get("num_attention_heads", max(width // 80, 1)),
        "image_size": math.isqrt(positions - 1) * patch,
        "patch_size": patch,
    }


def _vae(shapes, hints) -> dict:
    conv_in, z_dim = shapes["encoder.conv_in.weight"], shapes["post_quant_conv.weight"][0]
    base, pixels = conv_in[0], conv_in[1]
    residual = "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes
    levels = _count(shapes, r"decoder\.up_blocks\.(\d+)\.")
    per_level = _count(shapes, r"decoder\.up_blocks\.0\.resnets\.(\d+)\.") - 1
    if residual:
        at = [(f"{k}.resnets.0", f"{k}.downsampler") for k in range(levels)]
    else:  # the encoder is one flat list: per_level blocks, then a downsampler
        starts = [k * (per_level + 1) for k in range(levels)]
        at = [(f"{k}", f"{k + per_level}") for k in starts]
    first = [f"encoder.down_blocks.{block}.conv1.weight" for block, _ in at]
    time = [f"encoder.down_blocks.{down}.time_conv.weight" for _, down in at[:-1]]
    patch = math.isqrt(pixels // 3)
    known = {16: vae.VAEConfig(), 48: presets.WAN22_VAE}.get(z_dim)
    statistics = {k: hints.get(k, getattr(known, k, None)) for k in ("latents_mean", "latents_std")}
    if None in statistics.values():
        raise KeyError(f"latents_mean and latents_std for {z_dim} latent channels in a config")
    out_channels, width = shapes["decoder.conv_out.weight"][:2]
    width //= shapes[first[0]][0] // base
    return {
        "base_dim": base,
        "decoder_base_dim": None if width == base else width,
        "z_dim": z_dim,
        "dim_mult": [shapes[name][0] // base for name in first],
        "num_res_blocks": per_level,
        "temperal_downsample": [name in shapes for name in time],
        "is_residual": residual,
        "in_channels": pixels,
        "out_channels": out_channels,
        "patch_size": patch if patch > 1 else None,
        "scale_factor_spatial": 2 ** (levels - 1) * patch,
        **statistics,
    }
