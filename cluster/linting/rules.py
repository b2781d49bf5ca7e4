"""Rules that relate several settings, each of which is valid alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.access import is_loopback
from cluster.config_entries import (
    ApplicationEntry,
    DeploymentEntry,
    find_applications,
    find_ingresses,
    read_mapping,
    read_number,
)
from cluster.linting.application import parse_ingress_settings
from cluster.linting.gpu_rules import check_gpu_rules
from cluster.linting.schema import KeyFinding
from cluster.linting.timeout_rules import check_timeouts
from cluster.serve_defaults import AUTOSCALING_DEFAULTS, DEPLOYMENT_DEFAULTS, HTTP_DEFAULTS
from deployments.artifacts.types import Device
from deployments.autoscaling import ScaleOnLoad
from deployments.config import (
    GENERATOR_ONGOING_REQUESTS,
    AppArgs,
    GeneratorSettings,
    SchedulingSettings,
)
from deployments.deployment_names import (
    ENCODER_DEPLOYMENTS,
    GENERATOR_DEPLOYMENTS,
    REQUIRED_FOR_READY,
)
from deployments.ingress.http.tracing import explain_missing_packages

# Classes that a deployment with channels must configure (docs/decisions/channels.md).
ROUTER = "deployments.transports.channel.router:AnnouncingRouter"
POLICY = "deployments.autoscaling:ScaleOnLoad"
UNLIMITED = -1
GENERATOR_DEFAULTS: Mapping[str, Any] = GeneratorSettings().model_dump()
SCHEDULING_DEFAULTS: Mapping[str, Any] = SchedulingSettings().model_dump()
GENERATORS: Mapping[str, str] = {
    name: device.value for device, name in GENERATOR_DEPLOYMENTS.items()
}

# Target latencies of the placement `auto`, each with the timeout that must not be shorter.
TARGETS = {"target_s": "timeout_s", "generation_target_s": "generation_timeout_s"}

# Deployments that may roll out without a surge. A new replica next to the old one would wait for
# another GPU.
GPU_DEPLOYMENTS = {ENCODER_DEPLOYMENTS[Device.GPU], GENERATOR_DEPLOYMENTS[Device.GPU]}


def check_rules(config: Any) -> Iterator[KeyFinding]:
    """Yield a finding per violated rule. The schema check reports values of wrong types."""
    for application in find_applications(config):
        yield from _same_name_twice(application)
        if application.is_hundredfold:
            yield from check_gpu_rules(application)
            yield from check_timeouts(application)
            for entry in application.deployments():
                yield from _check_deployment(application, entry)


def _check_deployment(
    application: ApplicationEntry, entry: DeploymentEntry
) -> Iterator[KeyFinding]:
    yield from _queue_unlimited(entry)
    yield from _look_back_too_short(entry)
    yield from _target_unreachable(entry)
    yield from _invalid_policy_targets(entry)
    yield from _rollout_without_surge(entry)
    if entry.name in REQUIRED_FOR_READY:
        yield from _required_at_zero(entry)
    if entry.name in GENERATORS:
        yield from _queue_limit_unreachable(application, entry)
        yield from _prefill_limits_crossed(entry)
    if entry.is_ingress:
        yield from _ingress_that_scales(entry)
        yield from _ingress_below_micro_batch(entry)
        yield from _placement_without_effect(application, entry)
    else:
        yield from _channel_without_hooks(application, entry)


def check_exposure(config: Any, environment: Mapping[str, str]) -> Iterator[KeyFinding]:
    """Yield a finding per Ingress that lets other hosts connect without API keys.

    The check is for configs that Serve applies unchanged. `environment`: variables of the replicas.
    """
    host = read_mapping(config, "http_options").get("host", HTTP_DEFAULTS["host"])
    if not isinstance(host, str) or is_loopback(host):
        return
    for entry in find_ingresses(config):
        settings = parse_ingress_settings(entry)
        if settings and not settings.no_auth and not settings.requires_keys(environment):
            yield (
                (*entry.path, "user_config", "key_file"),
                f"`http_options.host` {host} lets other hosts connect without API keys. Name a "
                "key file, or set `no_auth: true`, for instance behind a gateway that checks "
                "its own",
            )


def check_packages(config: Any) -> Iterator[KeyFinding]:
    """Yield a finding per Ingress that needs a package which this environment lacks."""
    if (reason := explain_missing_packages()) is None:
        return
    for entry in find_ingresses(config):
        settings = parse_ingress_settings(entry)
        if settings is not None and settings.tracing.enabled:
            yield (*entry.path, "user_config", "tracing", "enabled"), reason


def _same_name_twice(application: ApplicationEntry) -> Iterator[KeyFinding]:
    names: Counter[str] = Counter()
    for entry in application.deployments():
        names[entry.name] += 1
        if names[entry.name] > 1:
            yield (*entry.path, "name"), f"`{entry.name}` occurs twice"
    if not application.is_hundredfold:
        return
    models = read_mapping(application.raw, "args").get("models")
    ids: Counter[str] = Counter()
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict) and "id" in model:
            ids[str(model["id"])] += 1
            if ids[str(model["id"])] > 1:
                path = (*application.path, "args", "models", index, "id")
                yield path, f"`{model['id']}` occurs twice"


def _queue_unlimited(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    if entry.raw.get("max_queued_requests") in (None, UNLIMITED):
        yield (
            (*entry.path, "max_queued_requests"),
            "must be set: without a limit, overload fills the memory and latency grows",
        )


def _look_back_too_short(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    autoscaling = read_mapping(entry.raw, "autoscaling_config")
    interval = read_number(autoscaling, "metrics_interval_s", AUTOSCALING_DEFAULTS)
    window = read_number(autoscaling, "look_back_period_s", AUTOSCALING_DEFAULTS)
    if autoscaling and interval is not None and window is not None and window <= interval:
        yield (
            (*entry.path, "autoscaling_config", "look_back_period_s"),
            f"{window:g} s must be longer than metrics_interval_s ({interval:g} s)",
        )


def _target_unreachable(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    if not _scales(entry):
        return
    autoscaling = read_mapping(entry.raw, "autoscaling_config")
    target = read_number(autoscaling, "target_ongoing_requests", AUTOSCALING_DEFAULTS)
    ongoing = read_number(entry.raw, "max_ongoing_requests", _deployment_defaults(entry))
    if target is not None and ongoing is not None and target >= ongoing:
        yield (
            (*entry.path, "autoscaling_config", "target_ongoing_requests"),
            f"{target:g} must be below max_ongoing_requests ({ongoing:g}), "
            "or no load ever adds a replica",
        )


def _invalid_policy_targets(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    """Check the policy's arguments, which Serve's controller reads only after `serve deploy`."""
    policy = read_mapping(read_mapping(entry.raw, "autoscaling_config"), "policy")
    if policy.get("policy_function") != POLICY:
        return
    try:
        ScaleOnLoad(**read_mapping(policy, "policy_kwargs"))
    except (TypeError, ValueError) as exc:
        message = str(exc).removeprefix("ScalingTargets.__new__() ")
        yield (*entry.path, "autoscaling_config", "policy", "policy_kwargs"), message


def _deployment_defaults(entry: DeploymentEntry) -> Mapping[str, Any]:
    """Return the defaults for missing keys: those of `build_app` for generators, else Serve's."""
    if entry.name in GENERATORS:
        return {"max_ongoing_requests": GENERATOR_ONGOING_REQUESTS}
    return DEPLOYMENT_DEFAULTS


