"""CLIP rewards against transformers (model, image processor, tokenizer) and HPSv2's open_clip.

golden/clip/open_clip.npz: a tiny random CLIP of hpsv2 1.2.0's own open_clip (w/NAME), pixels and
ids, and the normalised features that it gives for them.
"""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from PIL import Image

from wanjax import rewards
from wanjax.models import clip
from wanjax.rewards import clip_score

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "clip" / "open_clip.npz"
VISION = dict(
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    image_size=28,
    patch_size=7,
    hidden_act="gelu",
)
TEXT = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=9,
    hidden_act="gelu",
    eos_token_id=49,
)
LETTERS = "abcdefghijklmnopqrstuvw"
PROMPTS = ["A cab", "bad  CAB fed", "a " * 20, "A cab", ""]  # the third is cut to 9 tokens


def make_tokenizer(folder):
    tokens = [*LETTERS, *(f"{c}</w>" for c in LETTERS), "ab</w>", "cab</w>"]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("a", "b</w>"), ("c", "ab</w>")]
    assert len(vocab) == 50
    transformers.CLIPTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random CLIP in a folder: (folder, torch model)."""
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=dict(TEXT, bos_token_id=48, pad_token_id=0),
        vision_config=VISION,
        projection_dim=12,
        initializer_factor=3.0,
    )
    model = transformers.CLIPModel(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder, model


@pytest.fixture
def video(rng):
    return rng.integers(0, 256, (5, 7, 30, 50, 3), dtype=np.uint8)


def cosines(folder, model, video_BTHWC, prompts):
    """cos_BT by transformers alone, with the processor's pixels and the tokenizer's ids."""
    size = dict(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.CLIPImageProcessorPil(**size)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    text = dict(padding=True, max_length=9, truncation=True, return_tensors="pt")
    with torch.no_grad():
        texts = model.get_text_features(**tokenizer(prompts, **text)).pooler_output
        texts = texts / texts.norm(dim=-1, keepdim=True)
        images = processor(images=[Image.fromarray(f) for v in video_BTHWC for f in v])
        pixels = torch.from_numpy(np.stack(images["pixel_values"]))
        images = model.get_image_features(pixel_values=pixels).pooler_output
        images = (images / images.norm(dim=-1, keepdim=True)).unflatten(0, video_BTHWC.shape[:2])
    return torch.einsum("btd,bd->bt", images, texts).numpy(), model.logit_scale.exp().item()


@pytest.mark.parametrize("H, W", [(28, 28), (30, 50), (97, 33), (20, 31), (240, 416), (64, 64)])
def test_cut_pixels_are_bitwise_those_of_the_image_processor(rng, H, W):
    frames = rng.integers(0, 256, (2, H, W, 3), dtype=np.uint8)
    frames[1] = 255 * (np.indices((H, W)).sum(0) // 5 % 2)[..., None]
    size = dict(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    want = transformers.CLIPImageProcessorPil(**size)(images=[Image.fromarray(f) for f in frames])
    want = np.stack(want["pixel_values"]).transpose(0, 2, 3, 1)
    got = clip_score.cut_pixels(frames, 28)
    assert got.dtype == want.dtype == np.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("H, W, h, w", [(30, 50, 17, 28), (61, 33, 28, 15), (28, 28, 28, 28)])
def test_fitted_pixels_match_torch_and_keep_the_whole_frame_between_black_bars(rng, H, W, h, w):
    frames = rng.integers(0, 256, (2, H, W, 3), dtype=np.uint8)
    x = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
    settings = dict(mode="bicubic", antialias=True, align_corners=False)
    x = torch.nn.functional.interpolate(x, (h, w), **settings)
    top, left = (28 - h) // 2, (28 - w) // 2
    x = torch.nn.functional.pad(x, (left, 28 - w - left, top, 28 - h - top))
    want = (x.permute(0, 2, 3, 1).numpy() - clip.MEAN) / clip.STD
    np.testing.assert_allclose(clip_score.fitted_pixels(frames, 28), want, atol=2e-5)


def test_pickscore_and_clipscore_match_transformers_over_all_chosen_frames(model, video):
    cos_BT, scale = cosines(*model, video, PROMPTS)
    pick = rewards.find(
        f"pickscore?model={model[0]}&batch=4"
    )  # 35 frames: 9 calls, the last padded
    got, info = pick(video, PROMPTS, None)
    assert got.shape == (5,) and info == {}
    np.testing.assert_allclose(got, scale * cos_BT.mean(1) / 26, rtol=1e-5, atol=2e-7 * scale)
    assert got[0] != got[3] and len(set(got)) == 5  # equal prompts, other videos
    shapes = clip_score._embed_images._cache_size(), clip_score._embed_texts._cache_size()

    three = rewards.find(f"clipscore?model={model[0]}&batch=4&frames=3")
    got, _ = three(video, PROMPTS, None)
    want = np.maximum(cos_BT[:, [0, 3, 6]], 0).mean(1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert (cos_BT < 0).any() and (want > 0).any()

    first = rewards.find(f"clipscore?model={model[0]}&batch=4&frames=first")
    got, _ = first(video[:2], PROMPTS[:2], None)
    np.testing.assert_allclose(got, np.maximum(cos_BT[:2, 0], 0), rtol=1e-5, atol=1e-6)
    now = clip_score._embed_images._cache_size(), clip_score._embed_texts._cache_size()
    assert now == shapes  # one compiled shape each, whatever comes


def test_a_model_may_be_the_name_of_a_hugging_face_repository(model, video, monkeypatch):
    monkeypatch.setattr("wanjax.paths._snapshot", lambda name, needed: pathlib.Path(model[0]))
    named, local = (clip_score.pickscore(m)(video, PROMPTS, None)[0] for m in ("a/b", model[0]))
    np.testing.assert_array_equal(named, local)


@pytest.fixture(scope="module")
def hps(tmp_path_factory):
    """The golden model as an open_clip safetensors file with a config and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("hps")
    golden = np.load(GOLDEN)
    weights = {name[2:]: golden[name] for name in golden.files if name.startswith("w/")}
    safetensors.numpy.save_file(weights, folder / "hps.safetensors")
    config = dict(model_type="clip", projection_dim=12, text_config=TEXT, vision_config=VISION)
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
    return folder


