"""Decoder models: export, quantization, accuracy gate, throughput and report."""
