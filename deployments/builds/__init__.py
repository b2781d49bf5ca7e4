"""Builds while serving: their queue in the store, their states and estimates."""
