"""From a ConfigDict to settings: what is refused, in one line, before a byte of weights is read."""

import json
import math
import shutil

import pytest

from configs import default, quickstart, sft_wan22
from convert import weights
from tests import tiny
from wanjax import setup as setups
from wanjax import train
from wanjax.rewards import shapes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("changes, text", [
    (dict(mesh__data=3), "change config.mesh"),
    (dict(experts=("mid",)), "config.experts names 'mid'"),
    (dict(algorithm="ppo"), "config.algorithm is 'ppo'"),
    (dict(sampling__height=20), "config.sampling.height"),
    (dict(sampling__frames=6), "config.sampling.frames is 6"),
    (dict(sampling__vae_tile=20), "config.sampling.vae_tile is 20"),
    (dict(sampling__grid="cosine"), "sampling.grid is 'cosine'"),
    (dict(sampling__solver="rk9"), "solver is 'rk9'; set config.sampling.solver"),
    (dict(eval__grid="explicit"), r"config.eval with its own grid 'explicit': sampling.sigmas is"),
    (dict(eval__solver="rk9"), "solver is 'rk9'; .* or config.eval.solver"),
    (dict(sampling__batch=3), "config.sampling.batch = 3"),
    (dict(sde__window=7), "window"),
    (dict(prompts="missing.txt"), "no prompts file at missing.txt"),
    (dict(micro_samples=5), "a batch of 3 samples does not divide over mesh.data"),
    (dict(micro_samples=4), "a batch of 4 samples does not divide over mesh.data"),
    (dict(micro_steps=0), "config.micro_steps is 0; expected at least 1"),
    (dict(save_every=0), "config.save_every is 0; expected at least 1"),
    (dict(steps=-1), "config.steps is -1; expected at least 0"),
    (dict(adv_clip_max=0.0), "config.adv_clip_max is 0.0; expected above 0"),
    (dict(clip__low=math.nan), "config.clip.low is nan; expected above 0"),
    (dict(data__caption_dropout=1.5), "config.data.caption_dropout is 1.5; expected in .0, 1."),
    (dict(roles__critic__optim__low__b1=1.0), "roles.critic.optim.low.b1 is 1.0; expected in .0, "),
    (dict(guidance__mode="both"), "config.guidance.mode is 'both'"),
    (dict(model__remat="some"), "config.model.remat is 'some'; expected one of .'none', 'full'"),
    (dict(model__dtype="half"), "config.model.dtype is 'half'"),
    (dict(roles__critic__param_dtype="fp8"), "config.roles.critic.param_dtype is 'fp8'"),
    (dict(experts=("low", "low")), "config.experts is .'low', 'low'.; expected .*, each once"),
    (dict(lora__targets=()), "config.lora.targets is empty"),
    (dict(name=""), "config.name is empty"),
    (dict(sde__eta=-1.0), "sde.eta is -1.0"),
    (dict(model__vae_dtype="int8"), "config.model.vae_dtype is 'int8'"),
    (dict(model__text_encoder="cpu"), "config.model.text_encoder is 'cpu'; expected one of"),
    (dict(lora__rank=0, lora__start=("a.safetensors",)), "config.lora.rank is 0"),
    (dict(lora__rank=0, model__offload=True), "model.offload .* found lora.rank 0"),
    (dict(algorithm="dmd2", model__offload=True), "model.offload .* found algorithm 'dmd2'"),
    (dict(reward_failure="wait"), "config.reward_failure is 'wait'"),
    (dict(best_of=3), "config.best_of is 3"),
    (dict(updates=5), "config.updates"),
    (dict(lora__targets=("blocks/attn3/q",)), "matches no layer"),
    (dict(model__path="nowhere"), "nowhere"),
    (dict(wandb="yes"), "config.wandb is 'yes'"),
])  # fmt: skip
def test_config_errors_come_before_weights_and_name_the_key(
    model, tmp_path, monkeypatch, changes, text
):
    monkeypatch.setattr(weights, "load", _not_reached)
    config = tiny.make_config(model, tmp_path, **changes)
    with pytest.raises(ValueError, match=text) as error:
        train.main(config)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def _not_reached(*args, **kwargs):
    raise AssertionError("weights are read")


