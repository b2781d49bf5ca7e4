"""HTTP for every API: bodies, options, routing, error responses and server-sent events."""
