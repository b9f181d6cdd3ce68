"""What is alive between two steps of a run: one copy of what is trained, and no batch."""

import gc
import sys
import weakref

import jax
import numpy as np
import pytest

from tests import tiny
from wanjax import setup as setups
from wanjax import train, trees

SLACK = 24_000  # bytes of counters, keys and metrics; an expert of the tiny model has 230,000
CASES = {
    "grpo": dict(kl__high=0.1, kl__low=0.1),
    "nft": dict(guidance__high=1.0, guidance__low=1.0),
    "sft": dict(prompts="", data__batch=8),
    "dmd2": dict(
        guidance__high=1.0, guidance__low=1.0, sampling__grid="explicit", group_size=4,
        sampling__sigmas=(1.0, 0.75, 0.5, 0.25), dmd2__student_every=1, dmd2__ema_start=0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def clips(model, tmp_path_factory):
    """A cache of a few clips."""
    from wanjax.data.__main__ import main

    folder = tiny.write_clips(tmp_path_factory.mktemp("clips"))
    out = tmp_path_factory.mktemp("cache") / "cache"
    sizes = ["--fps", "16", "--size", "16x16", "--frames", "5", "--frames", "1"]
    main(["cache", str(folder), "--model", model, "--out", str(out), *sizes])
    return str(out)


def _bytes(trees) -> int:
    """Bytes of the different arrays of trees."""
    return sum({id(x): x.nbytes for x in jax.tree.leaves(trees) if hasattr(x, "nbytes")}.values())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 0])
@pytest.mark.parametrize("name", CASES)
def test_between_steps_only_the_state_is_alive(model, clips, tmp_path, monkeypatch, name, rank):
    own = CASES[name] | ({"data__path": clips} if name == "sft" else {})
    own |= dict(algorithm=name, lora__rank=rank, steps=2, eval__prompts="")
    config = tiny.make_config(model, tmp_path, **own)
    found, batches, algorithm = [], [], setups.ALGORITHMS[name]
    collect, check = algorithm.collect, train._check_finite

    def spy(*args):
        assert not any(batch() for batch in batches), "the last batch is alive"
        batches.append(weakref.ref(batch := collect(*args)))
        return batch

    def look(previous, saved):
        frame = sys._getframe(1)
        if "updated" in frame.f_locals:  # in the loop, after an update
            gc.collect()
            job, state = frame.f_locals["job"], frame.f_locals["state"]
            alive = sum(x.nbytes for x in jax.live_arrays())
            kept = (state, job.tools.vae, job.tools.uncond_1SE)
            found.append(alive - before - _bytes(kept))
        return check(previous, saved)

    monkeypatch.setattr(algorithm, "collect", spy)
    monkeypatch.setattr(train, "_check_finite", look)
    gc.collect()
    before = sum(x.nbytes for x in jax.live_arrays())
    train.main(config)
    assert len(found) == len(batches) == 2
    assert max(found) < SLACK, f"{found} bytes beside the state"


def test_full_weights_move_though_bfloat16_computes(model, tmp_path):
    """A weight of 1 does not move by 1e-4 in bfloat16: masters and moments are float32."""
    own = dict(model__dtype="bfloat16", model__param_dtype="bfloat16", lora__rank=0, steps=1)
    rates = dict(optim__high__lr=1e-4, optim__low__lr=1e-4)
    config = tiny.make_config(model, tmp_path, experts=("high",), eval__prompts="", **own, **rates)
    states = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_finish", lambda job, state, started: states.append(state))
        train.main(config)
    (state,) = states
    student = state.params["student"]
    masters = {x.dtype for x in jax.tree.leaves(student["high"])}
    moments = {x.dtype for x in jax.tree.leaves(state.opt) if x.ndim}
    high, low = (trees.flatten(student[expert]) for expert in ("high", "low"))
    assert masters == moments == {np.dtype("float32")}
    assert low["blocks/ffn.net.2/kernel"].dtype == "bfloat16"
    moved = np.abs(np.asarray(high["blocks/attn1/norm_q/scale"]) - 1)  # they begin as ones
    assert 0 < moved.max() < 2e-4
