"""Benchmark against other servers. Each server has its own Python environment."""
