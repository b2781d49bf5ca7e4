"""Rerank, in the dialects clients know."""
