"""Attacks over real connections get the expected status, and other clients are not affected."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter

import httpx
import orjson
import psutil
import pytest

from benchmarks.common.http import ServerAddress
from benchmarks.common.wire import HttpExchange, send_raw
from benchmarks.hostile.attacks import build_attacks
from benchmarks.hostile.generation_attacks import EXPRESSIONS, SCHEMAS
from benchmarks.hostile.requests import HostileRequest
from tests.support.all_models import (
    FILL_MASK_MODEL,
    NER_MODEL,
    NLI_MODEL,
    QA_MODEL,
    RANKER,
    SPLADE_MODEL,
)
from tests.support.artifacts import CLASSIFIER, EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.http_server import HttpServer

MODELS = {
    "feature-extraction": EMBEDDER,
    "sentence-similarity": EMBEDDER,
    "text-classification": CLASSIFIER,
    "zero-shot-classification": NLI_MODEL,
    "text-ranking": RANKER,
    "token-classification": NER_MODEL,
    "question-answering": QA_MODEL,
    "fill-mask": FILL_MASK_MODEL,
    "sparse-embeddings": SPLADE_MODEL,
    "text-generation": DECODER,
}
ATTACKS = list(build_attacks(MODELS))
GRAMMARS = (*EXPRESSIONS, *SCHEMAS)  # endings of the names of attacks with grammars
# Attacks with grammars are left out. In these tests the HTTP process compiles grammars itself,
# which delays all other requests.
CONCURRENT_ATTACKS = [attack for attack in ATTACKS if not attack.name.endswith(GRAMMARS)]
# Grammars of the maximum size are compiled one after the other, in a second each.
WAIT_S = 120.0
# Error bodies stay small, because they do not repeat the request.
MAX_ERROR_BYTES = 5_000
MAX_GROWTH_BYTES = 200_000_000  # caches take 80 MB; the allocator retains other memory


def send_concurrently(
    serve_http: HttpServer, chosen: list[HostileRequest]
) -> list[tuple[HostileRequest, HttpExchange]]:
    async def send() -> list[HttpExchange]:
        target = ServerAddress("127.0.0.1", serve_http.port)
        return await asyncio.gather(*(send_raw(target, a.raw, WAIT_S) for a in chosen))

    return list(zip(chosen, asyncio.run(send()), strict=True))


def check_exchange(attack: HostileRequest, exchange: HttpExchange) -> None:
    # A busy host compiles some grammars too slowly and refuses them.
    busy = {429} if attack.name.endswith(GRAMMARS) else set()
    assert exchange.status in attack.statuses | busy, (
        f"{attack.name}: {exchange.status} {exchange.body[:300]!r}"
    )
    assert b"Traceback" not in exchange.body
    assert b"set-cookie" not in exchange.head.lower()
    if exchange.status >= 400 and exchange.body.startswith(b"{"):
        assert orjson.loads(exchange.body)["error"], attack.name
        assert len(exchange.body) < MAX_ERROR_BYTES, attack.name


@pytest.mark.parametrize("start", range(0, len(ATTACKS), 20))
def test_attack_gets_an_expected_status(start: int, server: HttpServer) -> None:
    for attack in ATTACKS[start : start + 20]:
        ((_, exchange),) = send_concurrently(server, [attack])
        check_exchange(attack, exchange)


def test_attacks_are_distinct() -> None:
    names = Counter((attack.name, attack.raw) for attack in ATTACKS)
    assert max(names.values()) == 1


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def test_concurrent_attacks_do_not_affect_other_clients_or_memory(
    server: HttpServer,
) -> None:
    body = {"inputs": "good film", "options": {"use_cache": False}}
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        expected = http.post(f"/models/{EMBEDDER}", json=body).json()
        send_concurrently(server, CONCURRENT_ATTACKS)  # warm-up of caches and allocators
        before = resident_bytes()
        for _ in range(2):
            asyncio.run(attack_concurrently(server, body, expected))
        assert resident_bytes() - before < MAX_GROWTH_BYTES
        assert http.get("/ready").json()["ready"]


async def attack_concurrently(
    server: HttpServer, body: dict[str, object], expected: object
) -> None:
    """Send all attacks concurrently, and valid requests until the attacks end."""
    target = ServerAddress("127.0.0.1", server.port)
    run_attacks = asyncio.gather(*(send_raw(target, a.raw, WAIT_S) for a in CONCURRENT_ATTACKS))
    answered = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
        while not run_attacks.done() or answered < 3:
            reply = await http.post(f"/models/{EMBEDDER}", json=body)
            assert (reply.status_code, reply.json()) == (200, expected)
            answered += 1
    for attack, exchange in zip(CONCURRENT_ATTACKS, await run_attacks, strict=True):
        # Many concurrent requests may also time out or exceed limits.
        assert exchange.status in attack.statuses | {408, 429}, attack.name
