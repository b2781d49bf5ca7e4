"""Static int8 quantization with smoothed activations, for encoders on CPUs."""
