"""Lists of models, in the form of the client that asks."""
