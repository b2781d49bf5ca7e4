"""The linter reports unknown keys, invalid values and conflicting settings, with their path."""

from typing import Any

import pytest
import ray
import yaml

from cluster.linting.linter import check_text
from tests.support.checked_configs import (
    APP,
    CONFIG,
    CPU_ENCODER,
    CPU_GENERATOR,
    GPU_ENCODER,
    INGRESS,
    TOKENIZER,
    assert_reported,
    check_config,
    create_config,
    to_dotted_path,
)

TARGETS = f"{CPU_ENCODER}.autoscaling_config.policy.policy_kwargs"


def test_config_of_the_repository_has_no_problems() -> None:
    assert check_text(CONFIG.read_text()) == []
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("where", "key", "suggestion"),
    [
        ("", "http_option", "http_options"),
        ("http_options.", "hosts", "host"),
        ("grpc_options.", "prt", "port"),
        ("controller_options.", "runtime_envs", "runtime_env"),
        ("logging_config.", "encodin", "encoding"),
        ("tracing_config.", "sampling_rate", "sampling_ratio"),
        (f"{APP}.", "routeprefix", "route_prefix"),
        (f"{APP}.runtime_env.", "env_var", "env_vars"),
        (f"{APP}.logging_config.", "log_levl", "log_level"),
        (f"{APP}.autoscaling_policy.", "policy_func", "policy_function"),
        (f"{APP}.args.", "modles", "models"),
        (f"{APP}.args.models.0.", "verson", "version"),
        (f"{APP}.args.encoders.cpu.", "intra_op_thread", "intra_op_threads"),
        (f"{INGRESS}.", "max_ongoing_request", "max_ongoing_requests"),
        (f"{INGRESS}.backpressure_config.", "retry_after", "retry_after_s"),
        (f"{INGRESS}.user_config.", "time_out_s", "timeout_s"),
        (f"{INGRESS}.user_config.limits.", "body_byte", "body_bytes"),
        (f"{INGRESS}.user_config.batching.", "max_batchsize", "max_batch_size"),
        (f"{INGRESS}.user_config.cache.", "ttl", "ttl_s"),
        (f"{INGRESS}.logging_config.", "log_dir", "logs_dir"),
        (f"{TOKENIZER}.user_config.", "cache_byte", "cache_bytes"),
        (f"{TOKENIZER}.autoscaling_config.", "min_replica", "min_replicas"),
        (f"{TOKENIZER}.autoscaling_config.policy.", "policy_kwarg", "policy_kwargs"),
        (f"{CPU_ENCODER}.ray_actor_options.", "num_cpu", "num_cpus"),
        (f"{CPU_ENCODER}.ray_actor_options.runtime_env.", "workingdir", "working_dir"),
        (f"{CPU_ENCODER}.request_router_config.", "max_backoff", "max_backoff_s"),
        (f"{CPU_ENCODER}.gang_scheduling_config.", "gangsize", "gang_size"),
        (f"{CPU_ENCODER}.user_config.batching.", "max_batch_token", "max_batch_tokens"),
        (f"{GPU_ENCODER}.user_config.", "batchin", "batching"),
    ],
)
def test_unknown_key_is_reported_on_every_level(where: str, key: str, suggestion: str) -> None:
    unknown = [p for p in check_config({where + key: 1}) if "unknown key" in p.message]
    assert [(to_dotted_path(p.path), p.message) for p in unknown] == [
        (where + key, f"unknown key `{key}`; did you mean `{suggestion}`?")
    ]


@pytest.mark.parametrize(
    ("list_path", "item", "key"),
    [
        (f"{CPU_ENCODER}.deployment_actors", {"name": "a", "actor_class": "m.A"}, "actor_option"),
        (f"{CPU_ENCODER}.ray_actor_options.fallback_strategy", {}, "label_select"),
    ],
)
def test_unknown_key_in_a_list_of_mappings_is_reported(
    list_path: str, item: dict[str, Any], key: str
) -> None:
    problems = check_config({list_path: [{**item, key: {}}]})
    assert f"{list_path}.0.{key}" in [
        to_dotted_path(p.path) for p in problems if "unknown" in p.message
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("proxy_location", "Everywhere"),
        ("http_options.port", "http"),
        ("logging_config.log_level", "LOUD"),
        (f"{APP}.import_path", "nowhere"),
        (f"{APP}.route_prefix", "v2"),
        (f"{APP}.route_prefix", "/v2/"),
        (f"{APP}.route_prefix", "/{model}"),
        (f"{APP}.args.models", {}),
        (f"{APP}.args.encoders.cpu.concurrent_passes", 0),
        (f"{APP}.args.encoders.gpu.available", "perhaps"),
        (f"{APP}.args.gpu_memory", 40),
        (f"{INGRESS}.num_replicas", 0),
        (f"{INGRESS}.user_config.limits.items", "many"),
        (f"{INGRESS}.backpressure_config.status_code", 500),
        (f"{TOKENIZER}.user_config.cache_bytes", -1),
        (f"{TOKENIZER}.autoscaling_config.upscale_delay_s", -1),
        (f"{TOKENIZER}.autoscaling_config.max_replicas", "lots"),
        (f"{CPU_ENCODER}.ray_actor_options.num_cpus", -1),
        (f"{CPU_ENCODER}.ray_actor_options.label_selector", {"a b": "c"}),
        (f"{CPU_ENCODER}.health_check_period_s", 0),
        (f"{CPU_ENCODER}.max_surge_percent", 101),
        (f"{GPU_ENCODER}.user_config.batching.max_batch_tokens", 0),
    ],
)
def test_invalid_value_is_reported_with_its_path(path: str, value: Any) -> None:
    problems = check_config({path: value})
    assert any(to_dotted_path(p.path).startswith(path) for p in problems), problems
    assert check_text(CONFIG.read_text()) == []


