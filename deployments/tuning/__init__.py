"""Tuning: measures the candidates of a model on this host and selects the fastest."""
