"""Servers of rivals: scripts that run in the environments of the rivals."""
