"""Huggingface."""
