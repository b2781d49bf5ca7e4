"""Anthropic's API: messages, and the count of their tokens."""
