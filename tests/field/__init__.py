"""What people bring, one case a row: files, settings and machines, and what becomes of each.

`tests/FIELD.md` is the table of all cases; `python -m tests.field` writes it.
"""
