"""Tokenization: text to token ids and back."""
