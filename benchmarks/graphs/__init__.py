"""Benchmarks of all graphs of one model, and of the variants that tuning selects."""
