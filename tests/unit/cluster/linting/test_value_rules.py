"""The linter reports values that pass the schemas but keep a server from becoming ready."""

import math
from typing import Any

import onnxruntime
import pytest
import yaml

from cluster.linting.linter import check_text
from cluster.linting.value_rules import PROVIDERS
from tests.support.checked_configs import (
    APP,
    CPU_ENCODER,
    INGRESS,
    assert_reported,
    check_config,
    create_config,
    to_dotted_path,
)

MODELS = f"{APP}.args.models"
ORIGINS = f"{INGRESS}.user_config.cors.origins"
PEM = "/etc/server.pem"


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"proxy_location": "Disabled"}, "proxy_location", "use `EveryNode`"),
        (
            {"http_options.ssl_keyfile": PEM, "http_options.ssl_certfile": PEM},
            "http_options.ssl_keyfile",
            "end TLS in a proxy before HAProxy",
        ),
        (
            {"http_options.ssl_keyfile": PEM, "http_options.ssl_certfile": PEM},
            "http_options.ssl_certfile",
            "plain HTTP",
        ),
        ({"http_options.ssl_ca_certs": PEM}, "http_options.ssl_ca_certs", "plain HTTP"),
        (
            {"http_options.keep_alive_timeout_s": -1},
            "http_options.keep_alive_timeout_s",
            "-1 s must be at least 1 s",
        ),
        (
            {"http_options.request_timeout_s": 10},
            "http_options.request_timeout_s",
            "use `user_config.timeout_s`",
        ),
        ({"applications": []}, "applications", "is empty"),
        ({"http_options.host": ""}, "http_options.host", "`` is not an address"),
        ({"http_options.host": "300.1.1.1"}, "http_options.host", "`300.1.1.1` is not an address"),
        ({"http_options.host": "localhost:80"}, "http_options.host", "is not an address"),
        ({"http_options.host": "http://a"}, "http_options.host", "is not an address"),
        (
            {f"{APP}.args.encoders.cpu.providers": []},
            f"{APP}.args.encoders.cpu.providers",
            "is empty: name a provider",
        ),
        (
            {f"{MODELS}.0.version": 123456789012},  # as YAML reads 12 digits without quotes
            f"{MODELS}.0.version",
            "put it in quotes",
        ),
        ({f"{MODELS}.0.id": ""}, f"{MODELS}.0.id", "`` is not a model id"),
        ({f"{MODELS}.0.id": "../x"}, f"{MODELS}.0.id", "`../x` is not a model id"),
        ({f"{MODELS}.0.version": "lastest"}, f"{MODELS}.0.version", "use `latest`"),
        ({f"{MODELS}.0.version": "0123456789AB"}, f"{MODELS}.0.version", "12 hexadecimal digits"),
        (
            {f"{APP}.args.encoders.cpu.providers": ["CpuExecutionProvider"]},
            f"{APP}.args.encoders.cpu.providers.0",
            "no provider `CpuExecutionProvider`; did you mean `CPUExecutionProvider`?",
        ),
        (
            {f"{APP}.args.generators.gpu.providers": ["CUDAExecutionProvider", "x"]},
            f"{APP}.args.generators.gpu.providers.1",
            "ONNX Runtime has no provider `x`",
        ),
        (
            {f"{INGRESS}.user_config.timeout_s": float("inf")},
            f"{INGRESS}.user_config.timeout_s",
            "",
        ),
        ({f"{APP}.args.gpu_memory": float("nan")}, f"{APP}.args.gpu_memory", "not a finite number"),
    ],
)
def test_value_without_a_ready_server_is_reported(
    changes: dict[str, Any], path: str, expected: str
) -> None:
    assert_reported(changes, path, expected)


@pytest.mark.parametrize(
    "path",
    [
        "http_options.port",
        f"{INGRESS}.max_ongoing_requests",
        f"{INGRESS}.user_config.limits.items",
        f"{APP}.args.generators.cpu.intra_op_threads",
        f"{CPU_ENCODER}.ray_actor_options.num_cpus",
    ],
)
@pytest.mark.parametrize("value", [True, False])
def test_boolean_is_no_number(path: str, value: bool) -> None:
    assert_reported({path: value}, path, f"`{str(value).lower()}` is not a number")


@pytest.mark.parametrize("prefix", ['/a"b', "/a b", "/a#b", "/a?b", "/a%20b", "/a//b"])
def test_route_prefix_that_no_path_has_is_reported(prefix: str) -> None:
    assert_reported({f"{APP}.route_prefix": prefix}, f"{APP}.route_prefix", "only letters, digits")


@pytest.mark.parametrize(
    "origin",
    [
        *("example.org", "https://example.org/", "https://Example.org", "https://"),
        *(" https://a.org", "https://a.org:443", "http://a.org:80", "https://*.a.org"),
        "https://münchen.de",
    ],
)
def test_origin_that_no_browser_sends_is_reported(origin: str) -> None:
    assert_reported({ORIGINS: ["*", origin]}, f"{ORIGINS}.1", f"`{origin}` is not an origin")


@pytest.mark.parametrize(
    "changes",
    [
        {"proxy_location": "HeadOnly"},
        {"http_options.keep_alive_timeout_s": 1},
        *(
            {"http_options.host": host, f"{INGRESS}.user_config.no_auth": True}
            for host in ("localhost", "127.1", "::1", "fe80::1%lo", "box_1.example.org")
        ),
        {f"{APP}.route_prefix": "/a-b_c.d~e/F9/models@x:y+z=1!"},
        {f"{MODELS}.0.version": "0123456789ab"},
        {ORIGINS: ["*", "https://example.org", "http://127.0.0.1:8080", "null", "tauri://local"]},
    ],
)
def test_usable_value_is_accepted(changes: dict[str, Any]) -> None:
    assert check_config(changes) == []


def test_installed_onnx_runtime_has_no_unknown_provider() -> None:
    assert set(onnxruntime.get_all_providers()) <= PROVIDERS


def test_cyclic_values_are_checked() -> None:
    text = yaml.safe_dump(create_config({}))
    problems = check_text(text + "extra: &a [*a, .inf]\n")
    assert [to_dotted_path(problem.path) for problem in problems] == ["extra", "extra.1"]


def test_values_of_other_applications_are_their_own() -> None:
    config = create_config({})
    other = {"name": "other", "route_prefix": "/x", "import_path": "their.app"}
    args = {"models": [{"id": ""}], "encoders": {"cpu": {"providers": ["x"]}}, "limit": math.inf}
    entry = {
        "name": "Ingress",
        "user_config": {"cors": {"origins": ["x"]}},
        "autoscaling_config": {
            "metrics_interval_s": 10,
            "look_back_period_s": 10,
            "target_ongoing_requests": 9,
        },
    }
    config["applications"].append({**other, "args": args, "deployments": [entry]})
    assert check_text(yaml.safe_dump(config)) == []
