"""Every run has videos of the shipped prompts before and after training: from text, and from the
shipped first frames where the model starts from an image."""

import dataclasses

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from wanjax import sampling, setup, train
from wanjax.data import __main__ as data_command
from wanjax.data import previews
from wanjax.models import clip
from wanjax.rewards import shapes

CLIP = clip.CLIPVisionConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=8,
)  # fmt: skip
I2V = dataclasses.replace(  # as I2V-A14B
    tiny.MODEL, wan=dataclasses.replace(tiny.WAN, in_channels=12),
    vae=dataclasses.replace(tiny.VAE, latents_mean=(1.0, 2.0, 3.0, 4.0), latents_std=(0.5,) * 4),
)  # fmt: skip
ONE = dict(experts=("high",), boundary=None)  # half the time
MODELS = {
    "t2v": dataclasses.replace(tiny.MODEL, **ONE),
    "i2v": dataclasses.replace(  # as Wan2.1's
        I2V, wan=dataclasses.replace(I2V.wan, image_dim=8, added_kv_proj_dim=32), image=CLIP, **ONE
    ),
    "ti2v": dataclasses.replace(
        tiny.MODEL, **ONE,
        wan=dataclasses.replace(tiny.WAN, in_channels=48, out_channels=48),
        vae=dataclasses.replace(
            tiny.VAE, z_dim=48, is_residual=True, latents_mean=(0.3,) * 48, latents_std=(1.5,) * 48
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_run_on_clips_has_videos_of_the_shipped_prompts(name, tmp_path, monkeypatch):
    model, path = MODELS[name], tiny.save_model(tmp_path, MODELS[name])
    clips, cache = tiny.write_clips(tmp_path / "clips"), tmp_path / "cache"
    flags = ["--model", path, "--fps", "keep", "--frames", "5", "--size", "16x16"]
    data_command.main(["cache", str(clips), "--out", str(cache), *flags])
    own = dict(
        algorithm="sft", experts=model.experts, prompts="", eval__prompts="previews", steps=1,
        data__path=str(cache), data__batch=8, data__holdout=0.0, data__first_frame=name == "ti2v",
        lora__targets=tiny.TARGETS, sampling__steps=2, eval__samples=2,
    )  # fmt: skip
    config = tiny.make_config(path, tmp_path, **own)
    del config.reward["tests.tiny:brightness"]

    loaded, conds, load, make = [], [], setup.load_model, sampling.clips
    note = lambda *args, **kw: loaded.extend(kw["components"]) or load(*args, **kw)
    spy = lambda *args, **kw: conds.append(kw["cond"]) or make(*args, **kw)
    monkeypatch.setattr(setup, "load_model", note)
    monkeypatch.setattr(sampling, "clips", spy)
    run = train.main(config)

    encoder = ["image_encoder"] * (name == "i2v")
    assert loaded == ["text_encoder", "vae", *encoder, *model.experts]  # gone before the experts
    texts, files = (previews.texts(), ()) if name == "t2v" else previews.images()
    for step in (0, 1):
        folder = run / f"samples/step_{step:06d}"
        said = [file.read_text().strip() for file in sorted(folder.glob("*.txt"))]
        assert said == list(texts[:2]) and len(list(folder.glob("*.mp4"))) == 2
        assert all(file.stat().st_size > 0 for file in folder.glob("*.mp4"))

    assert len(conds) == 2  # before and after
    if name == "t2v":
        assert conds == [None, None]
        return
    coder = diffusers.AutoencoderKLWan.from_pretrained(f"{path}/vae")
    for i, file in enumerate(files[:2]):
        box = (176, 0, 656, 480)  # the middle of 832x480
        pixels = Image.open(file).convert("RGB").resize((16, 16), Image.Resampling.LANCZOS, box)
        x_BCTHW = torch.zeros((1, 3, 1 if name == "ti2v" else 5, 16, 16))  # 0 is grey
        x_BCTHW[0, :, 0] = torch.from_numpy(np.asarray(pixels) / 127.5 - 1).movedim(-1, 0)
        with torch.no_grad():
            z = np.moveaxis(coder.encode(x_BCTHW).latent_dist.mode().numpy(), 1, -1)
        want = (z - model.vae.latents_mean) / model.vae.latents_std
        found = conds[0]["first"] if name == "ti2v" else conds[0]["latents"][..., 4:]
        np.testing.assert_allclose(found[i], want[0], atol=2e-5)
    if name == "i2v":
        tokens_PSE = conds[0]["image"]
        assert tokens_PSE.shape == (2, 5, 8) and np.abs(tokens_PSE[0] - tokens_PSE[1]).max() > 1e-3


@pytest.fixture(scope="module")
def i2v(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), I2V)


def test_an_image_model_takes_no_prompts_without_first_frames(i2v, tmp_path):
    config = tiny.make_config(i2v, tmp_path)
    with pytest.raises(ValueError, match="eval.prompts has no first frames, .*; set it to 'previ"):
        train.main(config)
    assert setup.eval_prompts(tiny.make_config(i2v, tmp_path, eval__prompts=""), I2V) == ((), ())
    bare = dataclasses.replace(MODELS["i2v"], image=None)
    config.eval.prompts = "previews"
    with pytest.raises(ValueError, match="has no image_encoder, which the first frames of"):
        setup.eval_prompts(config, bare)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def test_prompts_that_a_reward_cannot_score_are_refused_before_weights(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr(setup, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    config = tiny.make_config(model, tmp_path, eval__prompts="previews")
    config.reward.shapes = 1.0
    line = "config.eval.prompts is 'previews'; set it to .* reward shapes: caption 'A woman in"
    with pytest.raises(ValueError, match=line) as error:
        train.main(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
    config.eval.prompts = "shapes:heldout:1"
    train.main(config, dry_run=True)
    assert setup.prompts("previews") == previews.texts()
    with pytest.raises(ValueError, match="grammar"):
        shapes.reward.check(previews.texts()[0])
