"""Simulation of a day of requests under policies that place requests on CPUs or GPUs."""
