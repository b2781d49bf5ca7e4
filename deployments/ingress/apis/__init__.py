"""HTTP APIs, one package each. An API parses requests and builds responses, but runs no model."""
