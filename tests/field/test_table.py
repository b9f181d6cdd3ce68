"""The table of cases is that of the tests."""

from tests.field import table


def test_the_table_is_up_to_date():
    written = table.FILE.read_text(encoding="utf-8")
    assert written == table.render(), "run python -m tests.field"
