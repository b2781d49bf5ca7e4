"""Embeddings in Cohere's API. Its rerank API is in the package `rerank`."""
