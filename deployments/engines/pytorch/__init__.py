"""Encoders and decoders on torch: exported programs, and models of transformers."""