def test_open_clip_weights_give_the_features_of_hpsv2s_own_code(hps):
    golden = np.load(GOLDEN)
    params, config = clip_score.load(hps / "hps.safetensors")
    for got, want in (
        (clip_score._embed_images(params, golden["pixels_NHWC"], config=config), "image_BD"),
        (clip_score._embed_texts(params, golden["ids_BS"], config=config), "text_BD"),
    ):
        assert np.abs(got - golden[want]).max() <= 1e-5 * np.abs(golden[want]).max()


def test_hpsv2_is_the_cosine_of_the_first_frame(hps, video):
    reward = rewards.find(f"hpsv2?model={hps}/hps.safetensors&tokenizer={hps}&batch=5")
    got, _ = reward(video, ["&lt;&amp;gt; cab", *PROMPTS[1:]], None)
    params, config = clip_score.load(hps / "hps.safetensors")
    pixels = clip_score.fitted_pixels(video[:, 0], 28)
    images = clip_score._embed_images(params, pixels, config=config)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(hps)
    text = dict(padding="max_length", max_length=9, truncation=True)
    ids = np.array(tokenizer(["<> cab", *PROMPTS[1:]], **text)["input_ids"], np.int32)
    texts = clip_score._embed_texts(params, ids, config=config)
    np.testing.assert_allclose(got, np.sum(images * texts, axis=1), rtol=1e-5, atol=1e-6)


def test_a_model_that_does_not_fit_is_one_line_before_anything_runs(model, hps, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(ValueError, match="'pickscore': needs the argument 'model'"):
        rewards.find("pickscore")
    with pytest.raises(ValueError, match="no CLIP weights at .*other/model.safetensors"):
        rewards.find(f"pickscore?model={folder}")
    (folder / "model.safetensors").write_bytes(b"junk" * 9)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        rewards.find(f"pickscore?model={folder}")

    weights = safetensors.numpy.load_file(model[0] / "model.safetensors")
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no config.json beside"):
        rewards.find(f"pickscore?model={folder}")
    config = json.loads((model[0] / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"projection_dim": 13}))
    with pytest.raises(ValueError, match=r"_projection.weight is .*, expected \(\d+, 13\)"):
        rewards.find(f"pickscore?model={folder}")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no tokenizer.json in .*other; set tokenizer"):
        rewards.find(f"pickscore?model={folder}")
    with pytest.raises(ValueError, match="frames is 'last'; expected all, first or a number"):
        rewards.find(f"pickscore?model={model[0]}&frames=last")

    del weights["text_model.encoder.layers.1.mlp.fc1.bias"]
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="text_model.encoder.layers.1.mlp.fc1.bias is missing"):
        rewards.find(f"pickscore?model={folder}")

    config = json.loads((hps / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 48
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((hps / "hps.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match="50 tokens and ends texts with 49; the model knows 50 and 48"
    ):
        rewards.find(f"hpsv2?model={folder}&tokenizer={hps}")
