"""Benchmark of open-loop load beyond the capacity: goodput, refusals, memory, wrong answers."""
