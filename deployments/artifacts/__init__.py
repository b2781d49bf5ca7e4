"""Artifacts."""
