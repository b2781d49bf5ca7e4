"""Management of models by operators."""
