"""Hostile requests, with the statuses that a server may answer."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.wire import CLOSED

REJECTED = frozenset({400, 404, 413, 415, 422, CLOSED})


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """A request and its expected statuses.

    `stalls`: the request is incomplete, and the connection stays open. `leaves`: the answer may
    take minutes, so the client disconnects after a few seconds. `has_deadline`: the request states
    a deadline, so 504 is expected.
    """

    name: str
    raw: bytes
    statuses: frozenset[int]  # expected besides 408 and 429; empty: all statuses below 500
    stalls: bool = False
    leaves: bool = False
    has_deadline: bool = False
