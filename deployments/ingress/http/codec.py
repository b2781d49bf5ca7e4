"""Bytes to JSON and back. Content-Type is ignored: curl and Triton's client send odd ones."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deployments.config import LimitSettings
from deployments.errors import BodyTooLarge, BodyTooSlow, MalformedBody
from deployments.ingress.http.inflate import decoder_for
from deployments.ingress.http.intake import SCOPE_KEY, BodyAccount

# No API here nests more than a handful; Python code that follows a value down must not overflow.
MAX_DEPTH = 32
# Objects and lists cost most: a million of them in two megabytes keep the interpreter for seconds.
MAX_CONTAINERS = 20_000
# Possessive, and with an end that may be missing: wherever a text begins there is a match, so the
# search takes linear time. Otherwise one that never ends is tried anew from every quote in it.
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_json(request: Request, limits: LimitSettings) -> Any:
    """The body as JSON. Raises what `read_body` and `parse_json` raise."""
    return parse_json(await read_body(request, limits))


async def read_json_object(request: Request, limits: LimitSettings) -> dict[str, Any]:
    """The body as one JSON object. Raises what `read_json` raises, and MalformedBody."""
    value = await read_json(request, limits)
    if not isinstance(value, dict):
        raise MalformedBody("the body must be a JSON object", field="body")
    return value


def parse_json(raw: bytes) -> Any:
    """The value of strict JSON in UTF-8; of keys that are told twice the last one counts.

    Strict means: no NaN, no number beyond what a double holds, no half of a surrogate pair, nothing
    behind the value. Raises MalformedBody.
    """
    # Only bodies with many brackets are looked at closer: those in texts are none.
    brackets = opening_brackets(raw)
    if brackets > MAX_CONTAINERS and opening_brackets(STRINGS.sub(b"", raw)) > MAX_CONTAINERS:
        raise MalformedBody(
            f"the body has more than {MAX_CONTAINERS} objects and lists", field="body"
        )
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise MalformedBody(f"the body is not JSON in UTF-8: {exc}", field="body") from exc
    if brackets > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise MalformedBody(f"the body is nested more than {MAX_DEPTH} deep", field="body")
    return value


def opening_brackets(raw: bytes) -> int:
    """How many objects and lists begin, at most."""
    return raw.count(b"[") + raw.count(b"{")


def deeper_than(value: Any, depth: int) -> bool:
    """Whether objects and lists stand in each other more than `depth` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
    return bool(level)


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """The body's bytes, inflated where `content-encoding` says so.

    Raises BodyTooLarge, BodyTooSlow, MalformedBody, Overloaded or UnsupportedEncoding.
    """
    declared = request.headers.get("content-length", "")
    # Digits are counted first: Python refuses to read a number of thousands of them.
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.body_bytes):
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_wait_s):
            return await _collect(request, limits)
    except TimeoutError as exc:
        raise BodyTooSlow(
            f"the body took more than {limits.body_wait_s:g} seconds", field="body"
        ) from exc
    except ClientDisconnect as exc:
        raise MalformedBody("the body ended early", field="body") from exc


async def _collect(request: Request, limits: LimitSettings) -> bytes:
    account: BodyAccount = request.scope[SCOPE_KEY]
    decoder = decoder_for(request.headers.get("content-encoding", ""))
    chunks: list[bytes] = []
    sent = size = 0
    async for chunk in request.stream():
        sent += len(chunk)
        plain = decoder.feed(chunk, limits.body_bytes - size)
        size += len(plain)
        # What is sent counts too: a compressed stream may go on and on without giving a byte.
        if max(sent, size) > limits.body_bytes:
            raise _too_large(limits)
        account.charge(len(plain))
        chunks.append(plain)
    decoder.finish()
    return b"".join(chunks)


def _too_large(limits: LimitSettings) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has more than the {limits.body_bytes} bytes that are read", field="body"
    )


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Strict JSON; numpy arrays become lists without a detour through Python floats."""
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, dict(headers or {}), media_type="application/json")
