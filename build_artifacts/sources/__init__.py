"""Where checkpoints come from: one file per kind of source."""
