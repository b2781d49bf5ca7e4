"""Sources of checkpoints: one module for each form of SOURCE, the argument of `build`."""
