"""Tuning: measurement of a model's candidates on this host and selection of the fastest."""
