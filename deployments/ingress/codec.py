"""Bytes to JSON and back. Content-Type is ignored: curl and Triton's client send odd ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deployments.errors import BodyTooLarge, MalformedBody


async def read_json_object(request: Request, body_bytes: int) -> dict[str, Any]:
    """The body as one JSON object. Raises BodyTooLarge or MalformedBody."""
    raw = await _read_body(request, body_bytes)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise MalformedBody(f"the body is not JSON in UTF-8: {exc}", field="body") from exc
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object", field="body")
    return value


async def _read_body(request: Request, body_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > body_bytes:
        raise _too_large(int(declared), body_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > body_bytes:
                raise _too_large(size, body_bytes)
            chunks.append(chunk)
    except ClientDisconnect as exc:
        raise MalformedBody("the body ended early", field="body") from exc
    return b"".join(chunks)


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has at least {size} bytes; at most {limit} are read", field="body"
    )


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Strict JSON; numpy arrays become lists without a detour through Python floats."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, dict(headers or {}), media_type="application/json")
