"""Valid and invalid requests that schemathesis generates from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.wire import build_request

# Weight of known model ids relative to random ids, to which the server can only answer 404.
KNOWN_IDS_WEIGHT = 2
FUZZED = ("public", "infer")  # access of the operations


def generate_requests(
    document: dict[str, Any],
    address: ServerAddress,
    model_ids: Sequence[str],
    count: int,
    seed: int,
) -> list[bytes]:
    """Generate about `count` requests. Equal seeds give equal requests.

    Operations with the access `admin` are left out, because they would remove or unload models, and
    those with `metrics`, because they read no input.
    """
    try:
        import schemathesis
    except ImportError as exc:
        raise BenchmarkError(
            f"schemathesis, which generates half of the requests, is missing: {exc}",
            hint='install it with `pip install -e ".[dev]"`',
        ) from exc
    schema: Any = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [each for each in operations if each.definition.raw["x-access"] in FUZZED]
    modes = [
        (operation, mode)
        for operation in operations
        for mode in schemathesis.GenerationMode
        # Only a body can be invalid, because any text is a valid model id.
        if operation.body or mode is schemathesis.GenerationMode.POSITIVE
    ]
    per_mode = -(-count // len(modes))
    requests: list[bytes] = []
    for operation, mode in modes:
        requests += generate_cases(operation, mode, address, model_ids, per_mode, seed)
    return requests


def generate_cases(
    operation: Any,
    mode: Any,
    address: ServerAddress,
    model_ids: Sequence[str],
    count: int,
    seed: int,
) -> list[bytes]:
    """Generate up to `count` requests of one operation, valid or invalid according to `mode`."""
    import hypothesis
    from hypothesis import strategies as st

    anything = operation.as_strategy(mode)
    cases = anything
    if "{id}" in operation.path:
        known = st.sampled_from(list(model_ids)).flatmap(
            lambda model_id: operation.as_strategy(mode, path_parameters={"id": model_id})
        )
        cases = st.one_of(*[known] * KNOWN_IDS_WEIGHT, anything)
    requests: list[bytes] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=cases)
    def collect(case: Any) -> None:
        requests.append(encode_case(case, address))

    collect()
    return requests


def encode_case(case: Any, address: ServerAddress) -> bytes:
    """Encode a case as a raw request with `Connection: close`."""
    import requests as requests_library

    arguments = case.as_transport_kwargs(base_url=address.url)
    prepared = requests_library.Request(
        arguments["method"],
        arguments["url"],
        headers=arguments["headers"],
        params=arguments.get("params"),
        data=arguments.get("data"),
        json=arguments.get("json"),
    ).prepare()
    body: Any = prepared.body or b""
    replaced = {"content-length", "connection", "host"}
    headers = [
        f"{k}: {decode_header(v)}" for k, v in prepared.headers.items() if k.lower() not in replaced
    ]
    raw = body.encode() if isinstance(body, str) else bytes(body)
    return build_request(prepared.method or "GET", prepared.path_url, raw, headers)


def decode_header(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
