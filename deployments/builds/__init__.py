"""Builds of models while the server runs: their queue in the store, states and estimates."""
