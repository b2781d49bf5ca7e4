"""Graphs."""
