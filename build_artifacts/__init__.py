"""The compiler: a Hugging Face model in, a verified artifact for this host out."""
