"""Steady load that compares each answer with the right answer of the version that computed it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson

from benchmarks.common.agreement import is_same_embedding
from benchmarks.common.fixed_rate import FixedRateSender
from benchmarks.common.http import ServerAddress, build_inference_body, model_path
from benchmarks.common.wire import HttpExchange, build_closing_post, require_ok, send_raw

TEXT = "w1 w2 w3 w4"
TIMEOUT_S = 60.0
MIN_COSINE = 0.999
GRACE_S = 3.0  # former versions may answer requests sent within this many s after a change
VERSION_HEADER = re.compile(rb"\r\nx-sha: *(\w+)", re.IGNORECASE)

# stale: the answer is right for its version, but this version should not answer at that time.
# failed: no complete answer with status 200.
RolloutOutcome = Literal["right", "wrong", "stale", "failed"]


@dataclass(frozen=True, slots=True)
class RolloutAnswer:
    """Result of one request. `version` is empty if the answer names no version."""

    name: str  # model name in the request
    step: str
    version: str
    outcome: RolloutOutcome
    status: int
    started_s: float
    ended_s: float


class VersionedLoad:
    """Load of requests to several model names in turn, at a fixed rate, until `stop`.

    A traffic split chooses the version by client. Each request therefore has a new API key, so that
    the server treats it as a request of a new client. Equal seeds give equal keys.
    """

    def __init__(
        self,
        address: ServerAddress,
        expected: Mapping[str, Any],
        names: Sequence[str],
        rate: float,
        *,
        seed: int,
    ) -> None:
        """Prepare the load. `expected` maps each version to its right answer.

        Each of `names` gets an equal share of the `rate` in requests/s.
        """
        self.answers: list[RolloutAnswer] = []
        self._address = address
        self._expected = expected
        self._names = names
        self._rate = rate
        self._keys = random.Random(seed)
        self._step = ""
        self._allowed: dict[str, frozenset[str]] = {}
        self._former: dict[str, frozenset[str]] = {}
        self._changed_s = 0.0
        self._sender = FixedRateSender()

    def begin_step(self, step: str, allowed: Mapping[str, frozenset[str]]) -> None:
        """Begin a step. `allowed` maps model names to the versions that may now answer.

        Names that are not in `allowed` keep their versions. The versions of the previous step stay
        allowed for GRACE_S.
        """
        self._step = step
        self._former, self._allowed = self._allowed, {**self._allowed, **allowed}
        self._changed_s = time.perf_counter()

    def start(self) -> None:
        self._sender.start([partial(self._send, name) for name in self._names], self._rate)

    async def stop(self) -> None:
        """Send no more requests, and wait for the pending answers.

        Raises BenchmarkError if the check of an answer failed with an unexpected exception.
        """
        await self._sender.stop()

    async def _send(self, name: str) -> None:
        step, started_s = self._step, time.perf_counter()
        client = f"x-api-key: client-{self._keys.getrandbits(64):016x}"
        answer = await send_raw(
            self._address, build_request(self._address, name, client), TIMEOUT_S
        )
        version = read_version(answer)
        outcome = self._classify(name, answer, version, started_s)
        self.answers.append(
            RolloutAnswer(
                name, step, version, outcome, answer.status, started_s, time.perf_counter()
            )
        )

    def _classify(
        self, name: str, answer: HttpExchange, version: str, started_s: float
    ) -> RolloutOutcome:
        if answer.status != 200 or answer.is_cut:
            return "failed"
        try:
            value = orjson.loads(answer.body)
        except ValueError:
            return "wrong"
        if not is_same_embedding(self._expected.get(version), value, MIN_COSINE):
            return "wrong"
        allowed = self._allowed.get(name, frozenset())
        if started_s < self._changed_s + GRACE_S:
            allowed |= self._former.get(name, allowed)
        return "right" if version in allowed else "stale"


def build_request(address: ServerAddress, name: str, *headers: str) -> bytes:
    return build_closing_post(
        address.prefix + model_path(name), build_inference_body(TEXT), *headers
    )


def read_version(answer: HttpExchange) -> str:
    found = VERSION_HEADER.search(answer.head)
    return found[1].decode() if found else ""


async def ask(address: ServerAddress, name: str) -> HttpExchange:
    return await send_raw(address, build_request(address, name), TIMEOUT_S)


async def ask_version(address: ServerAddress, name: str) -> Any:
    """Request the model `name`, and return the parsed answer.

    Raises BenchmarkError if the request fails.
    """
    answer = await ask(address, name)
    return orjson.loads(require_ok(answer, f"`{name}`", hint="see the server's log"))
