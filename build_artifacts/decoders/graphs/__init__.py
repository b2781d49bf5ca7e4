"""Graph builders: ONNX graphs of generative models, assembled from a checkpoint's weights."""
