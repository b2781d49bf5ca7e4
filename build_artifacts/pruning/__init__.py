"""Structured pruning: `measure` rates heads and columns, `prune` sets the least important to zero.

The package `compaction` then removes these heads and columns from every export.
"""
