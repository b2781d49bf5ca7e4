"""Benchmark of the raw engine."""
