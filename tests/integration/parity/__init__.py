"""Comparison of this server's answers with those of transformers on the same weights."""
