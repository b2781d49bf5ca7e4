"""The linter reports timeouts that are too short for the work or for other timeouts."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.linting.linter import check_text
from tests.support.checked_configs import (
    APP,
    CPU_ENCODER,
    CPU_GENERATOR,
    GPU_GENERATOR,
    INGRESS,
    assert_reported,
    check_config,
    create_config,
)


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        (
            {f"{INGRESS}.user_config.timeout_s": 180},
            f"{INGRESS}.user_config.timeout_s",
            "180 s must be shorter than HAProxy's limit (180 s, in cluster/environment.py), whose "
            "504 is not in the error format of the API",
        ),
        (
            {f"{INGRESS}.user_config.generation_timeout_s": 600},
            f"{INGRESS}.user_config.generation_timeout_s",
            "600 s must be shorter than HAProxy's limit (180 s,",
        ),
        (
            {f"{INGRESS}.user_config.builds.wait_s": 150},
            f"{INGRESS}.user_config.builds.wait_s",
            "150 s and the Ingress's user_config.timeout_s (30 s) together must be shorter than",
        ),
        (
            {f"{CPU_ENCODER}.health_check_timeout_s": 5},
            f"{CPU_ENCODER}.health_check_timeout_s",
            "replaced after 16.1 s (3 checks of 5 s); the limit is half of the Ingress's "
            "user_config.timeout_s, 15 s",
        ),
        (
            {f"{INGRESS}.user_config.timeout_s": 13},
            f"{INGRESS}.health_check_timeout_s",
            "replaced after 7.1 s",
        ),
        (
            {f"{APP}.args.hang_timeout_s": 12},
            f"{CPU_ENCODER}.health_check_period_s",
            "found after 15.3 s",
        ),
        (
            {f"{APP}.args.hang_timeout_s": 8},
            f"{APP}.args.hang_timeout_s",
            "8 s must be longer than 8 s, which a grammar may take",
        ),
        (
            {f"{INGRESS}.user_config.generation_timeout_s": 121},
            f"{INGRESS}.graceful_shutdown_timeout_s",
            "125 s must be at least 126 s: the Ingress's user_config.generation_timeout_s (121 s)",
        ),
        (
            {f"{INGRESS}.user_config.generation_timeout_s": 121},
            f"{GPU_GENERATOR}.graceful_shutdown_timeout_s",
            "rollouts cut running streams",
        ),
        (
            {f"{CPU_GENERATOR}.graceful_shutdown_timeout_s": 124},
            f"{CPU_GENERATOR}.graceful_shutdown_timeout_s",
            "124 s must be at least 125 s",
        ),
    ],
)
def test_conflicting_timeouts_are_reported(
    changes: dict[str, Any], path: str, expected: str
) -> None:
    assert_reported(changes, path, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{APP}.args.hang_timeout_s": 8.1},
        {f"{INGRESS}.user_config.builds.wait_s": 149},
        {f"{INGRESS}.user_config.generation_timeout_s": 100},
        {f"{INGRESS}.user_config.timeout_s": 99, f"{INGRESS}.user_config.generation_timeout_s": 99},
        {f"{INGRESS}.user_config.timeout_s": 60, f"{APP}.args.hang_timeout_s": 26},
    ],
)
def test_boundary_value_is_accepted(changes: dict[str, Any]) -> None:
    assert check_config(changes) == []


def test_shutdown_timeout_that_is_missing_is_that_of_serve() -> None:
    config = create_config({})
    (generator,) = (d for d in _deployments(config) if d["name"] == "CpuGenerator")
    del generator["graceful_shutdown_timeout_s"]
    (problem,) = check_text(yaml.safe_dump(config))
    assert "20 s must be at least 125 s" in problem.message


def test_hang_timeout_may_be_short_without_grammars() -> None:
    config = create_config({f"{APP}.args.hang_timeout_s": 2})
    assert check_text(yaml.safe_dump(config)) != []
    del config["applications"][0]["args"]["generators"]
    config["applications"][0]["deployments"] = [
        deployment for deployment in _deployments(config) if "Generator" not in deployment["name"]
    ]
    assert check_text(yaml.safe_dump(config)) == []


def _deployments(config: dict[str, Any]) -> list[dict[str, Any]]:
    deployments: list[dict[str, Any]] = config["applications"][0]["deployments"]
    return deployments
