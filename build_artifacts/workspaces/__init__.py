"""Workspaces of builds, inside the store."""
