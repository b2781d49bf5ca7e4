"""Tokens of texts and chats, in the forms of text-embeddings-inference and vLLM."""
