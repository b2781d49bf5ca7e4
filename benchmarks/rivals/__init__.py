"""Benchmark against other servers (rivals). Each has a Python environment of its own."""
