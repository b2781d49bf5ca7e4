"""Clients of tokenizer, encoders and generators: in process for tests, Ray handles in service."""
