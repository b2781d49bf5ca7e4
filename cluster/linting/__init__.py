"""Checks of `hundredfold check`. Their findings have line numbers."""
