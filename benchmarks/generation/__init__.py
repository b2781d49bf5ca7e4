"""Benchmark of text generation: in process, over HTTP, and other engines."""
