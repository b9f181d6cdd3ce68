"""Write tests/FIELD.md."""

from tests.field import table

table.FILE.write_text(table.render(), encoding="utf-8")
