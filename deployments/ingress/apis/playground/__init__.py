"""The page that people open in a browser."""
