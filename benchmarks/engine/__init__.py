"""Benchmark of an encoder's engine alone, without HTTP, tokenizer and transport."""
