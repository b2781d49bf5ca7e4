"""Ray Serve deployments that serve models from sealed (published, immutable) artifacts."""

__version__ = "0.1.0"  # equal to pyproject.toml, checked by a test
