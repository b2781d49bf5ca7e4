"""Policies to compare: the deployment's autoscaling, Ray Serve's own policy, no autoscaling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from benchmarks.autoscaling.simulation import CountCalls
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.serve_config import ServeConfig
from deployments.config import MicroBatchSettings


@dataclass(frozen=True, slots=True)
class ScalingMethod:
    """One way to choose the number of replicas.

    If `config` is None, the number is constant and has the value of `--max-replicas`.
    """

    name: str
    config: AutoscalingConfig | None
    count_calls: CountCalls
    sees_queue: bool = True  # whether replicas report requests that wait in the ingress


def read_autoscaling(config: Path, deployment: str) -> dict[str, Any]:
    """Return the `autoscaling_config` of a deployment in the first application of a Serve config.

    Raises BenchmarkError if the file cannot be read or has no such setting.
    """
    try:
        settings = ServeConfig.read(config).find_deployment(deployment)["autoscaling_config"]
    except (LookupError, TypeError) as exc:
        raise BenchmarkError(
            f"`{config}` has no autoscaling_config of `{deployment}`",
            hint="name another file with --config, or another deployment with --deployment",
        ) from exc
    return dict(settings)


def parse_autoscaling(settings: dict[str, Any]) -> AutoscalingConfig:
    """Parse settings without Serve's warning that `metrics_interval_s` is deprecated.

    Users cannot follow the warning, because this version of Serve has no other setting for how
    often replicas report. Raise BenchmarkError for invalid settings.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return AutoscalingConfig(**settings)
        except ValidationError as exc:
            reasons = "; ".join(error["msg"] for error in exc.errors())
            raise BenchmarkError(
                f"invalid autoscaling settings: {reasons}",
                hint="check --min-replicas, --max-replicas and the file with `hundredfold check`",
            ) from exc


def build_scaling_methods(settings: dict[str, Any]) -> Sequence[ScalingMethod]:
    """Build the policy of `settings` and the policies to compare, with the same replica bounds."""
    bounds = {key: settings[key] for key in ("min_replicas", "max_replicas")}
    configured = parse_autoscaling(settings)
    serve_policy = parse_autoscaling(settings | {"policy": AutoscalingPolicy()})
    return (
        ScalingMethod("work", configured, count_requests),
        ScalingMethod("work, queue not seen", configured, count_requests, sees_queue=False),
        ScalingMethod("Serve's policy, requests", serve_policy, count_requests),
        ScalingMethod("Serve's policy, micro-batches", serve_policy, count_micro_batches),
        ScalingMethod("Serve's defaults, requests", parse_autoscaling(bounds), count_requests),
        ScalingMethod("no autoscaling", None, count_requests),
    )


def count_requests(requests: NDArray[np.float64]) -> float:
    """Count every request in the deployment and its queue."""
    return float(requests.sum())


def count_micro_batches(requests: NDArray[np.float64]) -> float:
    """Count the calls of an ingress that micro-batches.

    Such an ingress has at most `max_concurrent_batches` calls per model at a time.
    """
    return float(np.minimum(requests, MicroBatchSettings().max_concurrent_batches).sum())
