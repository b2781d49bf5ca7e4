"""Running the server: one host through `hundredfold serve`, Kubernetes through KubeRay."""
