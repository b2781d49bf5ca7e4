"""Generator of a KubeRay RayService from serve_config.yaml and production.yaml."""
