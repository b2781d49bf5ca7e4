"""Rerank API of Cohere, Jina, Infinity and text-embeddings-inference."""
