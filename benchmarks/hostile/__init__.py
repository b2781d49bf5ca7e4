"""Hostile requests to a running server."""
