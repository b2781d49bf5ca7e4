"""Benchmark that sends hostile requests to a running server."""
