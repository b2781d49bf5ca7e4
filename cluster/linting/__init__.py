"""Checks of `hundredfold check`, with the lines of their findings."""
