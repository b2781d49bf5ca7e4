"""Decoders of quantized safetensors weights, such as GPTQ and NVFP4.

`reading.py` selects the format by the config. Each format computes float weights, which
`steps/dequantize.py` writes.
"""
