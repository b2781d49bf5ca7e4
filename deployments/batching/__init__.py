"""Batching of an encoder replica: selection, collation and scheduling."""
