"""Requests that schemathesis makes of a server's own document, right and wrong, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.hostile.wire import request

# Of ids, most should be of models that exist: the others all end with a 404.
KNOWN_IDS = 2


def fuzzed_requests(
    document: dict[str, Any], target: ServerAddress, model_ids: Sequence[str], count: int, seed: int
) -> list[bytes]:
    """About `count` requests over all operations, a function of `seed`."""
    try:
        import schemathesis
    except ImportError as exc:
        raise BenchmarkError(
            f"schemathesis makes half of the requests: {exc}",
            hint='install it with `pip install -e ".[dev]"`',
        ) from exc
    schema: Any = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    modes = [
        (operation, mode)
        for operation in operations
        for mode in schemathesis.GenerationMode
        # Any text is an id, so only a body can be wrong.
        if operation.body or mode is schemathesis.GenerationMode.POSITIVE
    ]
    each = -(-count // len(modes))
    made: list[bytes] = []
    for operation, mode in modes:
        made += cases_of(operation, mode, target, model_ids, each, seed)
    return made


def cases_of(
    operation: Any,
    mode: Any,
    target: ServerAddress,
    model_ids: Sequence[str],
    count: int,
    seed: int,
) -> list[bytes]:
    """`count` requests of one operation; fewer where there are no more different ones."""
    import hypothesis
    from hypothesis import strategies as st

    anything = operation.as_strategy(mode)
    cases = anything
    if "{id}" in operation.path:
        known = st.sampled_from(list(model_ids)).flatmap(
            lambda model_id: operation.as_strategy(mode, path_parameters={"id": model_id})
        )
        cases = st.one_of(*[known] * KNOWN_IDS, anything)
    made: list[bytes] = []

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
        made.append(as_bytes(case, target))

    collect()
    return made


def as_bytes(case: Any, target: ServerAddress) -> bytes:
    """A case as it would be sent, after which the server closes."""
    import requests

    given = case.as_transport_kwargs(base_url=target.url)
    ready = requests.Request(
        given["method"],
        given["url"],
        headers=given["headers"],
        params=given.get("params"),
        data=given.get("data"),
        json=given.get("json"),
    ).prepare()
    body: Any = ready.body or b""
    own = {"content-length", "connection", "host"}
    headers = [f"{k}: {told(v)}" for k, v in ready.headers.items() if k.lower() not in own]
    raw = body.encode() if isinstance(body, str) else bytes(body)
    return request(ready.method or "GET", ready.path_url, raw, headers)


def told(value: str | bytes) -> str:
    """A header's value, however the library keeps it."""
    return value.decode("latin-1") if isinstance(value, bytes) else value
