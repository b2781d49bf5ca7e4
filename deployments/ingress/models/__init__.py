"""The model of a request: its resolution, permissions, trials of versions."""
