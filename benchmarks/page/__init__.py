"""Measurements of the page: first paint, moving layout, memory of a long visit."""
