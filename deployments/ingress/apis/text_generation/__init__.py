"""The API of text-generation-inference, also behind the Hugging Face routes."""
