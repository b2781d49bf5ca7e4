"""Defaults of Ray Serve for keys that a Serve config leaves out, read from Serve itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import HTTPOptionsSchema


def _read_defaults(model: type[BaseModel]) -> Mapping[str, Any]:
    return {name: field.default for name, field in model.model_fields.items()}


HTTP_DEFAULTS = _read_defaults(HTTPOptionsSchema)
DEPLOYMENT_DEFAULTS = _read_defaults(DeploymentConfig)
AUTOSCALING_DEFAULTS = _read_defaults(AutoscalingConfig)
AUTO_MAX_REPLICAS: int = AutoscalingConfig.default().max_replicas  # of `num_replicas: auto`
