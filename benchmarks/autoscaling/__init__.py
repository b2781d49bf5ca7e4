"""Replay of a day of bursts against autoscaling policies."""
