"""The ingress: HTTP APIs, and the request pipeline that they share."""
