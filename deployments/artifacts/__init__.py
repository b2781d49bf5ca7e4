"""Stored models: manifest, store layout, digests, atomic publishing and locks."""
