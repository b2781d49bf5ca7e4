"""HTTP APIs, one package each, and `shared`.

An API parses requests and builds responses, but runs no model.
"""
