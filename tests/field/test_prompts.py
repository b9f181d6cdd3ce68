"""Prompt files: those of other tools, and what they hold beside prompts."""

import pytest

from tests.field.table import Case, cases
from wanjax.data import prompts

TEXTS = ("a red, round fox", "ein größeres Rad")


@cases(
    Case(
        "a .txt file of Windows, with a byte order mark",
        "its lines",
        "",
        ("a.txt", "\ufeffa red, round fox\r\nein größeres Rad\r\n"),
    ),
    Case(
        "a .jsonl file",
        "the field prompt of each object",
        "",
        (
            "a.jsonl",
            '{"prompt": "a red, round fox"}\n\n{"prompt": "ein gr\\u00f6\\u00dferes Rad"}\n',
        ),
    ),
    Case(
        "a .jsonl file of strings",
        "the strings",
        "",
        ("a.jsonl", '"a red, round fox"\n"ein größeres Rad"'),
    ),
    Case(
        "a .csv file",
        "its column prompt",
        "",
        ("a.csv", 'id,prompt\n,"a red, round fox"\n,ein größeres Rad\n'),
    ),
    Case(
        "a .csv file of Windows with empty columns",
        "its column prompt",
        "",
        ("a.csv", '\ufeffprompt,seed\r\n"a red,\r\n round fox",\r\nein größeres Rad,\r\n'),
    ),
)
def test_prompt_files(case, tmp_path):
    name, text = case.given
    (tmp_path / name).write_bytes(text.encode())
    assert prompts.load_prompts(tmp_path / name) == TEXTS


@cases(
    Case(
        "a seed in a .jsonl file",
        "refused",
        "…a.jsonl, line 2: field 'seed' is not one that a prompt has here; config.seed and "
        "config.eval.seed are those of all prompts",
        ("a.jsonl", '{"prompt": "red"}\n{"prompt": "blue", "seed": 3}\n'),
    ),
    Case(
        "a field of another tool in a .jsonl file",
        "refused",
        "…a.jsonl, line 1: field 'cfg' is not one that a prompt has here",
        ("a.jsonl", '{"prompt": "red", "cfg": 3}\n'),
    ),
    Case(
        "a negative prompt in a .csv file",
        "refused",
        "…a.csv, line 2: field 'negative' is not one that a prompt has here; "
        "config.negative_prompt is that of all prompts",
        ("a.csv", "prompt,negative\nred,ugly\n"),
    ),
    Case(
        "a .csv file without a column prompt",
        "refused",
        "…a.csv, line 2: field 'text' is not one that a prompt has here",
        ("a.csv", "text\nred\n"),
    ),
    Case(
        "an empty prompt in a .jsonl file",
        "refused",
        "…a.jsonl, line 1: prompt is ''; expected a text in the field prompt",
        ("a.jsonl", '{"prompt": ""}\n'),
    ),
    Case(
        "a number as a prompt",
        "refused",
        "…a.jsonl, line 1: prompt is 3; expected a text in the field prompt",
        ("a.jsonl", "3\n"),
    ),
    Case(
        "a damaged .jsonl file",
        "refused",
        "…a.jsonl, line 2: not JSON (…)",
        ("a.jsonl", '{"prompt": "red"}\n{"prompt": \n'),
    ),
    Case(
        "options behind a prompt, as kohya has them",
        "refused",
        "…a.txt, line 2: option --n would be read as words of the prompt; config.negative_prompt "
        "is that of all prompts",
        ("a.txt", "red\nblue --n ugly --d 3\n"),
    ),
    Case(
        "a seed behind a prompt",
        "refused",
        "…a.txt, line 1: option --d would be read as words of the prompt; config.seed and "
        "config.eval.seed are those of all prompts",
        ("a.txt", "red --d 3\n"),
    ),
    Case(
        "a size behind a prompt",
        "refused",
        "…a.txt, line 1: option --w would be read as words of the prompt; leave it out",
        ("a.txt", "red --w 832\n"),
    ),
)
def test_what_a_prompt_can_not_have_is_named(case, tmp_path):
    name, text = case.given
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(ValueError) as error:
        prompts.load_prompts(tmp_path / name)
    case.check(str(error.value))
    assert "\n" not in str(error.value)
