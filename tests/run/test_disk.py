"""disk.py: JSON of a run folder, here and in object stores."""

import json
import os

import pytest

from wanjax import paths
from wanjax.run import disk


def test_json_replaces_what_was_there_and_leaves_nothing_else(place):
    for value in ({"a": "größer"}, [1.5, None]):
        disk.write_json(place / "more/x.json", value)
        assert json.loads((place / "more/x.json").read_text(encoding="utf-8")) == value
    assert list(paths.files(place)) == ["more/x.json"]


def test_what_is_no_json_leaves_the_old_file(place):
    disk.write_json(place / "x.json", 1)
    with pytest.raises(ValueError, match="x.json cannot be written as JSON"):
        disk.write_json(place / "x.json", {"a": object()})
    assert json.loads((place / "x.json").read_text()) == 1 and list(paths.files(place)) == [
        "x.json"
    ]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    disk.write_json(tmp_path / "x.json", 1)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        disk.write_json(tmp_path / "x.json", 2)
    assert json.loads((tmp_path / "x.json").read_text()) == 1
