"""Compaction of pruned models: `find` locates constant channels, `compact` removes them."""
