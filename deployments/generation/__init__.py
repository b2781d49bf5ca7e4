"""Text generation: prompts in, tokens out, many requests over one decoder."""