@pytest.mark.parametrize("options", ["http_options", "grpc_options"])
@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_port_out_of_range_is_reported(options: str, port: int) -> None:
    (problem,) = check_config({f"{options}.port": port})
    assert (to_dotted_path(problem.path), problem.message) == (
        f"{options}.port",
        f"{port} is not a port: use a number from 1 to 65535",
    )


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({f"{TOKENIZER}.max_queued_requests": -1}, f"{TOKENIZER}.max_queued_requests", "set"),
        (
            {
                f"{CPU_ENCODER}.autoscaling_config.metrics_interval_s": 10,
                f"{CPU_ENCODER}.autoscaling_config.look_back_period_s": 10,
            },
            f"{CPU_ENCODER}.autoscaling_config.look_back_period_s",
            "longer than metrics_interval_s",
        ),
        (
            {f"{CPU_ENCODER}.autoscaling_config.target_ongoing_requests": 64},
            f"{CPU_ENCODER}.autoscaling_config.target_ongoing_requests",
            "below max_ongoing_requests (64)",
        ),
        (
            {
                f"{CPU_GENERATOR}.max_ongoing_requests": 128,
                f"{CPU_GENERATOR}.user_config.scheduling.max_waiting_requests": 120,
            },
            f"{CPU_GENERATOR}.user_config.scheduling.max_waiting_requests",
            "below max_ongoing_requests (128)",
        ),
        (
            {
                f"{CPU_GENERATOR}.max_ongoing_requests": 128,
                f"{APP}.args.generators.cpu.kv_slots": 28,
            },
            f"{CPU_GENERATOR}.user_config.scheduling.max_waiting_requests",
            "generators.cpu.kv_slots (28)",
        ),
        (
            {
                f"{CPU_GENERATOR}.user_config.scheduling.min_prefill_chunk_tokens": 64,
                f"{CPU_GENERATOR}.user_config.scheduling.max_prefill_chunk_tokens": 4,
            },
            f"{CPU_GENERATOR}.user_config.scheduling.min_prefill_chunk_tokens",
            "64 must be at most max_prefill_chunk_tokens (4)",
        ),
        (
            {f"{TOKENIZER}.request_router_config": {}},
            f"{TOKENIZER}.request_router_config",
            "AnnouncingRouter",
        ),
        (
            {f"{CPU_ENCODER}.autoscaling_config.policy": {}},
            f"{CPU_ENCODER}.autoscaling_config",
            "ScaleOnLoad",
        ),
        (
            {f"{TARGETS}.shrink_busy": 0.7},
            TARGETS,
            "`shrink_busy` (0.7) must be above 0 and below `target_busy` (0.7)",
        ),
        ({f"{TARGETS}.drain_s": 0}, TARGETS, "`drain_s` is 0"),
        ({f"{TARGETS}.cores_per_replica": 0}, TARGETS, "`cores_per_replica` is 0"),
        (
            {f"{CPU_GENERATOR}.autoscaling_config.min_replicas": 0},
            f"{CPU_GENERATOR}.autoscaling_config.min_replicas",
            "`/ready` answers 503",
        ),
        ({f"{TARGETS}.target_load": 4096}, TARGETS, "unexpected keyword argument 'target_load'"),
        ({f"{INGRESS}.max_queued_requests": 0}, INGRESS, "a positive integer"),
        ({f"{INGRESS}.num_replicas": "auto"}, f"{INGRESS}.num_replicas", "fixed num_replicas"),
        ({f"{INGRESS}.num_replicas": None}, f"{INGRESS}.num_replicas", "fixed num_replicas"),
        (
            {f"{INGRESS}.num_replicas": None, f"{INGRESS}.autoscaling_config": {"max_replicas": 2}},
            f"{INGRESS}.autoscaling_config",
            "fixed num_replicas",
        ),
        (
            {f"{INGRESS}.max_ongoing_requests": 31},
            f"{INGRESS}.max_ongoing_requests",
            "max_batch_size (32)",
        ),
        (
            {f"{CPU_ENCODER}.autoscaling_config.min_replicas": 33},
            f"{CPU_ENCODER}.autoscaling_config",
            "must be greater than or equal to min_replicas (33)",
        ),
        (
            {f"{CPU_ENCODER}.autoscaling_config.initial_replicas": 99},
            f"{CPU_ENCODER}.autoscaling_config",
            "initial_replicas (99)",
        ),
        (
            {f"{CPU_ENCODER}.max_surge_percent": 0},
            f"{CPU_ENCODER}.max_surge_percent",
            "above 0",
        ),
        ({f"{GPU_ENCODER}.name": "CpuEncoder"}, f"{GPU_ENCODER}.name", "occurs twice"),
        ({f"{GPU_ENCODER}.name": "GpuEncodr"}, f"{GPU_ENCODER}.name", "did you mean `GpuEncoder`"),
        ({f"{GPU_ENCODER}.name": "Other"}, f"{APP}.deployments", "`GpuEncoder` is missing"),
        (
            {f"{APP}.args.models": [{"id": "a/b"}, {"id": "a/b"}]},
            f"{APP}.args.models.1.id",
            "occurs twice",
        ),
        (
            {f"{APP}.import_path": "deployments.app:buid_app"},
            f"{APP}.import_path",
            "`deployments.app:build_app`",
        ),
    ],
)
def test_conflicting_settings_are_reported(
    changes: dict[str, Any], path: str, expected: str
) -> None:
    assert_reported(changes, path, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {f"{CPU_ENCODER}.autoscaling_config.target_ongoing_requests": 63},
        {"http_options.port": 1},
        {"http_options.port": 65_535},
        {f"{INGRESS}.max_ongoing_requests": 32},
        {f"{INGRESS}.user_config.placement.target_s": 30},
        {f"{INGRESS}.user_config.placement.default": "auto"},
        {f"{APP}.route_prefix": "/v2/models"},
        {f"{APP}.route_prefix": None},
        {
            f"{APP}.args.transport": "handle",
            f"{TOKENIZER}.request_router_config": {},
            f"{CPU_ENCODER}.autoscaling_config.policy": {},
        },
        # build_app sets max_ongoing_requests of the generators above these values.
        {f"{APP}.args.generators.cpu.kv_slots": 512},
        {f"{CPU_GENERATOR}.user_config.scheduling.max_waiting_requests": 5_000},
    ],
)
def test_boundary_value_is_accepted(changes: dict[str, Any]) -> None:
    assert check_config(changes) == []


