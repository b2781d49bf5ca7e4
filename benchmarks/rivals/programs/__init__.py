"""Server programs that run in the Python environments of the rivals."""
