"""A case: what a person brings, what becomes of it, and the line that is printed."""

import importlib
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER.parent / "FIELD.md"


_MARKED: dict[Any, tuple] = {}  # test: its cases


@dataclass(frozen=True, eq=False)
class Case:
    """brought, outcome: as a person would say it. message: the printed line; … stands for any text.
    given: what the test of this case needs to build it."""

    brought: str
    outcome: str
    message: str = ""
    given: Any = None

    def check(self, said: str) -> None:
        """Fail unless one line of `said` is the message, and none is a traceback's."""
        assert "Traceback" not in said, said
        pattern = ".*".join(map(re.escape, self.message.split("…")))
        assert re.search(pattern, said), f"expected {self.message!r} in:\n{said}"


def cases(*rows: Case):
    """Run the test for each row; its parameter is `case`. The rows go into FIELD.md by the module's
    and their own order."""

    def mark(test):
        _MARKED[test] = rows
        return pytest.mark.parametrize("case", rows, ids=[row.brought for row in rows])(test)

    return mark


def render() -> str:
    """The table of all modules of this folder as Markdown."""
    lines = ["# What people bring, and what becomes of it", ""]
    lines += ["Written by `python -m tests.field` from the tests in `tests/field/`.", ""]
    for file in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"tests.field.{file.stem}")
        tests = [test for test in vars(module).values() if callable(test) and test in _MARKED]
        rows = [row for test in tests for row in _MARKED[test]]
        if rows:
            lines += [f"## {module.__doc__.splitlines()[0].rstrip('.')}", ""]
            lines += ["| brought | outcome | message |", "|---|---|---|"]
            for row in rows:
                cells = row.brought, row.outcome, row.message and f"`{row.message}`"
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines)
