"""Rewards: decoded videos and prompts in, one score per sample out."""
