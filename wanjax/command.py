"""The command line of the programs that take a config: usage, and one line for what is wrong in it.

--config=FILE.py[:preset] --config.steps=100 … and the program's own flags
"""

import difflib
import pathlib
import re
import sys
import traceback
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import default
from wanjax import paths

DEBUG = flags.DEFINE_bool("debug", False, "show the traceback of an error that is one line")
SHOWN = (  # keys of the usage; the others are in configs/default.py
    "name", "workdir", "steps", "seed", "resume", "prompts", "prompts_per_step", "group_size",
    "model.path", "model.param_dtype", "lora.rank", "sampling.frames", "sampling.height",
    "sampling.width", "sampling.steps", "mesh.data", "save_every", "eval.prompts", "wandb",
)  # fmt: skip
_HELP = ("-h", "-help", "--help", "--helpshort", "--helpfull")


def parse(program: str, doc: str, needs: tuple[str, ...]) -> None:
    """Read the flags of the command line; ends the process with the usage (0), or with one line
    (2) for what it cannot take.

    needs: flags that must be given.
    """
    if set(sys.argv[1:]) & set(_HELP):
        print(usage(program, doc), flush=True)
        sys.exit(0)
    try:
        more = flags.FLAGS(sys.argv)[1:]
        missing = [name for name in needs if flags.FLAGS[name].value in (None, "")]
        if more:
            hint = " (keys are set as in --config.steps=100)" if "=" in more[0] else ""
            raise ValueError(f"unexpected argument {more[0]!r}{hint}")
        if missing:
            raise ValueError(f"--{missing[0]} is missing; --help shows the usage")
        config: Any = flags.FLAGS["config"].value
        config.to_dict()  # of a file that is not there it raises only now
    except Exception as error:  # a config is Python and may raise anything
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(f"{program}: {_line(error)}\n")
        sys.exit(2)


def usage(program: str, doc: str) -> str:
    """The program's own words, its flags, and the keys that most runs set."""
    lines = [doc.strip(), "", "flags"]
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        lines.append(f"  --{flag.name:18} {flag.help}")
    config, comments = default.get_config(), _comments()
    lines += [f"  --{'debug':18} {flags.FLAGS['debug'].help}", "", "common keys of --config"]
    for key in SHOWN:
        value = str(_at(config, key))
        lines.append(f"  --config.{key + '=' + value:28} {comments.get(key, '')}".rstrip())
    return "\n".join([*lines, "", "All keys and their defaults: configs/default.py"])


def _line(error: Exception) -> str:
    """What is wrong, in one line."""
    text = str(error)
    given = _given(sys.argv[1:])
    file = next((value for name, value in given if name == "config"), "")
    path = file.partition(":")[0]
    if path and not pathlib.Path(path).is_file():
        near = difflib.get_close_matches(path, map(str, pathlib.Path("configs").glob("*.py")), 1)
        return f"--config={file}: no file {path}" + (f"; did you mean {near[0]}?" if near else "")
    own = [f for f in traceback.extract_tb(error.__traceback__) if _same(f.filename, path)]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    if own:
        name = type(error).__name__
        return f"{path}, line {own[-1].lineno}: {name}: {paths.one_line(error)}"
    for name, value in given:  # of keys of the config
        key = name.removeprefix("config.")
        if key != name and key not in _keys():
            return f"--{name}: no such key{_near(key, _keys(), 'config.')}"
        if key != name and re.search(rf"flag --{re.escape(name)}=", text):
            kind = type(_at(_config(), key)).__name__
            return f"--{name}={value}: expected {kind}"
    unknown = re.match(r"Unknown command line flag '([^']*)'", text)
    if unknown:
        names = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
        return f"--{unknown[1]}: no such flag{_near(unknown[1], ['config', *names], '')}"
    return paths.one_line(text)


def _given(arguments: list[str]) -> list[tuple[str, str]]:
    """(flag, value) of `--flag=value` and `--flag value`."""
    found = []
    for one, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = one.lstrip("-").partition("=")
        if one.startswith("-"):
            found.append((name, value if equals else "" if following[:1] == "-" else following))
    return found


def _config() -> ConfigDict:
    found = flags.FLAGS["config"].value
    return found if isinstance(found, ConfigDict) else default.get_config()


def _keys() -> list[str]:
    """All keys of the config in use and of the defaults, parents included."""

    def walk(config, before=""):
        for key, value in config.items():
            yield before + key
            if isinstance(value, ConfigDict):
                yield from walk(value, f"{before}{key}.")

    return [*walk(_config())]


def _near(key: str, known: list[str], before: str) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.5)
    last = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    found = near or last
    if found:
        return f"; did you mean --{before}{found[0]}?"
    return "; configs/default.py has all keys" if before else "; --help shows all"


def _same(file: str, path: str) -> bool:
    return bool(path) and pathlib.Path(file).resolve() == pathlib.Path(path).resolve()


def _at(config, key: str):
    for name in key.split("."):
        config = config[name]
    return config


def _comments() -> dict[str, str]:
    """{key: the comment of its line} of configs/default.py."""
    lines = pathlib.Path(default.__file__).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"    c\.([\w.]+) = .*?  # (.*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}
