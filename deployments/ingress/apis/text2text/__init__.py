"""Encoder-decoder models behind the Hugging Face routes: text in, another text out."""
