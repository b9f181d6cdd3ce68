"""Plans: every algorithm's programs compile from shapes, and what training holds."""

import gc
import math

import jax
import numpy as np
import pytest
import transformers

from tests import tiny
from wanjax import rewards, trees
from wanjax import setup as setups
from wanjax import state as states
from wanjax.algorithms import Tools
from wanjax.data import Item
from wanjax.parallel import sharding
from wanjax.plan import __main__ as command
from wanjax.plan import chips, compile


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("plan"))


CASES = {
    "grpo": {"mesh__data": 1, "mesh__fsdp": 4, "micro_samples": 4},
    "nft": {
        "algorithm": "nft", "guidance__high": 1.0, "guidance__low": 1.0, "micro_samples": 4,
        "model__offload": True,
    },
    "sft": {"algorithm": "sft", "data__batch": 8, "lora__rank": 0, "mesh__data": 4},
    "dmd2": {
        "algorithm": "dmd2", "guidance__high": 1.0, "guidance__low": 1.0, "micro_samples": 4,
        "sampling__sigmas": (1.0, 0.9, 0.6), "sampling__grid": "explicit",
        "dmd2__gan_weight": 0.1,
    },
}  # fmt: skip
PHASES = {
    "grpo": {"rollout", "decode", "update high", "update low"},
    "nft": {"rollout", "decode", "update high", "update low"},
    "sft": {"update high", "update low"},
    "dmd2": {f"{what} {e}" for what in ("rollout", "student", "critic") for e in ("high", "low")},
}


@pytest.mark.parametrize("name", CASES)
def test_every_algorithms_steps_compile_from_shapes(model, tmp_path, name):
    config = tiny.make_config(model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), **CASES[name])
    result = compile.make_plan(config, "cpu:4")
    others = {"encode", "evaluation", "evaluation decode"}
    assert set(result["phases"]) == PHASES[name] | others and result["fits"] and not result["note"]
    residents = result["residents"]
    for phase, facts in result["phases"].items():
        assert facts["arguments"] > 0 and facts["rematerializations"] == 0, phase
        assert facts["flops"] > 0 or phase == "decode" or facts["calls"] == 0
        assert facts["held"] < facts["peak"] <= result["total"] < math.inf
        assert phase == "encode" or facts["held"] > residents["experts"] + residents["vae"]
    assert result["total"] in [facts["peak"] for facts in result["phases"].values()]
    assert result["uncounted"] == ["tests.tiny:brightness"]
    assert (residents["experts"] > 0) != ("model__offload" in CASES[name])
    assert all(residents[name] > 0 for name in ("moments", "vae", "contexts", "batch"))
    assert (residents["adapters"] > 0) == ("lora__rank" not in CASES[name])
    for phase in PHASES[name] - {"decode"}:  # what is trained is replaced in place
        trains = phase.split()[0] in ("update", "student", "critic")
        assert (result["phases"][phase]["alias"] > 0) == trains
    moved = [facts["collectives"] for facts in result["phases"].values()]
    assert any("all-reduce" in kinds for kinds in moved)  # gradients over the batch's shards
    text = command.describe(result)
    assert all(phase in text for phase in PHASES[name] | others)
    assert text.index("total ") < text.index("resident ") < text.index("brightness")


def test_residents_are_the_sizes_counted_by_hand(model, tmp_path):
    """Of GRPO on one device with a reward's tower and a text encoder that stays; four calls of the
    rollout make two samples of 5 x 16 x 16 pixels each."""
    tower = tmp_path / "tower"
    vision = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    text = vision | dict(vocab_size=20, max_position_embeddings=5, eos_token_id=2)
    vision |= dict(image_size=28, patch_size=14)
    transformers.CLIPConfig(
        vision_config=vision, text_config=text, projection_dim=6
    ).save_pretrained(tower)
    config = tiny.make_config(
        model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), mesh__data=1, sampling__batch=2,
        model__text_encoder="device",
    )  # fmt: skip
    config.reward = {f"clipscore?model={tower}": 1.0}
    result = compile.make_plan(config, "cpu:1")
    found, count = result["residents"], {k: trees.count(v) for k, v in tiny.parameters().items()}
    assert found["experts"] == 4 * (count["high"] + count["low"])
    assert found["vae"] == 4 * count["vae"]
    layer = 4 * (8 * 8 + 8) + (8 * 12 + 12) + (12 * 8 + 8) + 4 * 8  # q k v o, fc1, fc2, norms
    image = 8 + 14 * 14 * 3 * 8 + 5 * 8 + 2 * layer + 4 * 8 + 8 * 6  # class, patches, positions
    words = 20 * 8 + 5 * 8 + 2 * layer + 2 * 8 + 8 * 6
    assert found["reward towers"] == 4 * (image + words + 1)
    vocabulary = setups.models(config, by_name=True)[0].text.vocab_size
    layer = 4 * 24 * 16 + 32 * 2 + 3 * 24 * 32 + 2 * 24  # q k v o, positions, gate up down, norms
    assert found["text encoder"] == 4 * (vocabulary * 24 + layer + 24)
    adapter = 2 * (32 * 2 + 2 * 32)  # a, b of two blocks
    assert 0 < found["adapters"] - 4 * 2 * adapter < 100  # scales
    assert 0 < found["moments"] - 2 * 4 * 2 * adapter < 100  # counts
    assert found["contexts"] == 4 * (2 + 1) * 40 * 24
    assert found["evaluation contexts"] == 4 * (2 + 1) * 40 * 24
    transitions = 2 * 2 * 8 * (2 * 2 * 2 * 4)  # x, x_next: an expert's each, 8 samples
    assert 0 < found["batch"] - 4 * transitions < 400  # levels, scores, log-probs
    assert found["videos"] == 2 * 2 * 5 * 16 * 16 * 3
    assert found["rewards at work"] > 4 * 16 * 28 * 28 * 3
    assert not result["uncounted"] and "reward 1 clipscore" in result["phases"]
    kept = {name: n for name, n in found.items() if name != "evaluation contexts"}
    update, rollout = result["phases"]["update high"], result["phases"]["rollout"]
    assert rollout["held"] == sum(kept.values()) + rollout["others"]
    assert update["held"] == sum(kept.values()) - kept["videos"] - kept["rewards at work"]


