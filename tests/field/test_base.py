"""Base weights: the same run folder with other ones."""

import shutil

import pytest

from tests import tiny
from tests.field.table import Case, cases
from wanjax import train
from wanjax.run import guard


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(model, folder of a run that stopped after its second step)."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny.save_model(folder)
    train.main(tiny.make_config(model, folder, steps=2, eval__prompts="", save_every=2))
    return model, folder


def changed(model, out, part: str):
    """The model with one bit of a component changed."""
    shutil.copytree(model, out / "model")
    (file,) = (out / "model" / part).glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return str(out / "model")


@cases(
    Case(
        "one bit of the low expert changed",
        "refused, or noted with the switch",
        "the base weights of this run have changed since its checkpoint (student/low … -> …); "
        "restore config.model.path…",
        ("transformer_2", "base.student/low"),
    ),
    Case(
        "one bit of the high expert changed",
        "refused, or noted with the switch",
        "…(student/high … -> …)…--config.allow_changes=True",
        ("transformer", "base.student/high"),
    ),
    Case(
        "one bit of the VAE changed",
        "refused, or noted with the switch",
        "…(vae … -> …)…--config.allow_changes=True",
        ("vae", "base.vae"),
    ),
)
def test_other_base_weights_are_refused(case, started, tmp_path):
    model, folder = started
    part, key = case.given
    shutil.copytree(folder / "run", tmp_path / "run")
    config = tiny.make_config(model, tmp_path, steps=3, eval__prompts="", save_every=2)
    config.model.path = changed(model, tmp_path, part)
    with pytest.raises(ValueError) as error:
        train.main(config)
    case.check(str(error.value))
    config.allow_changes = True
    train.main(config)
    noted = {entry["key"]: entry for entry in guard.changes(tmp_path / "run")}
    assert noted[key]["old"] != noted[key]["new"] and noted[key]["step"] == 2


def test_the_same_weights_may_move(started, tmp_path):
    model, folder = started
    shutil.copytree(folder / "run", tmp_path / "run")
    config = tiny.make_config(model, tmp_path, steps=3, eval__prompts="", save_every=2)
    config.model.path = str(shutil.copytree(model, tmp_path / "moved"))
    train.main(config)
    assert {entry["key"] for entry in guard.changes(tmp_path / "run")} == {"model.path"}
