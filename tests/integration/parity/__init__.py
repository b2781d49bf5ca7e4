"""The same weights behind transformers and behind this server, and what each answers."""
