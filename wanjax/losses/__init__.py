"""Losses: arrays and functions in, (loss, aux) out; they never import a model."""
