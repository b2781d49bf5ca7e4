"""Tests of the text generation routes with a tiny decoder model instead of a fake generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config import GeneratorSettings
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.in_process import InProcess
from tests.support.scripted_generation import events_in

FIXED_TEXT_MODEL, SAYS = "tiny/speaker", "Hi you!"
ASKED = {"inputs": "\n", "parameters": {"details": True, "top_n_tokens": 2}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("speaking")
    seal_tiny_decoder(store, FIXED_TEXT_MODEL, says=SAYS)
    return store


async def test_top_tokens_have_a_special_flag(store: Path) -> None:
    writes = GeneratorSettings(kv_slots=2, max_context_tokens=200)
    async with InProcess(store, (FIXED_TEXT_MODEL,), writes=writes).client() as http:
        full = (await http.post("/generate", json=ASKED)).json()
        stream = await http.post("/generate_stream", json=ASKED)
    assert full["generated_text"] == SAYS
    result = full["details"]["top_tokens"]
    assert result == [event["top_tokens"] for event in events_in(stream.content)]
    # At the end, the most likely token is the end-of-sequence token, which is special.
    assert [likeliest["special"] for likeliest, _ in result] == [False] * (len(result) - 1) + [True]
    ends = {one["id"] for tops in result for one in tops if one["special"]}
    words = {one["id"] for tops in result for one in tops if not one["special"]}
    assert not ends & words
