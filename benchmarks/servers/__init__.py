"""Processes that benchmarks start and measure: servers of rivals, our own server and its parts."""
