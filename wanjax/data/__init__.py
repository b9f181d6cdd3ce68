"""Prompts, text encoding and cached data sets."""
