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
        return kinds.get(component, _transformer)(tensors, hints)
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{where}: {component} lacks {error}, so its size is unknown; the file is incomplete"
        ) from None


def _count(tensors, pattern: str) -> int:
    """Number of layers; the group of the pattern is a layer's index."""
    return 1 + max((int(m[1]) for n in tensors if (m := re.match(pattern, n))), default=-1)


def _transformer(tensors, hints) -> dict:
    def shape(name: str) -> tuple:
        return tensors[name].shape

    dim, in_channels, *patch = shape("patch_embedding.weight")
    heads = hints.get("num_attention_heads", hints.get("num_heads", max(dim // 128, 1)))
    image = "condition_embedder.image_embedder.norm1.weight"
    key = "blocks.0.attn2.add_k_proj.weight"
    position = "condition_embedder.image_embedder.pos_embed"
    layers, vace_fields = _count(tensors, r"blocks\.(\d+)\."), {}
    if "vace_patch_embedding.weight" in tensors:  # evenly spaced from block 0
        step = layers // _count(tensors, r"vace_blocks\.(\d+)\.")
        vace_fields["vace_layers"] = list(range(0, layers, step))
        vace_fields["vace_in_channels"] = shape("vace_patch_embedding.weight")[1]
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": heads,
        "attention_head_dim": dim // heads,
        "in_channels": in_channels,
        "out_channels": shape("proj_out.weight")[0] // math.prod(patch),
        "text_dim": shape("condition_embedder.text_embedder.linear_1.weight")[1],
        "freq_dim": shape("condition_embedder.time_embedder.linear_1.weight")[1],
        "ffn_dim": shape("blocks.0.ffn.net.0.proj.weight")[0],
        "num_layers": layers,
        "cross_attn_norm": "blocks.0.norm2.weight" in tensors,
        "qk_norm": "rms_norm_across_heads",
        "eps": hints.get("eps", 1e-6),
        "image_dim": shape(image)[0] if image in tensors else None,
        "added_kv_proj_dim": shape(key)[1] if key in tensors else None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": shape(position)[1] if position in tensors else None,
        **vace_fields,
    }


def _text(tensors, hints) -> dict:
    def shape(name: str) -> tuple:
        return tensors[name].shape

    layer = "encoder.block.0.layer"
    bias = f"{layer}.0.SelfAttention.relative_attention_bias.weight"
    (vocab, d_model), (buckets, heads) = shape("shared.weight"), shape(bias)
    return {
        "vocab_size": vocab,
        "d_model": d_model,
        "d_kv": shape(f"{layer}.0.SelfAttention.q.weight")[0] // heads,
        "d_ff": shape(f"{layer}.1.DenseReluDense.wi_0.weight")[0],
        "num_layers": _count(tensors, r"encoder\.block\.(\d+)\."),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": hints.get("relative_attention_max_distance", 128),
        "layer_norm_epsilon": hints.get("layer_norm_epsilon", 1e-6),
    }


def _image(tensors, hints) -> dict:
    width, _, patch, _ = tensors["embeddings.patch_embedding.weight"].shape
    positions = tensors["embeddings.position_embedding.weight"].shape[0]
    return {
        "hidden_size": width,
        "intermediate_size": tensors["encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": _count(tensors, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": hints.get("num_attention_heads", max(width // 80, 1)),
        "image_size": math.isqrt(positions - 1) * patch,
        "patch_size": patch,
    }


def _vae(tensors, hints) -> dict:
    def rows(name: str) -> int:
        return tensors[name].shape[0]

    base, z_dim = rows("encoder.conv_in.weight"), rows("post_quant_conv.weight")
    residual = "encoder.down_blocks.0.resnets.0.conv1.weight" in tensors
    levels = _count(tensors, r"decoder\.up_blocks\.(\d+)\.")
    per_level = _count(tensors, r"decoder\.up_blocks\.0\.resnets\.(\d+)\.") - 1
    if residual:
        first = [f"encoder.down_blocks.{k}.resnets.0.conv1.weight" for k in range(levels)]
        time = [f"encoder.down_blocks.{k}.downsampler.time_conv.weight" for k in range(levels - 1)]
    else:  # the encoder is one flat list: per_level blocks, then a downsampler
        step = per_level + 1
        first = [f"encoder.down_blocks.{k * step}.conv1.weight" for k in range(levels)]
        time = [
            f"encoder.down_blocks.{k * step + per_level}.time_conv.weight"
            for k in range(levels - 1)
        ]
    pixels = tensors["encoder.conv_in.weight"].shape[1]
    patch = math.isqrt(pixels // 3)
    known = {16: vae.VAEConfig(), 48: presets.WAN22_VAE}.get(z_dim)
    statistics = {k: hints.get(k, getattr(known, k, None)) for k in ("latents_mean", "latents_std")}
    if None in statistics.values():
        raise KeyError(f"latents_mean and latents_std for {z_dim} latent channels in a config")
    out_channels, width = tensors["decoder.conv_out.weight"].shape[:2]
    width //= rows(first[0]) // base
    return {
        "base_dim": base,
        "decoder_base_dim": None if width == base else width,
        "z_dim": z_dim,
        "dim_mult": [rows(name) // base for name in first],
        "num_res_blocks": per_level,
        "temperal_downsample": [name in tensors for name in time],
        "is_residual": residual,
        "in_channels": pixels,
        "out_channels": out_channels,
        "patch_size": patch if patch > 1 else None,
        "scale_factor_spatial": 2 ** (levels - 1) * patch,
        **statistics,
    }
