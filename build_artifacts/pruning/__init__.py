"""Structured pruning: `measure` rates heads and columns, `prune` sets the least important to zero.

`compaction` then removes them from every export.
"""
