"""Algorithms: init(...) -> state, collect(...) -> batch, update(...) -> (state, metrics)."""
