"""Processes of a server killed and stopped under load."""
