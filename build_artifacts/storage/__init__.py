"""Build workspaces in the store."""
