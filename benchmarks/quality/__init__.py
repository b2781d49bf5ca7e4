"""Benchmark of task metrics through the server."""
