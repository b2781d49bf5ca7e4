"""The Hugging Face Inference API: tasks by model path."""