@pytest.mark.parametrize("changes, text", [
    (dict(mesh__data=1, mesh__fsdp=3), "mesh .* has 3 places but 8 devices"),
    (dict(mesh__data=-1, micro_samples=3), "a batch of 2 samples does not divide over mesh.data"),
    (dict(sampling__batch=4), "a batch of 4 samples does not divide over mesh.data"),
    (dict(experts=("middle",)), "config.experts names 'middle' but the model has"),
    (dict(sampling__height=20), "size 20x16 does not divide"),
    (dict(lora__targets=("blocks/attn9/q",)), "matches no layer"),
    (dict(eval__steps=2, eval__solver="none"), "config.eval with its own"),
])  # fmt: skip
def test_what_the_headers_tell_is_refused_before_a_byte_of_weights(
    model, tmp_path, monkeypatch, changes, text
):
    monkeypatch.setattr(weights, "load", _not_reached)
    with pytest.raises(ValueError, match=text) as error:
        train.main(tiny.make_config(model, tmp_path, **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused_by_its_headers(model, tmp_path, monkeypatch):
    broken = shutil.copytree(model, tmp_path / "broken")
    config = json.loads((broken / "transformer/config.json").read_text())
    (broken / "transformer/config.json").write_text(json.dumps(config | {"num_layers": 3}))
    second = json.loads((broken / "transformer_2/config.json").read_text())
    (broken / "transformer_2/config.json").write_text(json.dumps(second | {"num_layers": 3}))
    monkeypatch.setattr(weights, "load", _not_reached)
    with pytest.raises(ValueError, match="transformer has .* tensors, expected .*; .* missing"):
        train.main(tiny.make_config(str(broken), tmp_path, prompts="shapes:train:1"))


def test_parts_of_the_grammars_prompts_are_disjoint_and_complete():
    whole = setups.prompts("shapes:train:1")
    parts = [setups.prompts(f"shapes:train:1:{i}/3") for i in range(3)]
    assert sorted(sum(parts, ())) == sorted(whole) == sorted(shapes.prompts("train", 1))
    assert len(set(whole)) == sum(map(len, parts))
    for wrong in ("shapes:train", "shapes:test:1", "shapes:train:3", "shapes:train:1:2/2"):
        with pytest.raises(ValueError, match=f"prompts '{wrong}' are unknown; expected a file"):
            setups.prompts(wrong)


def test_an_unknown_key_is_named_with_the_nearest_one():
    config = default.get_config().to_dict()
    config["optim"]["high"]["learning_rate"] = 1.0
    config["sampling"]["shfit"] = 3.0
    with pytest.raises(ValueError, match="did you mean config.sampling.shift"):
        setups.check_keys({"sampling": config["sampling"]}, default.get_config().to_dict())
    with pytest.raises(ValueError, match=r"config.optim.high.learning_rate is unknown"):
        setups.check_keys({"optim": config["optim"]}, default.get_config().to_dict())


def test_the_quickstart_config_has_only_known_keys():
    setups.check_keys(quickstart.get_config().to_dict(), default.get_config().to_dict())


def test_the_sft_config_has_only_known_keys():
    for preset in ("", "high", "low"):
        config = sft_wan22.get_config(preset)
        setups.check_keys(config.to_dict(), default.get_config().to_dict())
    with pytest.raises(ValueError, match="preset 'mid' is unknown"):
        sft_wan22.get_config("mid")


def test_a_second_run_finds_its_prompts_encoded_and_reads_no_text_encoder(tmp_path, monkeypatch):
    model = tiny.save_model(tmp_path)
    config = tiny.make_config(model, tmp_path, text_cache=str(tmp_path / "text"))
    found, prompts, read = weights.model_config(model), ["", "red circle"], []
    load = setups.load_model
    spy = lambda *args, **kwargs: read.append(kwargs["components"]) or load(*args, **kwargs)
    monkeypatch.setattr(setups, "load_model", spy)
    want = setups.contexts(config, None, found, prompts)(prompts)
    again = setups.contexts(config, None, found, prompts)
    assert read == [("text_encoder",)] and again.params is None
    assert (again(prompts) == want).all()
    config.model.text_dtype = "bfloat16"  # rows of their own
    rounded = setups.contexts(config, None, found, prompts)(prompts)
    assert len(read) == 2 and rounded.dtype == "bfloat16"
    config.model.text_encoder, config.text_cache = "host", ""
    kept = setups.contexts(config, None, found, prompts)
    assert kept.params is not None and (kept(["red circle"]) == rounded[1:]).all()
