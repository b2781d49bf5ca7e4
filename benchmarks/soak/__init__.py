"""Benchmark of mixed load with random kills for a long time."""
