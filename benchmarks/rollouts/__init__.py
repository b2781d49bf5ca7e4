"""Benchmark of version changes under load."""
