"""CLIP: the vision tower that conditions Wan2.1 I2V and FLF2V, and both towers for rewards.

Both are pre-norm transformers over learned positions, with layers
    x ← x + attention(norm1(x))        x ← x + fc2(act(fc1(norm2(x))))
Vision: patches after a class token, normed before the first layer. Wan reads the tokens *before the
last layer* (hidden_states[-2], 31 of 32), without a final norm.
Text: causal attention over token ids. Embeddings for comparison, of width D, are the normed class
token and the normed token at the end of the text, each through a projection without bias.

Paper: https://arxiv.org/abs/2103.00020. Oracle: transformers.CLIPModel, whose names the trees
follow. Matmuls run in the dtype of the parameters; LayerNorm and softmax in float32.

B batch  H W image height/width  C colour  S tokens (class first, Q: the same as queries)
E width  N heads  K head dim  F ffn  D embedding
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# Colour statistics of OpenAI's CLIP training images, for RGB in [0,1].
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

ACTIVATIONS = {
    "gelu": partial(nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
}


@dataclass(frozen=True)
class CLIPVisionConfig:
    """Fields as in transformers' CLIPVisionConfig; the defaults are ViT-H/14, used by Wan2.1."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 14
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5


@dataclass(frozen=True)
class CLIPTextConfig:
    """Fields as in transformers' CLIPTextConfig; the defaults go with ViT-H/14."""

    vocab_size: int = 49408
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 77
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    eos_token_id: int = 49407  # 2 in old configs, which then means the largest id of a row


@dataclass(frozen=True)
class CLIPConfig:
    """Two towers and the width of what they are projected to."""

    vision: CLIPVisionConfig = CLIPVisionConfig()
    text: CLIPTextConfig = CLIPTextConfig()
    projection_dim: int = 1024


