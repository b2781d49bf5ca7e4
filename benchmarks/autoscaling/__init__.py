"""Simulation of a day with bursts of requests under several autoscaling policies."""
