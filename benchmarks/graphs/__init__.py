"""Benchmarks of all graphs of one model, and of the choice that tuning made."""
