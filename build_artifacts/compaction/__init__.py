"""Removing what a pruning method set to zero: `find` what is constant, `compact` the model."""
