"""Structured pruning: `measure` rates heads and channels, `prune` sets the least important to zero.

The channels are those of the feed-forward networks. The package `compaction` then removes these
heads and channels from every export.
"""
