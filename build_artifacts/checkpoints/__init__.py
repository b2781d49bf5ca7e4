"""Checkpoints on disk: validation, metadata and loading with torch."""
