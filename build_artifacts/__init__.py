"""The compiler: from a Hugging Face model to a verified artifact for this host."""
