"""Kubernetes: a KubeRay RayService made from serve_config.yaml and production.yaml."""
