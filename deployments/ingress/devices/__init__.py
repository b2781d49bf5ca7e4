"""The device of a request: state of the cluster, forecasts, choice."""
