"""Caches of different keys, which would tell by their speed what another key has asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import CacheSettings, GeneratorSettings, IngressUserConfig
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

PROMPT = "a b c d e f g h a b c d e f g h a b c d e f g h a b c d e f g h"


@pytest.mark.parametrize("shared", [False, True])
async def test_response_cache_is_separated_by_key(
    tiny_store: Path, tmp_path: Path, shared: bool
) -> None:
    path = tmp_path / "keys.json"
    alice, bob = add_key(path, "alice"), add_key(path, "bob")
    settings = IngressUserConfig(key_file=path, cache=CacheSettings(shared=shared))
    server = InProcess(tiny_store, settings=settings)
    async with server.client() as http:
        for key in (alice, alice, bob):
            await http.post(f"/models/{EMBEDDER}", json={"inputs": "a"}, headers=bearer(key))
    hits = [record.cache for record in server.recorder.records]
    assert hits == ["miss", "hit", "hit" if shared else "miss"]


@pytest.mark.parametrize("shared", [False, True])
async def test_prefix_cache_is_separated_by_key(
    writing_store: Path, tmp_path: Path, shared: bool
) -> None:
    path = tmp_path / "keys.json"
    alice, bob = add_key(path, "alice"), add_key(path, "bob")
    settings = IngressUserConfig(key_file=path, cache=CacheSettings(shared=shared))
    server = InProcess(
        writing_store,
        models=(EMBEDDER, DECODER),
        settings=settings,
        writes=GeneratorSettings(kv_slots=3, max_context_tokens=128),
    )
    cached = []
    async with server.client() as http:
        for key in (alice, alice, bob):
            response = await http.post(
                "/v1/completions",
                json={"model": DECODER, "prompt": PROMPT, "max_tokens": 1},
                headers=bearer(key),
            )
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, shared]
