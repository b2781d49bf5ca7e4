"""The release, for those who ask the server; a test keeps it equal to pyproject.toml's."""

RELEASE = "0.1.0"
