"""Replay of a day of requests against policies that place requests on CPUs and GPUs."""
