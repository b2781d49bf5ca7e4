"""Benchmarks of a server: load, accuracy, API keys, a noisy neighbor, and a CPU profile."""