def _queue_limit_unreachable(
    application: ApplicationEntry, entry: DeploymentEntry
) -> Iterator[KeyFinding]:
    """Require that `max_ongoing_requests`, if set, is high enough to fill the generator's queue."""
    if "max_ongoing_requests" not in entry.raw:
        return
    device = GENERATORS[entry.name]
    settings = read_mapping(
        read_mapping(read_mapping(application.raw, "args"), "generators"), device
    )
    kv_slots = read_number(settings, "kv_slots", GENERATOR_DEFAULTS)
    scheduling = read_mapping(read_mapping(entry.raw, "user_config"), "scheduling")
    waiting = read_number(scheduling, "max_waiting_requests", SCHEDULING_DEFAULTS)
    ongoing = read_number(entry.raw, "max_ongoing_requests", DEPLOYMENT_DEFAULTS)
    if kv_slots is None or waiting is None or ongoing is None:
        return
    if kv_slots + waiting >= ongoing:
        yield (
            (*entry.path, "user_config", "scheduling", "max_waiting_requests"),
            f"max_waiting_requests ({waiting:g}) + generators.{device}.kv_slots "
            f"({kv_slots:g}) must be below max_ongoing_requests ({ongoing:g}), or the queue limit "
            "never applies",
        )


def _prefill_limits_crossed(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    scheduling = read_mapping(read_mapping(entry.raw, "user_config"), "scheduling")
    lower = read_number(scheduling, "min_prefill_chunk_tokens", {})  # if the file names it
    upper = read_number(scheduling, "max_prefill_chunk_tokens", SCHEDULING_DEFAULTS)
    if lower is not None and upper is not None and lower > upper:
        yield (
            (*entry.path, "user_config", "scheduling", "min_prefill_chunk_tokens"),
            f"{lower:g} must be at most max_prefill_chunk_tokens ({upper:g}), which limits every "
            "chunk",
        )


def _channel_without_hooks(
    application: ApplicationEntry, entry: DeploymentEntry
) -> Iterator[KeyFinding]:
    transport = AppArgs.model_fields["transport"].default
    if read_mapping(application.raw, "args").get("transport", transport) != "channel":
        return
    router = read_mapping(entry.raw, "request_router_config").get("request_router_class")
    if router != ROUTER:
        yield (
            (*entry.path, "request_router_config"),
            f"request_router_class must be `{ROUTER}`: with `args.transport: channel` the ingress "
            "finds the replicas through it",
        )
    policy = read_mapping(read_mapping(entry.raw, "autoscaling_config"), "policy").get(
        "policy_function"
    )
    if _scales(entry) and policy != POLICY:
        yield (
            (*entry.path, "autoscaling_config"),
            f"policy.policy_function must be `{POLICY}`: Serve's own policy does not count calls "
            "over channels (`args.transport: channel`)",
        )


def _required_at_zero(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    if read_mapping(entry.raw, "autoscaling_config").get("min_replicas") == 0:
        yield (
            (*entry.path, "autoscaling_config", "min_replicas"),
            f"must be at least 1: `/ready` answers 503 while no replica of `{entry.name}` runs",
        )


def _ingress_that_scales(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    if _scales(entry) or not isinstance(entry.raw.get("num_replicas", 1), int):
        key = "autoscaling_config" if "autoscaling_config" in entry.raw else "num_replicas"
        yield (
            (*entry.path, key),
            "the ingress requires a fixed num_replicas: each change reloads HAProxy "
            "and closes long requests",
        )


def _ingress_below_micro_batch(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    settings = parse_ingress_settings(entry)
    ongoing = read_number(entry.raw, "max_ongoing_requests", DEPLOYMENT_DEFAULTS)
    if settings is not None and ongoing is not None and ongoing < settings.batching.max_batch_size:
        yield (
            (*entry.path, "max_ongoing_requests"),
            f"{ongoing:g} is below user_config.batching.max_batch_size "
            f"({settings.batching.max_batch_size}): no micro-batch can fill",
        )


def _placement_without_effect(
    application: ApplicationEntry, entry: DeploymentEntry
) -> Iterator[KeyFinding]:
    settings = parse_ingress_settings(entry)
    if settings is None:
        return
    placement, path = settings.placement, (*entry.path, "user_config", "placement")
    for key, limit_key in TARGETS.items():
        target_s, limit_s = getattr(placement, key), getattr(settings, limit_key)
        if target_s > limit_s:
            yield (
                (*path, key),
                f"{target_s:g} s is longer than user_config.{limit_key} ({limit_s:g} s), which "
                "ends the request",
            )
    args = read_mapping(application.raw, "args")
    gpu = Device.GPU.value
    has_gpu = gpu in read_mapping(args, "encoders") or gpu in read_mapping(args, "generators")
    if placement.default != "cpu" and not has_gpu:
        yield (
            (*path, "default"),
            f"`{placement.default}` needs `{gpu}` in args.encoders or args.generators",
        )


def _rollout_without_surge(entry: DeploymentEntry) -> Iterator[KeyFinding]:
    """Require a surge for all deployments but those on a GPU.

    Without a surge, Serve stops the last old replica before a new replica has started. On a GPU,
    the new replica of a surge would wait for another GPU.
    """
    if entry.name not in GPU_DEPLOYMENTS and not entry.raw.get("max_surge_percent"):
        yield (
            (*entry.path, "max_surge_percent"),
            "must be above 0: otherwise a rollout whose replicas do not start ends the old ones",
        )


def _scales(entry: DeploymentEntry) -> bool:
    return entry.raw.get("num_replicas") == "auto" or bool(entry.raw.get("autoscaling_config"))
