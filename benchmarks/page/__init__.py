"""Benchmark of the web page: first paint, layout shifts, memory of a long visit."""
