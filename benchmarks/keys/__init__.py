"""Benchmark of API keys."""
