"""Benchmark of many models with memory for few."""
