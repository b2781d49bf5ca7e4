"""Candidates of encoder models: reference outputs, graphs and speed screening."""
