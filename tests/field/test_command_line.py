"""Command line: usage, slips of the keyboard, and broken configs."""

import sys

import pytest
from absl import flags
from ml_collections import config_flags

from tests.field.table import Case, cases
from wanjax import command

BROKEN = 'def get_config(preset=""):\n    return 1 / 0\n'
OPEN = 'def get_config(preset=""):\n    return (\n'


@pytest.fixture
def parse(monkeypatch, capsys):
    """(exit code, stdout, stderr) of a command line; code None where it is taken."""
    own = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:preset]", flag_values=own)
    flags.DEFINE_bool("dry_run", False, "stop", flag_values=own, module_name="prog")
    flags.DEFINE_bool("debug", False, "traceback", flag_values=own)
    own.register_key_flag_for_module("prog", own["dry_run"])
    monkeypatch.setattr(command.flags, "FLAGS", own)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["prog", *arguments])
        code = None
        try:
            command.parse("wanjax.train", "Train a run.", ("config",))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


QUICK = "--config=configs/quickstart.py"


@cases(
    Case(
        "--config.stpes=3",
        "refused",
        "wanjax.train: --config.stpes: no such key; did you mean --config.steps?",
        (QUICK, "--config.stpes=3"),
    ),
    Case(
        "--config.optim.hgh.lr=1",
        "refused",
        "wanjax.train: --config.optim.hgh.lr: no such key; did you mean --config.optim.high.lr?",
        (QUICK, "--config.optim.hgh.lr=1"),
    ),
    Case(
        "--config.high.lr 1, half of a key",
        "refused",
        "wanjax.train: --config.high.lr: no such key; did you mean --config.…lr?",
        (QUICK, "--config.high.lr", "1"),
    ),
    Case(
        "a key of another project",
        "refused",
        "wanjax.train: --config.xyzzy: no such key; configs/default.py has all keys",
        (QUICK, "--config.xyzzy=1"),
    ),
    Case(
        "--config.steps=abc",
        "refused",
        "wanjax.train: --config.steps=abc: expected int",
        (QUICK, "--config.steps=abc"),
    ),
    Case(
        "--config.optim.high.lr=high",
        "refused",
        "wanjax.train: --config.optim.high.lr=high: expected float",
        (QUICK, "--config.optim.high.lr=high"),
    ),
    Case(
        "--dryrun",
        "refused",
        "wanjax.train: --dryrun: no such flag; did you mean --dry_run?",
        (QUICK, "--dryrun"),
    ),
    Case(
        "steps=3 without dashes",
        "refused",
        "wanjax.train: unexpected argument 'steps=3' (keys are set as in --config.steps=100)",
        (QUICK, "steps=3"),
    ),
    Case("no --config", "refused", "wanjax.train: --config is missing; --help shows the usage", ()),
    Case(
        "a config that is not there",
        "refused",
        "wanjax.train: --config=configs/quikstart.py: no file configs/quikstart.py; did you mean "
        "configs/quickstart.py?",
        ("--config", "configs/quikstart.py"),
    ),
)
def test_slips_are_one_line(case, parse):
    code, out, said = parse(*case.given)
    assert code == 2 and not out and len(said.splitlines()) == 1, said
    case.check(said)


@cases(
    Case(
        "a config that raises",
        "refused",
        "wanjax.train: …config.py, line 2: ZeroDivisionError: division by zero",
        BROKEN,
    ),
    Case(
        "a config with a syntax error",
        "refused",
        "wanjax.train: …config.py, line 2: '(' was never closed",
        OPEN,
    ),
)
def test_broken_configs_name_file_and_line(case, parse, tmp_path):
    file = tmp_path / "config.py"
    file.write_text(case.given)
    code, _, said = parse(f"--config={file}")
    assert code == 2 and len(said.splitlines()) == 1, said
    case.check(said)


@cases(
    Case("--help", "usage, exit code 0", "", "--help"),
    Case("-h", "usage, exit code 0", "", "-h"),
)
def test_help(case, parse):
    code, out, said = parse(case.given)
    assert code == 0 and not said
    assert out.startswith("Train a run.") and "--dry_run" in out and "configs/default.py" in out
    assert "--config.steps=100" in out and "rollouts" in out and len(out.splitlines()) < 60


def test_a_good_command_line_is_taken(parse):
    assert parse(QUICK, "--config.steps=3", "--dry_run") == (None, "", "")
    assert command.flags.FLAGS["config"].value.steps == 3


def test_debug_shows_the_traceback(parse):
    with pytest.raises(AttributeError):
        parse(QUICK, "--config.stpes=3", "--debug")
