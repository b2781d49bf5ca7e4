"""The model of a request: registry, permissions, trials of versions."""
