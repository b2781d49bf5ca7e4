"""Benchmarks of all graphs of one model, and of the choices of tuning."""