def test_deployment_of_undeclared_encoder_is_reported() -> None:
    problems = check_config({f"{APP}.args.encoders": {"cpu": {}}})
    assert [(to_dotted_path(p.path), p.message) for p in problems] == [
        (f"{GPU_ENCODER}.name", "there is no deployment `GpuEncoder`; did you mean `CpuEncoder`?")
    ]


def test_other_application_is_checked_only_by_rules_of_serve() -> None:
    other = {"name": "other", "route_prefix": "/x", "import_path": "their.app", "args": {"a": 1}}
    config = create_config({})
    config["applications"].append(
        {**other, "deployments": [{"name": "D", "user_config": {"k": 1}}]}
    )
    assert check_text(yaml.safe_dump(config)) == []
    config["applications"][1]["routeprefix"] = "/y"
    (problem,) = check_text(yaml.safe_dump(config))
    assert to_dotted_path(problem.path) == "applications.1.routeprefix"


def test_all_problems_are_reported_together() -> None:
    changes = {
        "http_options.hosts": 1,
        f"{APP}.args.encoders.cpu.run": 2,
        f"{TOKENIZER}.max_queued_requests": -1,
        f"{GPU_ENCODER}.ray_actor_options.num_gpu": 1,
    }
    assert {to_dotted_path(p.path) for p in check_config(changes)} == set(changes)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("applications", 7),
        ("applications", [7]),
        (APP, {}),
        (f"{APP}.args", 7),
        (f"{APP}.deployments", {"name": "Ingress"}),
        (INGRESS, "Ingress"),
        (f"{INGRESS}.user_config", [1]),
        (f"{TOKENIZER}.autoscaling_config", 7),
        (f"{TOKENIZER}.ray_actor_options", "x"),
        (f"{CPU_ENCODER}.request_router_config", {"request_router_class": "no.such.Router"}),
        (f"{CPU_ENCODER}.gang_scheduling_config", {"gang_size": 2, "runtime_failure_policy": "x"}),
    ],
)
def test_malformed_section_is_reported(path: str, value: Any) -> None:
    assert check_config({path: value}) != []


@pytest.mark.parametrize(
    "text", ["", "just a word", "- a\n- list\n", "a: [1\nb: 2\n", "a: \t\tb: c:"]
)
def test_text_without_config_is_reported(text: str) -> None:
    assert len(check_text(text)) == 1


def test_check_accepts_config_without_generators() -> None:
    config = create_config({})
    del config["applications"][0]["args"]["generators"]
    deployments = config["applications"][0]["deployments"]
    config["applications"][0]["deployments"] = [
        entry for entry in deployments if "Generator" not in entry["name"]
    ]
    assert check_text(yaml.safe_dump(config)) == []


def test_check_rejects_deployments_of_undeclared_generators() -> None:
    config = create_config({})
    del config["applications"][0]["args"]["generators"]["gpu"]
    (problem,) = check_text(yaml.safe_dump(config))
    assert problem.message.startswith("there is no deployment `GpuGenerator`")
