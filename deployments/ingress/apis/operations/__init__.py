"""Health, readiness, live figures, metrics and usage."""
