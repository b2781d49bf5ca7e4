"""What `hundredfold check` looks for in a Serve config, and where it found it."""
