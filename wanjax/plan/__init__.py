"""Compile the steps of a config for machines you don't have; see `python -m wanjax.plan --help`."""
