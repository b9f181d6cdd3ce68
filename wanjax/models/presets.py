"""Every Wan variant by name: architecture, experts, and sampling defaults from its original
repository.

Guidance and shift are named fields, never positional: the original code orders guidance (low,
high), diffusers (high, low). The scheduler files inside released A14B folders say shift 3; the
model was released with 12 (T2V) and 5 (I2V), kept here.
"""

import dataclasses
from dataclasses import dataclass

from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.umt5 import UMT5Config
from wanjax.models.vae import VAEConfig
from wanjax.models.wan import WanConfig

NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，"
    "低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，"
    "毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
NEGATIVE_I2V_21 = "镜头晃动，" + NEGATIVE
NEGATIVE_FLF2V = "镜头切换，镜头晃动，" + NEGATIVE


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance scale per expert; 1 runs without the unconditional pass."""

    high: float
    low: float


@dataclass(frozen=True)
class Sampling:
    """How the original repository samples this variant; sizes in pixels, frames at fps per
    second."""

    shift: float
    guidance: Guidance
    steps: int
    frames: int = 81
    height: int = 480
    width: int = 832
    fps: int = 16
    negative_prompt: str = NEGATIVE


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: one transformer config for all experts, encoders, expert names and sampling
    defaults."""

    name: str
    wan: WanConfig
    sampling: Sampling
    vae: VAEConfig = VAEConfig()
    text: UMT5Config = UMT5Config()
    image: CLIPVisionConfig | None = None
    experts: tuple[str, ...] = ("high",)  # "high" alone is the only expert of a single model
    boundary: float | None = None  # expert "high" serves t >= boundary·1000
    tokenizer: str | None = None  # folder


WAN22_VAE = VAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207,
        -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567,
        -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083,
        -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    latents_std=(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158,
        1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804,
        0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866,
        0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06,
        0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_spatial=16,
)  # fmt: skip

_B1 = WanConfig(num_attention_heads=12, attention_head_dim=128, num_layers=30, ffn_dim=8960)
_B14 = WanConfig(num_attention_heads=40, attention_head_dim=128, num_layers=40, ffn_dim=13824)
_I2V = dataclasses.replace(_B14, in_channels=36)
_I2V_CLIP = dataclasses.replace(_I2V, image_dim=1280, added_kv_proj_dim=5120)
_B5 = WanConfig(num_attention_heads=24, attention_head_dim=128, num_layers=30, ffn_dim=14336)
_TI2V = dataclasses.replace(_B5, in_channels=48, out_channels=48)
EXPERTS = ("high", "low")  # of which a model has both, or the first

MODELS = {
    config.name: config
    for config in (
        ModelConfig("wan2.1_t2v_1.3b", _B1, Sampling(5.0, Guidance(5.0, 5.0), steps=50)),
        ModelConfig("wan2.1_t2v_14b", _B14, Sampling(5.0, Guidance(5.0, 5.0), steps=50)),
        ModelConfig(
            "wan2.1_i2v_14b",
            _I2V_CLIP,
            Sampling(3.0, Guidance(5.0, 5.0), steps=40, negative_prompt=NEGATIVE_I2V_21),
            image=CLIPVisionConfig(),
        ),
        ModelConfig(
            "wan2.1_flf2v_14b",
            dataclasses.replace(_I2V_CLIP, pos_embed_seq_len=514),
            Sampling(
                16.0, Guidance(5.0, 5.0), 50, height=720, width=1280, negative_prompt=NEGATIVE_FLF2V
            ),
            image=CLIPVisionConfig(),
        ),
        ModelConfig(
            "wan2.2_t2v_a14b",
            _B14,
            Sampling(12.0, Guidance(high=4.0, low=3.0), steps=40),
            boundary=0.875,
            experts=EXPERTS,
        ),
        ModelConfig(
            "wan2.2_i2v_a14b",
            _I2V,
            Sampling(5.0, Guidance(high=3.5, low=3.5), steps=40),
            boundary=0.9,
            experts=EXPERTS,
        ),
        ModelConfig(
            "wan2.2_ti2v_5b",
            _TI2V,
            Sampling(5.0, Guidance(5.0, 5.0), 50, frames=121, height=704, width=1280, fps=24),
            vae=WAN22_VAE,
        ),
    )
}
