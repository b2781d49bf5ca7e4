"""Direct channels between the ingress and the replicas: typed frames over sockets.

A call through a Ray Serve handle costs about a millisecond of CPU on both sides; a frame costs some
microseconds. Ray Serve still places, finds, checks and replaces the replicas.
"""
