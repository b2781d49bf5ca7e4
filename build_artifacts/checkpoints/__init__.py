"""Checkpoints: what is on disk, what it says of itself, how torch loads it."""
