"""Benchmark of all graphs of one model."""
