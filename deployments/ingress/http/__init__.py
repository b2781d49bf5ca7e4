"""Requests and answers as bytes: what every API family needs of HTTP."""
