"""Benchmark of text generation in process, over HTTP, and with other engines."""
