"""Deployment of the server: `hundredfold serve` on one host, KubeRay on Kubernetes."""
