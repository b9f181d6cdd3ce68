"""Planner: FLOPs and bytes against hand-computed numbers, and collectives of a hand-written HLO."""

import pytest

from wanjax import plan
from wanjax.models import wan

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


def test_a_loops_collectives_count_as_often_as_it_runs():
    found = plan.collectives(HLO)
    assert found["all-gather"] == {"count": 6, "bytes": 3 * (4 * 8 * 2 + 8 * 4)}
    assert found["all-reduce"] == {"count": 1, "bytes": 32}


def test_update_flops_by_hand():
    config = wan.WanConfig(1, 2, 1, 3, text_len=5)
    # D 2, F 3, L 4, S 5: dense 12·4·4 + 4·2·3·4 + 4·4·5 = 368, attention 4·2·4·9 = 288
    assert plan.update_flops(config, (1, 2, 2), lora=True, remat=True) == 2 * 656 + 368 + 720
    assert plan.update_flops(config, (1, 2, 2), lora=False, remat=False) == 656 + 2 * 368 + 720


def test_proposed_mesh_divides_batch_and_heads():
    mesh = plan.propose_mesh(64, batch=16, heads=40)
    assert (mesh["fsdp"], mesh["context"]) == (16, 4)
    assert plan.propose_mesh(8, batch=2, heads=3)["fsdp"] == 2


def test_unknown_topology_lists_the_known():
    with pytest.raises(ValueError, match="v9.*v5p:4x4x4.*h100"):
        plan.devices_of("v9:2x2")
