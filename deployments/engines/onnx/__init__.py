"""Encoders and decoders on ONNX Runtime, for CPUs and GPUs."""
