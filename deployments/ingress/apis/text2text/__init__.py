"""Models with an encoder behind the Hugging Face routes: text in, another text out."""
