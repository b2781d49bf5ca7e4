"""Serving: Ray Serve deployments that answer requests from sealed artifacts."""
