"""Planner: FLOPs and bytes against hand-computed numbers, and collectives of a hand-written HLO."""

import dataclasses
import math
import types

import jax
import pytest

from tests import tiny
from wanjax import setup as setups
from wanjax.algorithms import steps
from wanjax.models import wan
from wanjax.plan import __main__ as command
from wanjax.plan import advice, chips, compile, hlo

HLO = """HloModule m, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = bf16[4,8]{1,0} all-gather(bf16[1,8]{1,0} %x), dimensions={0}
  %st = (f32[2]{0}, f32[8]{0}) all-gather-start(f32[2]{0} %y), dimensions={0}
  %dn = f32[8]{0} all-gather-done(%st)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %ar = f32[8]{0} all-reduce(f32[8]{0} %v), to_apply=%add
}
"""


NOTED = ', backend_config={"known_trip_count":{"n":"3"}}'
LIMIT = "  %n = s32[]{:T(128)} constant(3), metadata={id=68}\n  ROOT %lt"
TPU = HLO.replace(NOTED, "").replace("  ROOT %lt", LIMIT)


@pytest.mark.parametrize("text", [HLO, TPU])
def test_a_loops_collectives_count_as_often_as_it_runs(text):
    """The number is noted by XLA:CPU and GPU, and the limit of the condition on TPU."""
    found = hlo.collectives(text)
    assert found["all-gather"] == {"count": 6, "bytes": 3 * (4 * 8 * 2 + 8 * 4)}
    assert found["all-reduce"] == {"count": 1, "bytes": 32}


def test_update_flops_by_hand():
    config = lambda remat: wan.WanConfig(1, 2, 1, 3, text_len=5, remat=remat)
    # D 2, F 3, L 4, S 5: dense 12·4·4 + 4·2·3·4 + 4·4·5 = 368, attention 4·2·4·9 = 288
    flops = lambda remat, lora: steps.training_flops(config(remat), (1, 2, 2), lora=lora)
    assert flops("full", True) == 2 * 656 + 368 + 720
    assert flops("none", False) == 656 + 2 * 368 + 720
    assert flops("save_attention", True) == flops("offload", True) == 656 + 2 * 368 + 720
    assert flops("save_matmuls", True) == 656 + 368 + 720


def test_proposed_mesh_divides_batch_and_heads():
    mesh = chips.propose_mesh(64, batch=16, heads=40, held=0, hbm=1)
    assert (mesh["data"], mesh["fsdp"], mesh["context"]) == (16, 1, 4)
    mesh = chips.propose_mesh(8, batch=2, heads=3, held=0, hbm=1)
    assert (mesh["data"], mesh["context"]) == (2, 4)


@pytest.mark.parametrize(
    "held, data, fsdp", [(220, 16, 1), (230, 8, 2), (900, 4, 4), (9999, 1, 16)]
)
def test_proposed_mesh_splits_weights_only_as_far_as_memory_needs(held, data, fsdp):
    """A device of 95 may hold 57, a quarter of what four devices over context hold."""
    mesh = chips.propose_mesh(64, batch=16, heads=40, held=held, hbm=95)
    assert (mesh["data"], mesh["fsdp"], mesh["context"]) == (data, fsdp, 4)


def test_unknown_topology_lists_the_known():
    with pytest.raises(ValueError, match="v9.*v5p:4x4x4.*h100"):
        chips.devices_of("v9:2x2")


