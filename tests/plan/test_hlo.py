"""What XLA says of a program: collectives of a hand-written HLO, and programs that it refuses."""

import jax
import pytest

from wanjax.plan import hlo

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
