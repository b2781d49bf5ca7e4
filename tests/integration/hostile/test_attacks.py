"""Every attack over a real connection: the right refusal, no traceback, nobody else harmed."""

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
from benchmarks.hostile.attacks import build_attacks
from benchmarks.hostile.generation_attacks import EXPRESSIONS, SCHEMAS
from benchmarks.hostile.wire import HostileRequest, HttpExchange, send_raw
from tests.support.all_models import FILL_MASK_MODEL, NER_MODEL, NLI_MODEL, QA_MODEL, RANKER
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
    "text-generation": DECODER,
}
ATTACKS = list(build_attacks(MODELS))
# Grammars are compiled in the generator's process, which here, and only here, is the ingress's.
STORM = [a for a in ATTACKS if not a.name.endswith(tuple([*EXPRESSIONS, *SCHEMAS]))]
# Grammars at the limit of what is read take a second each, one after the other.
WAIT_S = 120.0
# An error tells what was wrong, not what was sent.
MOST_ERROR_BYTES = 5_000
GROWTH_BYTES = 200_000_000  # caches of 80 MB, and what an allocator keeps


def sent_together(
    serve_http: HttpServer, chosen: list[HostileRequest]
) -> list[tuple[HostileRequest, HttpExchange]]:
    async def send() -> list[HttpExchange]:
        target = ServerAddress("127.0.0.1", serve_http.port)
        return await asyncio.gather(*(send_raw(target, a.raw, WAIT_S) for a in chosen))

    return list(zip(chosen, asyncio.run(send()), strict=True))


def is_clean(attack: HostileRequest, got: HttpExchange) -> None:
    assert got.status in attack.statuses, f"{attack.name}: {got.status} {got.body[:300]!r}"
    assert b"Traceback" not in got.body
    assert b"set-cookie" not in got.head.lower()
    if got.status >= 400 and got.body.startswith(b"{"):
        assert orjson.loads(got.body)["error"], attack.name
        assert len(got.body) < MOST_ERROR_BYTES, attack.name


@pytest.mark.parametrize("start", range(0, len(ATTACKS), 20))
def test_an_attack_gets_the_right_refusal(start: int, server: HttpServer) -> None:
    for attack in ATTACKS[start : start + 20]:
        ((_, got),) = sent_together(server, [attack])
        is_clean(attack, got)


def test_no_attack_is_counted_twice() -> None:
    names = Counter((attack.name, attack.raw) for attack in ATTACKS)
    assert max(names.values()) == 1


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def test_a_good_neighbour_is_answered_all_the_while_and_memory_stays_bounded(
    server: HttpServer,
) -> None:
    body = {"inputs": "good film", "options": {"use_cache": False}}
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
        expected = http.post(f"/models/{EMBEDDER}", json=body).json()
        sent_together(server, STORM)  # caches and allocators have their fill
        before = resident_bytes()
        for _ in range(2):
            asyncio.run(siege(server, body, expected))
        assert resident_bytes() - before < GROWTH_BYTES
        assert http.get("/ready").json()["ready"]


async def siege(server: HttpServer, body: dict[str, object], expected: object) -> None:
    """All attacks at once; one good request after the other until they are through."""
    target = ServerAddress("127.0.0.1", server.port)
    run_attacks = asyncio.gather(*(send_raw(target, a.raw, WAIT_S) for a in STORM))
    answered = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
        while not run_attacks.done() or answered < 3:
            reply = await http.post(f"/models/{EMBEDDER}", json=body)
            assert (reply.status_code, reply.json()) == (200, expected)
            answered += 1
    for attack, got in zip(STORM, await run_attacks, strict=True):
        # Of many at once some come slowly, and some are too many.
        assert got.status in attack.statuses | {408, 429}, attack.name
