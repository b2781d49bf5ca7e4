"""Tests of caches that are separate for each API key.

Fast answers from a shared cache would reveal the requests of other keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from deployments.config import CacheSettings, GeneratorSettings, IngressUserConfig
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

PROMPT = "a b c d e f g h a b c d e f g h a b c d e f g h a b c d e f g h"


class Keyed(NamedTuple):
    """Settings and two API keys that the settings accept."""

    settings: IngressUserConfig
    alice: str
    bob: str


@pytest.fixture(params=[False, True], ids=["separate", "shared"])
def keyed(request: pytest.FixtureRequest, tmp_path: Path) -> Keyed:
    path = tmp_path / "keys.json"
    settings = IngressUserConfig(key_file=path, cache=CacheSettings(shared=request.param))
    return Keyed(settings, add_key(path, "alice"), add_key(path, "bob"))


async def test_response_cache_is_separated_by_key(tiny_store: Path, keyed: Keyed) -> None:
    server = InProcess(tiny_store, settings=keyed.settings)
    async with server.client() as http:
        for key in (keyed.alice, keyed.alice, keyed.bob):
            await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"}, headers=bearer(key))
    hits = [record.cache for record in server.recorder.records]
    assert hits == ["miss", "hit", "hit" if keyed.settings.cache.shared else "miss"]


async def test_prefix_cache_is_separated_by_key(writing_store: Path, keyed: Keyed) -> None:
    server = InProcess(
        writing_store,
        models=(EMBEDDER, DECODER),
        settings=keyed.settings,
        writes=GeneratorSettings(kv_slots=3, max_context_tokens=128),
    )
    cached = []
    async with server.client() as http:
        for key in (keyed.alice, keyed.alice, keyed.bob):
            response = await http.post(
                "/v1/completions",
                json={"model": DECODER, "prompt": PROMPT, "max_tokens": 1},
                headers=bearer(key),
            )
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, keyed.settings.cache.shared]