def test_a_gpu_that_is_present_compiles_for_more_of_its_kind(monkeypatch):
    asked, jax_devices = [], jax.devices("cpu")
    device = types.SimpleNamespace(device_kind="NVIDIA H200")
    described = types.SimpleNamespace(devices=[device] * 8)

    def describe(*args, **kwargs):
        asked.append((args, kwargs))
        return described

    monkeypatch.setattr(chips.topologies, "get_topology_desc", describe)
    assert len(chips.devices_of("h200:8")[1]) == 8 and not asked  # here: 8 CPU devices
    monkeypatch.setattr(jax, "devices", lambda *backend: jax_devices if backend else [device])
    assert chips.devices_of("h200:8") == ("h200", [device] * 8)
    assert asked == [(("",), {"platform": "cuda", "topology": "1x1x8"})]
    assert chips.devices_of("h100:8") == ("h100", jax_devices[:8]) and len(asked) == 1


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
    assert set(result["phases"]) == PHASES[name] and result["fits"] and not result["note"]
    for phase, facts in result["phases"].items():
        assert facts["arguments"] > 0 and facts["rematerializations"] == 0, phase
        assert facts["flops"] > 0 or phase == "decode"
        assert math.isfinite(facts["peak"])
    assert set(result["trees"]) == {"parameters", "adapters", "optimizer"}
    assert (result["trees"]["parameters"] > 0) != config.model.offload
    moved = [facts["collectives"] for facts in result["phases"].values()]
    assert any("all-reduce" in kinds for kinds in moved)  # gradients over the batch's shards
    text = command.describe(result)
    assert all(phase in text for phase in PHASES[name])


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


def test_a_program_that_the_compiler_refuses_for_its_memory_does_not_fit():
    """XLA:TPU refuses; the memory that it names is the phase's."""

    class Refused:
        def compile(self):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
                "temporaries (16.63G) exceeds available HBM (15.75G)."
            )

    facts, compiled = hlo.measure(Refused(), 7, 2)
    assert compiled is None and facts["temporaries"] == int(16.63 * 2**30) and facts["refused"]
    assert (facts["flops"], facts["calls"], facts["collectives"]) == (7, 2, {})
    with pytest.raises(RuntimeError, match="INTERNAL: broken"):
        hlo._needed("INTERNAL: broken")
    with pytest.raises(RuntimeError, match="space vmem"):  # no lack of HBM: tiles are too large
        hlo._needed("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem: size 16.64M")


def test_a_phase_whose_links_take_longer_says_what_lowers_that(model, tmp_path, monkeypatch):
    config = tiny.make_config(
        model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), **CASES["grpo"]
    )
    chip = dataclasses.replace(chips.CHIPS["cpu"], peak=1e9, link=1.0)
    monkeypatch.setitem(chips.CHIPS, "cpu", chip)
    result = compile.make_plan(config, "cpu:4")
    rollout, update = (result["phases"][name] for name in ("rollout", "update high"))
    assert rollout["link_seconds"] == sum(c["bytes"] for c in rollout["collectives"].values())
    text = command.describe(result)
    assert text.count("its collectives take longer than its products: ") == 3  # decode: unknown
    gathers = {"all-gather": {"count": 1, "bytes": 9}, "all-to-all": {"count": 9, "bytes": 8}}
    rollout["collectives"] = update["collectives"] = gathers
    assert "products: raise config.sampling.batch" in command.describe(result)
    assert "products: raise config.micro_samples" in command.describe(result)
    update["collectives"] = {"all-to-all": {"count": 1, "bytes": 9}}
    assert "products: lower config.mesh.context" in command.describe(result)
    for phase in result["phases"].values():
        phase["link_seconds"] = 0.0
    assert "than its products" not in command.describe(result)


def test_a_plan_that_does_not_fit_names_changes_that_do(model, tmp_path, monkeypatch):
    config = tiny.make_config(model, tmp_path, lora__targets=(r"blocks/attn1/to_q",), mesh__data=4)
    peaks = [advice.peak(compile.make_plan(config, "cpu:4"))]
    half = config.copy_and_resolve_references()
    half.update_from_flattened_dict({"micro_samples": 4, "sampling.batch": 4})
    peaks.append(advice.peak(compile.make_plan(half, "cpu:4")))
    assert peaks[1] < peaks[0]
    chip = dataclasses.replace(chips.CHIPS["cpu"], hbm=sum(peaks) / 2 / 0.97)
    monkeypatch.setitem(chips.CHIPS, "cpu", chip)
    result = compile.make_plan(config, "cpu:4")
    assert not result["fits"]
    (option,) = advice.advise(config, "cpu:4", most=1)
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(option["changes"])
    assert compile.make_plan(changed, "cpu:4")["fits"]
    result["advice"] = [option]
    assert "fits with config." in command.describe(result)
    result["advice"] = []
    assert "no change that was tried" in command.describe(result)
