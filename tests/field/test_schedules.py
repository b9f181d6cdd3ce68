"""Schedules: integer timesteps of the original samplers."""

import numpy as np
import pytest

from tests.field.table import Case, cases
from wanjax import schedule


def original_unipc(steps: int, shift: float):
    """(sigmas, timesteps) by the operations and dtypes of Wan2.1's FlowUniPCMultistepScheduler:
    limits as float32, a line between them and the shift in float64, whole timesteps."""
    alphas = np.linspace(1, 1 / 1000, 1000)[::-1]
    limits = (1.0 - alphas).astype(np.float32)
    sigmas = np.linspace(float(limits[0]), float(limits[-1]), steps + 1)[:-1]
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    return sigmas, (sigmas * 1000).astype(np.int64)


@cases(
    Case("wan_unipc at shift 1", "the original's whole timesteps at 1 to 100 steps", "", 1.0),
    Case("wan_unipc at shift 3", "the original's whole timesteps at 1 to 100 steps", "", 3.0),
    Case("wan_unipc at shift 12", "the original's whole timesteps at 1 to 100 steps", "", 12.0),
)
def test_wan_unipc_is_the_originals(case):
    for steps in range(1, 101):
        made = schedule.make_schedule("wan_unipc", steps, case.given)
        sigmas, timesteps = original_unipc(steps, case.given)
        np.testing.assert_array_equal(made.timesteps, timesteps, err_msg=f"{steps} steps")
        np.testing.assert_allclose(made.sigmas[:-1], sigmas, rtol=1e-12)


def test_fifty_steps_by_hand():
    """At shift 1 the tenth of 37 steps of 27 is at t = 999 - 270; the decimal 0.999 gives 728."""
    made = schedule.make_schedule("wan_unipc", 37, 1.0)
    assert made.timesteps[10] == pytest.approx(729)
