"""Benchmarks of a running server: load and accuracy."""
