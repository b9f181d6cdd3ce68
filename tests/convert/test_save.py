"""convert/save.py: the folders that diffusers loads."""

import json

import diffusers
import numpy as np
import pytest
import transformers

from convert import disk, files, load, save
from tests.convert import tiny


def test_diffusers_and_transformers_load_the_saved_folder(saved):
    folder, params = saved
    for expert, component in disk.EXPERTS.items():
        model, info = diffusers.WanTransformer3DModel.from_pretrained(
            folder / component, output_loading_info=True
        )
        assert not any(info.values())
        _check_state(model, params[expert])
    vae = diffusers.AutoencoderKLWan.from_pretrained(folder / "vae")
    _check_state(vae, params["vae"])
    text = transformers.UMT5EncoderModel.from_pretrained(folder / "text_encoder")
    _check_state(text, params["text_encoder"])
    pipe = diffusers.WanPipeline.from_pretrained(folder, tokenizer=None)
    assert pipe.config.boundary_ratio == 0.875
    assert pipe.scheduler.config.flow_shift == 3.0


def _check_state(model, tree):
    state = {k: v for k, v in model.state_dict().items() if k != "encoder.embed_tokens.weight"}
    mine = save.of_tree(tree)
    assert set(state) == set(mine)
    for name, value in state.items():
        np.testing.assert_array_equal(value.numpy(), mine[name].all())


def test_shards_have_the_right_index(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD", 20_000)
    save.save_diffusers(tiny.params(), tiny.CONFIG, tmp_path / "m")
    index = json.loads(
        (tmp_path / "m/transformer/diffusion_pytorch_model.safetensors.index.json").read_text()
    )
    model = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "m/transformer")
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert tiny.equal(load.load(tmp_path / "m")[0], tiny.params())


def test_output_appears_whole_or_not_at_all(tmp_path, saved):
    with pytest.raises(ValueError, match="exists and is not empty"):
        save.save_diffusers(saved[1], tiny.CONFIG, saved[0])
    wrong = {"high": {"blocks": {"x": {"kernel": np.zeros((2, 3, 3), object)}}}}
    with pytest.raises(KeyError):
        save.save_diffusers(wrong, tiny.CONFIG, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
