"""Where it runs: one box through `make serve`, Kubernetes through KubeRay."""
