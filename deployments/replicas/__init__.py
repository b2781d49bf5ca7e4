"""Replicas as plain classes; `app.py` wraps them for Ray Serve."""
