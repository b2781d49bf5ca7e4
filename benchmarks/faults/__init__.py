"""Benchmarks that kill and stop processes of a server under load."""
