"""Clients of the other deployments, over channels or Ray Serve handles."""
