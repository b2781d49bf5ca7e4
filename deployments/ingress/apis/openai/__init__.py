"""OpenAI's API: chat, completions, embeddings and the model list."""
