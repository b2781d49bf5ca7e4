"""Benchmark beside other servers, each in an environment of its own."""
