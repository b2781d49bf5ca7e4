"""Formats of quantized weights in safetensors checkpoints, a module each.

`reading.py` reads the format from the config, `steps/dequantize.py` writes the values.
"""
