"""A real cluster, real models, real clients."""
