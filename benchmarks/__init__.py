"""Seeded load and engine benchmarks; see `python -m benchmarks --help`."""
