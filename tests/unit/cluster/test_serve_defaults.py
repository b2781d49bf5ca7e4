"""Defaults of Ray Serve have the values that this project relies on."""

from cluster.ports import HTTP_PORT
from cluster.serve_defaults import (
    AUTO_MAX_REPLICAS,
    AUTOSCALING_DEFAULTS,
    DEPLOYMENT_DEFAULTS,
    HTTP_DEFAULTS,
)


def test_defaults_are_those_of_serve() -> None:
    assert HTTP_DEFAULTS["host"] == "0.0.0.0"
    assert HTTP_DEFAULTS["port"] == HTTP_PORT
    assert DEPLOYMENT_DEFAULTS["max_ongoing_requests"] == 5
    assert DEPLOYMENT_DEFAULTS["graceful_shutdown_timeout_s"] == 20
    assert AUTOSCALING_DEFAULTS["look_back_period_s"] == 30
    assert AUTO_MAX_REPLICAS == 100
