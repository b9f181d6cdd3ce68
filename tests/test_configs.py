"""Every recipe passes --dry_run from a preset's shapes alone: no weights, no data."""

import fnmatch
import importlib

import pytest

from configs import default
from wanjax import setup, train, trees
from wanjax.models.presets import MODELS

A14B, SMALL = "wan2.2_t2v_a14b", "wan2.1_t2v_1.3b"
RECIPES = [
    ("grpo_wan22", "", A14B), ("grpo_wan22", "small", A14B), ("grpo_wan22", "miles", A14B),
    ("grpo_wan21", "", SMALL), ("grpo_wan21", "small", SMALL),
    ("nft_wan22", "", A14B), ("nft_wan22", "small", A14B),
    ("nft_wan21", "", SMALL), ("nft_wan21", "small", SMALL),
    ("dmd2_wan22", "", A14B), ("dmd2_wan22", "high", A14B), ("dmd2_wan22", "low", A14B),
    ("dmd2_wan21", "", SMALL), ("dmd2_wan21", "14b", SMALL),
    ("sft_wan22", "", A14B), ("sft_wan22", "low", A14B), ("sft_wan22", "high", A14B),
    ("sft_wan21", "", SMALL), ("sft_wan22", "", "wan2.2_i2v_a14b"),
    ("sft_wan21", "", "wan2.1_i2v_14b"),
]  # fmt: skip


@pytest.mark.parametrize("recipe, preset, model", RECIPES)
def test_recipe_makes_videos_of_shipped_prompts_before_and_after(recipe, preset, model):
    config, model = importlib.import_module(f"configs.{recipe}").get_config(preset), MODELS[model]
    prompts, images = setup.eval_prompts(config, model)
    assert len(set(prompts)) == len(prompts) >= 16
    assert len(images) == (16 if "i2v" in model.name else 0)
    assert 2 <= config.eval.samples <= config.eval.number >= 16


@pytest.mark.parametrize("recipe, preset, model", RECIPES)
def test_recipe_passes_a_dry_run_without_weights(recipe, preset, model, tmp_path, capsys):
    module = importlib.import_module(f"configs.{recipe}")
    config = module.get_config(preset)
    config.workdir, config.model.path = str(tmp_path), model
    config.prompts = config.prompts or "shapes:train:2"
    if config.algorithm in ("grpo", "nft"):
        config.reward["tests.tiny:brightness"] = 1.0
    if recipe == "dmd2_wan21" and preset == "14b":
        config.roles.teacher.path = "wan2.1_t2v_14b"
    train.main(config, dry_run=True)
    out = capsys.readouterr().out
    assert "dry run: config, model and shapes fit" in out
    trained = [line for line in out.splitlines() if line.endswith(" trained")]
    assert trained and all("/" in line for line in trained)
    rows = [line.split() for line in out.splitlines()]
    (total,) = (float(row[1]) for row in rows if row[:1] == ["all"])  # GiB of the memory table
    steps = [row for row in rows if row[:1] and row[0].isdigit()]  # of the schedule
    assert total > 1 and len(steps) == len(config.sampling.sigmas or range(config.sampling.steps))
    assert not list(tmp_path.iterdir())
    assert config.name.startswith(recipe) and "python -m wanjax.train" in module.__doc__


def test_unknown_presets_are_named():
    for recipe in {name for name, _, _ in RECIPES}:
        with pytest.raises(ValueError, match="'gigantic' is unknown"):
            importlib.import_module(f"configs.{recipe}").get_config("gigantic")


def test_every_rule_for_numbers_names_a_key():
    keys = [path.replace("/", ".") for path in trees.flatten(default.get_config().to_dict())]
    for patterns in default.NUMBERS.values():
        assert all(fnmatch.filter(keys, pattern) for pattern in patterns)
