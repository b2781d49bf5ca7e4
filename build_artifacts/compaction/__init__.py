"""Compaction of pruned models: find the constant heads and channels, and remove them."""
