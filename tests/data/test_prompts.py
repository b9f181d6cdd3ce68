"""data/prompts.py: what a prompts file may hold; a stream that is a function of the step."""

import collections
import json

import numpy as np
import pytest

from wanjax.data import prompts

NAMES = tuple(f"prompt {i}" for i in range(7))


def test_file_gives_one_prompt_a_line_without_comments_bom_and_crlf(tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red circle\r\n# a comment\r\n  ein grüner Kreis # 2 \r\n".encode())
    assert prompts.load_prompts(path) == ("a red circle", "ein grüner Kreis # 2")
    assert capsys.readouterr().out == ""


def test_stray_blank_lines_are_counted_in_one_notice(tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_text("a\n\nb\n   \nc\n")
    assert prompts.load_prompts(path) == ("a", "b", "c")
    assert capsys.readouterr().out == f"prompts: skipped 2 blank lines of {path} (line 2, 4)\n"


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "# only\n# comments\n"])
def test_a_file_without_prompts_is_an_error(tmp_path, text):
    path = tmp_path / "p.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no prompt"):
        prompts.load_prompts(path)


def test_missing_and_undecodable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no prompts file at .*gone\.txt"):
        prompts.load_prompts(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 2\)"):
        prompts.load_prompts(tmp_path / "latin.txt")


def test_every_prompt_comes_once_per_epoch_and_epochs_differ():
    stream = prompts.PromptStream(NAMES, batch=3, seed=0)
    drawn = [name for step in range(7) for name in stream.at(step)]  # 21 draws are three epochs
    epochs = [drawn[i : i + 7] for i in (0, 7, 14)]
    for epoch in epochs:
        assert collections.Counter(epoch) == collections.Counter(NAMES)
    assert epochs[0] != epochs[1] != epochs[2]


def test_seed_decides_the_order():
    first, again, other = (prompts.PromptStream(NAMES, batch=7, seed=s).at(0) for s in (1, 1, 2))
    assert first == again != other


def test_a_resumed_stream_continues_the_exact_sequence():
    stream = prompts.PromptStream(NAMES, batch=2, seed=5)
    whole = [stream.at(step) for step in range(12)]
    state = json.loads(json.dumps(stream.state(5)))
    fresh = prompts.PromptStream(NAMES, batch=2, seed=5)
    start = fresh.resume(state)
    assert start == 5
    assert [fresh.at(step) for step in range(start, 12)] == whole[5:]


def test_indices_name_the_prompts():
    stream = prompts.PromptStream(NAMES, batch=20, seed=3)  # a batch may span epochs
    assert [NAMES[i] for i in stream.indices(4)] == stream.at(4)
    assert np.unique(stream.indices(0)).size == 7


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (prompts.PromptStream(NAMES, batch=3, seed=5), "batch 2 -> 3"),
        (prompts.PromptStream(NAMES, batch=2, seed=6), "seed 5 -> 6"),
        (prompts.PromptStream(NAMES[:-1], batch=2, seed=5), "prompts_crc32"),
    ],
)
def test_resuming_another_stream_is_refused(stream, message):
    state = prompts.PromptStream(NAMES, batch=2, seed=5).state(4)
    with pytest.raises(ValueError, match=message):
        stream.resume(state)
    assert stream.resume(state, allow=True) == 4


@pytest.mark.parametrize(("names", "batch"), [((), 1), (NAMES, 0)])
def test_a_stream_needs_prompts_and_a_batch(names, batch):
    with pytest.raises(ValueError, match="at least 1"):
        prompts.PromptStream(names, batch=batch, seed=0)


def test_files_in_an_object_store_and_in_the_home_folder_are_read(bucket, tmp_path, monkeypatch):
    content = "\ufeffa red circle\r\nein grüner Kreis\r\n".encode()
    (bucket / "sets/p.txt").write_bytes(content)
    (tmp_path / "p.txt").write_bytes(content)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (f"{bucket}/sets/p.txt", "~/p.txt"):
        assert prompts.load_prompts(path) == ("a red circle", "ein grüner Kreis")
    with pytest.raises(ValueError, match=f"^no prompts file at {bucket}/sets/q.txt"):
        prompts.load_prompts(f"{bucket}/sets/q.txt")
