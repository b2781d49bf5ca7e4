"""Build workspaces in the store and garbage collection."""
