"""Rules that relate timeouts of requests, hanging calls, health checks, shutdown and HAProxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD

from cluster.config_entries import ApplicationEntry, DeploymentEntry, read_mapping, read_number
from cluster.environment import RAY_ENVIRONMENT
from cluster.linting.application import parse_ingress_settings
from cluster.linting.schema import KeyFinding
from cluster.serve_defaults import DEPLOYMENT_DEFAULTS
from deployments.config import IngressUserConfig
from deployments.deployment_names import GENERATOR_DEPLOYMENTS, INGRESS
from deployments.generation.grammar_trials import WAIT_S as GRAMMAR_WAIT_S
from deployments.health import HANG_TIMEOUT_S
from deployments.transports.channel.replica_channel import SHUTDOWN_RESERVE_S

HAPROXY_TIMEOUT_S = float(RAY_ENVIRONMENT["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"])
# Serve replaces a replica after this number of failed health checks.
FAILED_CHECKS = REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
# Serve varies the period of health checks by up to a tenth.
HEALTH_PERIOD_SPREAD = 1.1
APP_DEFAULTS: Mapping[str, Any] = {"hang_timeout_s": HANG_TIMEOUT_S}
STREAMING = {INGRESS, *GENERATOR_DEPLOYMENTS.values()}


def check_timeouts(application: ApplicationEntry) -> Iterator[KeyFinding]:
    """Yield a finding per violated rule. The application must be of this project."""
    settings = _find_ingress_settings(application)
    yield from _grammar_counts_as_hang(application)
    for entry in application.deployments():
        yield from _found_too_late(application, entry, settings)
        if entry.is_ingress:
            yield from _haproxy_ends_requests(entry, settings)
        if entry.name in STREAMING:
            yield from _rollout_cuts_streams(entry, settings)


def _find_ingress_settings(application: ApplicationEntry) -> IngressUserConfig:
    settings = next(map(parse_ingress_settings, application.ingresses()), None)
    return settings or IngressUserConfig()


def _haproxy_ends_requests(
    entry: DeploymentEntry, settings: IngressUserConfig
) -> Iterator[KeyFinding]:
    """Require that the Ingress reports a timeout before HAProxy does."""
    limit = (
        f"must be shorter than HAProxy's limit ({HAPROXY_TIMEOUT_S:g} s, in "
        "cluster/environment.py), whose 504 is not in the error format of the API"
    )
    path = (*entry.path, "user_config")
    for key in ("timeout_s", "generation_timeout_s"):
        timeout_s = getattr(settings, key)
        if timeout_s >= HAPROXY_TIMEOUT_S:
            yield (*path, key), f"{timeout_s:g} s {limit}"
    wait_s = settings.builds.wait_s
    if wait_s + settings.timeout_s >= HAPROXY_TIMEOUT_S:
        yield (
            (*path, "builds", "wait_s"),
            f"{wait_s:g} s and the Ingress's user_config.timeout_s ({settings.timeout_s:g} s) "
            f"together {limit}: a request that waited for a build still has to be answered",
        )


def _rollout_cuts_streams(
    entry: DeploymentEntry, settings: IngressUserConfig
) -> Iterator[KeyFinding]:
    """Require a graceful shutdown of at least the longest answer plus SHUTDOWN_RESERVE_S."""
    shutdown_s = read_number(entry.raw, "graceful_shutdown_timeout_s", DEPLOYMENT_DEFAULTS)
    limit_s = settings.generation_timeout_s + SHUTDOWN_RESERVE_S
    if shutdown_s is not None and shutdown_s < limit_s:
        yield (
            (*entry.path, "graceful_shutdown_timeout_s"),
            f"{shutdown_s:g} s must be at least {limit_s:g} s: the Ingress's "
            f"user_config.generation_timeout_s ({settings.generation_timeout_s:g} s) and "
            f"{SHUTDOWN_RESERVE_S:g} s to end, or rollouts cut running streams",
        )


def _grammar_counts_as_hang(application: ApplicationEntry) -> Iterator[KeyFinding]:
    args = read_mapping(application.raw, "args")
    hang_s = read_number(args, "hang_timeout_s", APP_DEFAULTS)
    if read_mapping(args, "generators") and hang_s is not None and hang_s <= GRAMMAR_WAIT_S:
        yield (
            (*application.path, "args", "hang_timeout_s"),
            f"{hang_s:g} s must be longer than {GRAMMAR_WAIT_S:g} s, which a grammar may take on a "
            "busy host: Serve would replace healthy generators. Raise it, and the Ingress's "
            "user_config.timeout_s where that is too short for it",
        )


def _found_too_late(
    application: ApplicationEntry, entry: DeploymentEntry, settings: IngressUserConfig
) -> Iterator[KeyFinding]:
    """Require that Serve replaces a hanging replica within half of the request timeout.

    Calls of the hanging replica can then be repeated before their deadline.
    """
    limit_s = settings.timeout_s / 2
    period_s = read_number(entry.raw, "health_check_period_s", DEPLOYMENT_DEFAULTS)
    timeout_s = read_number(entry.raw, "health_check_timeout_s", DEPLOYMENT_DEFAULTS)
    hang_s = read_number(read_mapping(application.raw, "args"), "hang_timeout_s", APP_DEFAULTS)
    if period_s is None or timeout_s is None or hang_s is None:
        return
    stopped_s = HEALTH_PERIOD_SPREAD * period_s + FAILED_CHECKS * max(timeout_s, period_s)
    if stopped_s > limit_s:
        yield (
            (*entry.path, "health_check_timeout_s"),
            f"a replica that hangs is replaced after {stopped_s:g} s ({FAILED_CHECKS} checks of "
            f"{max(timeout_s, period_s):g} s); the limit is half of the Ingress's "
            f"user_config.timeout_s, {limit_s:g} s. Shorten the checks or raise timeout_s",
        )
    hung_s = hang_s + FAILED_CHECKS * HEALTH_PERIOD_SPREAD * period_s
    if not entry.is_ingress and hung_s > limit_s:
        yield (
            (*entry.path, "health_check_period_s"),
            f"a call that hangs is found after {hung_s:g} s (args.hang_timeout_s and "
            f"{FAILED_CHECKS} checks); the limit is half of the Ingress's user_config.timeout_s, "
            f"{limit_s:g} s. Shorten hang_timeout_s or the period, or raise timeout_s",
        )
