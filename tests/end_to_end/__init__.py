"""Tests against a running Ray Serve cluster, with HTTP clients."""