def init(key, config: CLIPVisionConfig):
    """Return float32 parameters of the whole tower, the last layer and post_layernorm included."""
    E, p = config.hidden_size, config.patch_size
    positions = (config.image_size // p) ** 2 + 1
    k_class, k_patch, k_position, k_layer = jax.random.split(key, 4)
    return {
        "embeddings": {
            "class_embedding": _normal(k_class, E**-0.5, E),
            "patch_embedding": {"kernel": _normal(k_patch, 0.02, p, p, 3, E)},
            "position_embedding": {"embedding": _normal(k_position, 0.02, positions, E)},
        },
        "pre_layrnorm": _init_norm(E),  # spelled like this in every checkpoint
        "encoder": {"layers": _init_layers(k_layer, config)},
        "post_layernorm": _init_norm(E),
    }


def init_clip(key, config: CLIPConfig):
    """Return float32 parameters of both towers, their projections and the logit scale."""
    text, E, D = config.text, config.text.hidden_size, config.projection_dim
    vision_E, positions = config.vision.hidden_size, text.max_position_embeddings
    k_vision, k_token, k_position, k_layer, k_image, k_text = jax.random.split(key, 6)
    return {
        "vision_model": init(k_vision, config.vision),
        "text_model": {
            "embeddings": {
                "token_embedding": {"embedding": _normal(k_token, 0.02, text.vocab_size, E)},
                "position_embedding": {"embedding": _normal(k_position, 0.02, positions, E)},
            },
            "encoder": {"layers": _init_layers(k_layer, text)},
            "final_layer_norm": _init_norm(E),
        },
        "visual_projection": {"kernel": _normal(k_image, vision_E**-0.5, vision_E, D)},
        "text_projection": {"kernel": _normal(k_text, E**-0.5, E, D)},
        "logit_scale": jnp.log(1 / 0.07),
    }


def encode_image(params, pixels_BHWC, *, config: CLIPVisionConfig):
    """Return the penultimate tokens_BSE, S = 1 + (image_size/patch_size)², class token first.

    pixels_BHWC comes from `preprocess`; raises ValueError unless it is image_size square.
    """
    x_BSE = _embed(params, pixels_BHWC, config)
    all_but_last = jax.tree.map(lambda leaf: leaf[:-1], params["encoder"]["layers"])
    return _run(all_but_last, x_BSE, config)


def embed_image(params, pixels_BHWC, *, config: CLIPConfig):
    """Return the projected embedding_BD of images, not normalised; params are of `init_clip`.

    pixels_BHWC: normalised, image_size square.
    """
    vision, c = params["vision_model"], config.vision
    x_BSE = _run(vision["encoder"]["layers"], _embed(vision, pixels_BHWC, c), c)
    x_BE = _norm(c, None).apply({"params": vision["post_layernorm"]}, x_BSE[:, 0])
    return x_BE @ params["visual_projection"]["kernel"]


def embed_text(params, ids_BS, *, config: CLIPConfig):
    """Return the projected embedding_BD of texts, not normalised; params are of `init_clip`.

    ids_BS: start token, text, end token, any padding; S at most max_position_embeddings. Nothing
    after the first end token matters.
    """
    text, c = params["text_model"], config.text
    tables, S = text["embeddings"], ids_BS.shape[1]
    x_BSE = tables["token_embedding"]["embedding"][ids_BS]
    x_BSE = x_BSE + tables["position_embedding"]["embedding"][None, :S]
    x_BSE = _run(text["encoder"]["layers"], x_BSE, c, causal=True)
    end_BS = ids_BS if c.eos_token_id == 2 else ids_BS == c.eos_token_id
    x_BE = x_BSE[jnp.arange(len(x_BSE)), jnp.argmax(end_BS, axis=1)]
    x_BE = _norm(c, None).apply({"params": text["final_layer_norm"]}, x_BE)
    return x_BE @ params["text_projection"]["kernel"]


def preprocess(x_BHWC, *, config: CLIPVisionConfig):
    """Turn RGB frames in [-1,1] of any size into normalised square pixels_BHWC, float32.

    The shorter side is resized to image_size (bicubic with antialiasing) and the centre is
    cropped, as the image processor of the diffusers pipeline does. Wan's original code instead
    squeezes the whole frame into the square without antialiasing, so its features see the borders
    that this crop drops.
    """
    B, H, W, C = x_BHWC.shape
    size = config.image_size
    h, w = size * H // min(H, W), size * W // min(H, W)
    x_BHWC = (x_BHWC.astype(jnp.float32) + 1) / 2
    # Bicubic weights overshoot at edges; 8-bit images clip there.
    x_BHWC = jnp.clip(jax.image.resize(x_BHWC, (B, h, w, C), "cubic", antialias=True), 0, 1)
    top, left = (h - size) // 2, (w - size) // 2
    x_BHWC = x_BHWC[:, top : top + size, left : left + size]
    mean_C, std_C = jnp.array(MEAN), jnp.array(STD)
    return (x_BHWC - mean_C[None, None, None]) / std_C[None, None, None]


class Layer(nn.Module):
    """Pre-norm self-attention and MLP; parameter names as in transformers' CLIPEncoderLayer."""

    config: CLIPVisionConfig | CLIPTextConfig
    causal: bool = False

    @nn.compact
    def __call__(self, x_BSE):
        c = self.config
        if c.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {c.hidden_act!r} of a CLIP tower is not one of "
                f"{sorted(ACTIVATIONS)}; check image_encoder/config.json, or the reward model's"
            )
        E, N = c.hidden_size, c.num_attention_heads

        def heads(y_BSE):
            return y_BSE.reshape(*y_BSE.shape[:2], N, E // N)

        n_BSE = _norm(c, "layer_norm1")(x_BSE)
        q_BQNK = heads(nn.Dense(E, name="self_attn.q_proj")(n_BSE))
        k_BSNK = heads(nn.Dense(E, name="self_attn.k_proj")(n_BSE))
        v_BSNK = heads(nn.Dense(E, name="self_attn.v_proj")(n_BSE))
        s_BNQS = jnp.einsum("BQNK,BSNK->BNQS", q_BQNK, k_BSNK, preferred_element_type=jnp.float32)
        if self.causal:
            seen_QS = jnp.tri(s_BNQS.shape[-1], dtype=bool)
            s_BNQS = jnp.where(seen_QS[None, None], s_BNQS, -jnp.inf)
        a_BNQS = jax.nn.softmax(s_BNQS * (E // N) ** -0.5, axis=-1).astype(x_BSE.dtype)
        y_BQNK = jnp.einsum("BNQS,BSNK->BQNK", a_BNQS, v_BSNK)
        x_BSE = x_BSE + nn.Dense(E, name="self_attn.out_proj")(y_BQNK.reshape(x_BSE.shape))

        n_BSE = _norm(c, "layer_norm2")(x_BSE)
        h_BSF = ACTIVATIONS[c.hidden_act](nn.Dense(c.intermediate_size, name="mlp.fc1")(n_BSE))
        return x_BSE + nn.Dense(E, name="mlp.fc2")(h_BSF)


def _run(layers, x_BSE, config, causal=False):
    """Scan a stack of layers."""

    def layer(x_BSE, layer_params) -> tuple[Any, None]:
        return Layer(config, causal).apply({"params": layer_params}, x_BSE), None

    return jax.lax.scan(layer, x_BSE, layers)[0]


def _embed(params, pixels_BHWC, config):
    """Patch, class and position embeddings, normalised: the input of the first layer."""
    B, H, W, _ = pixels_BHWC.shape
    size, p, E = config.image_size, config.patch_size, config.hidden_size
    if (H, W) != (size, size):
        raise ValueError(
            f"the image encoder got {H}x{W} pixels but its image_size is {size}; "
            "call clip.preprocess on the frames first"
        )
    embeddings = params["embeddings"]
    kernel = embeddings["patch_embedding"]["kernel"]
    conv = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x_BHWE = conv(pixels_BHWC.astype(kernel.dtype), kernel, (p, p), "VALID")
    class_B1E = jnp.broadcast_to(embeddings["class_embedding"], (B, 1, E))
    x_BSE = jnp.concatenate([class_B1E, x_BHWE.reshape(B, -1, E)], axis=1)
    x_BSE = x_BSE + embeddings["position_embedding"]["embedding"][None]
    return _norm(config, None).apply({"params": params["pre_layrnorm"]}, x_BSE)


def _init_layers(key, config):
    def one(key):
        return Layer(config).init(key, jnp.zeros((1, 1, config.hidden_size)))["params"]

    return jax.vmap(one)(jax.random.split(key, config.num_hidden_layers))


def _init_norm(E):
    return {"scale": jnp.ones(E), "bias": jnp.zeros(E)}


def _normal(key, std, *shape):
    return std * jax.random.normal(key, shape)


def _norm(config, name):
    # The two-pass variance: E[x²] − E[x]² loses digits where the mean is large.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, name=name)
