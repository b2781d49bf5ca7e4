"""Static int8 whose activations are smoothed first, for encoders on CPUs."""
