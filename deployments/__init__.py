"""Serving: Ray Serve deployments that answer requests from sealed artifacts."""

__version__ = "0.1.0"  # equal to pyproject.toml, checked by a test