def test_residents_are_what_a_step_leaves_between_collect_and_update(model, tmp_path):
    """Oracle: the arrays that live on the device then."""
    targets = (r"blocks/attn[12]/to_q", r"blocks/ffn\.net\.2")
    config = tiny.make_config(model, tmp_path, mesh__data=1, lora__rank=8, lora__targets=targets)
    planned = compile.make_plan(config, "cpu:1")["residents"]
    chip = chips.CHIPS["cpu"]
    run, mesh = compile.make_setup(config, "", chip), sharding.make_mesh({}, jax.devices()[:1])
    algorithm, before = setups.ALGORITHMS["grpo"], jax.live_arrays()
    with sharding.use_mesh(mesh):
        weights = setups.load(config, mesh, run.model, run.roles)
        state = states.place(algorithm.init(jax.random.key(0), run, weights), mesh)
        rows = np.ones((3, 40, 24), np.float32)
        tools = Tools(
            setups.load_vae(config, mesh), jax.numpy.asarray(rows[:1]),
            rewards.combine(["tests.tiny:brightness"]),
        )  # fmt: skip
        batch = algorithm.collect(state, run, Item(["red", "blue"], rows[1:]), tools)
    gc.collect()
    known = {id(x) for x in before}
    live = sum(x.nbytes for x in jax.live_arrays() if id(x) not in known)
    names = ("experts", "adapters", "moments", "vae", "contexts", "batch")
    assert batch.version == 0
    assert live == pytest.approx(sum(planned[name] for name in names), rel=0.01)


def test_a_text_encoder_counts_as_long_as_it_stays(model, tmp_path):
    """Freed, it is alone on the device; fetched from the host, it comes on top of the rest."""

    def encode(where):
        config = tiny.make_config(
            model, tmp_path, algorithm="sft", lora__targets=(r"blocks/attn1/to_q",), mesh__data=1,
            model__text_encoder=where,
        )  # fmt: skip
        result = compile.make_plan(config, "cpu:1")
        return result["phases"]["encode"]["held"], result["residents"]

    alone, _ = encode("free")
    fetched, rest = encode("host")
    loaded = ("experts", "adapters", "moments", "vae", "contexts")
    assert fetched - alone == sum(rest[name] for name in loaded) and rest["text encoder"] == 0


def test_towers_have_the_published_sizes():
    """986,109,441 parameters of PickScore_v1, 427,616,513 of clip-vit-large-patch14."""
    names = ["pickscore?model=yuvalkirstain/PickScore_v1", "clipscore?model=/nowhere", "ocr", "a:b"]
    found, unknown = rewards.forwards(names)
    counts = [trees.count(given[0]) for _, given, _ in found.values()]
    assert counts == [986_109_441, 427_616_513] and unknown == ["a:b"]


def test_what_training_holds(model, tmp_path):
    """A full fine-tuning: weights, two moments, gradients; an expert that waits on the host does
    not count; the critic of DMD2 trains too."""

    def held(name, **changes):
        config = tiny.make_config(model, tmp_path, **CASES[name] | changes)
        run = compile.make_setup(config, "", chips.CHIPS["cpu"])
        weights = setups.weight_shapes(config, run.model, run.roles)["student"]
        sizes = [sum(x.size for x in jax.tree.leaves(w)) for w in weights.values()]
        return compile.held(config, run), sizes, compile._whole(weights["high"])

    full, (high, low), weights = held("sft")
    moments_and_gradients = 12 * (high + low)
    assert 0 <= full - 2 * weights - moments_and_gradients < 100  # counts of steps
    assert held("nft", model__offload=False)[0] - held("nft")[0] == weights
    adapters = (held("grpo")[0] - 2 * weights) / 4  # themselves, two moments, gradients
    critic = held("dmd2", dmd2__gan_weight=0.0)[0] - 2 * weights - 5 * adapters  # 5: an average
    assert abs(critic - 4 * adapters) < 1000 < adapters  # but for counts of steps
