"""Sources of checkpoints, one module per kind."""
