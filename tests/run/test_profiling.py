"""A profile of the steps that were asked for: a trace with their numbers and the phases in them."""

import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from wanjax import setup, train
from wanjax.run import metrics, profiling


def _events(folder):
    """{name: [its numbers]} of the events that a trace has of this process's threads."""
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    found = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in (event for line in plane.lines for event in line.events):
            found.setdefault(event.name, []).append(dict(event.stats).get("step_num"))
    return found


@pytest.mark.parametrize("text, total, steps", [
    ("", 0, []), ("3:5", 5, [3, 4]), ("0:1", 9, [0]),
])  # fmt: skip
def test_steps_are_first_and_end(text, total, steps):
    assert [*profiling.steps_of(text, total)] == steps


@pytest.mark.parametrize("text", ["3", "3:3", "5:3", "-1:2", "a:b", "3:5:7", "9:11"])
def test_other_words_and_steps_are_refused_with_the_config(text, tmp_path):
    config = tiny.make_config(str(tmp_path / "model"), tmp_path, steps=10, profile=text)
    with pytest.raises(ValueError, match=rf"^config.profile is '{text}'; expected .*the 10 of"):
        setup.check(config.to_dict())


def test_a_loop_without_a_profile_is_the_plain_one(tmp_path):
    said = []
    assert profiling.profiled(range(4), range(0), tmp_path, said.append) == range(4) and not said
    assert profiling.profiled(range(4, 9), range(2, 4), tmp_path, said.append) == range(4, 9)
    assert said == ["profile  the steps before 4 are past; nothing is traced"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first, traced", [(0, [2, 3]), (3, [3])])  # the second resumes within
def test_a_trace_has_the_steps_their_phases_and_programs(tmp_path, first, traced):
    said, seen = [], []
    double = jax.jit(lambda x: 2 * jnp.sin(x))
    for step in profiling.profiled(range(first, 6), range(2, 4), tmp_path, said.append):
        with metrics.phase({}, f"collect of {step}"):
            double(jnp.ones(8)).block_until_ready()
        seen.append(step)
    assert seen == [*range(first, 6)]
    events = _events(tmp_path / "profile")
    assert events["step"] == traced
    assert [name for name in events if "collect of" in name] == [f"collect of {n}" for n in traced]
    assert any("PjitFunction" in name for name in events), events
    assert said == [f"profile  steps {traced[0]} to 3: tensorboard --logdir {tmp_path / 'profile'}"]


def test_a_trace_reaches_an_object_store(bucket, tmp_path):
    from wanjax import paths

    folder = paths.resolve(bucket)
    for _ in profiling.profiled(range(2), range(1, 2), folder, print):
        jnp.ones(3).block_until_ready()
    paths.copy_folder(f"{bucket}/profile", tmp_path / "copy")
    assert _events(tmp_path / "copy")["step"] == [1]


@pytest.mark.slow
def test_the_trainer_traces_its_steps(tmp_path, capsys):
    config = tiny.make_config(tiny.save_model(tmp_path), tmp_path, steps=3, profile="1:2")
    run = train.main(config)
    events = _events(run / "profile")
    assert events["step"] == [1]
    assert {"data", "collect", "update"} <= events.keys()
    assert f"profile  steps 1 to 1: tensorboard --logdir {run / 'profile'}" in (
        capsys.readouterr().out
    )
