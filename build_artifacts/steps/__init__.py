"""The steps of a build: a value in, a value out."""
