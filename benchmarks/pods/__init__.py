"""Benchmark that runs the pods of Kubernetes as containers of one host, and takes one away."""
