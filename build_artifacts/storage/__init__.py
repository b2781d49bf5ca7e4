"""The store: where builds work, what is in it, what may go."""
