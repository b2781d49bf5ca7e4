"""Benchmark of a server under load. Other benchmarks use its load client."""
