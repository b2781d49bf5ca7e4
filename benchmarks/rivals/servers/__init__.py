"""Server scripts that run in the Python environments of the rivals."""
