"""Benchmarks of many models and of version changes."""
