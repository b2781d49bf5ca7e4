"""API keys: who may call the server, what they may use, and how much."""
