"""Completions of a server, compared with those of the artifact in this process."""

from __future__ import annotations

from pathlib import Path

import httpx

from benchmarks.common.local_model import LocalModel
from benchmarks.rivals.apis import completion_api
from benchmarks.rivals.references import ReferenceCompletions
from deployments.config import GeneratorSettings
from tests.support.benchmark_generation import DecodingGenerator
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.http_server import serve_http
from tests.support.in_process import InProcess

PROMPTS = ("good film", "a train at night", "music")


def test_a_server_completes_as_the_artifact_does(tmp_path: Path) -> None:
    seal_tiny_decoder(tmp_path)
    expected = ReferenceCompletions.open(LocalModel.open(tmp_path, DECODER)).complete(PROMPTS)
    api = completion_api(DECODER)
    generator = DecodingGenerator(tmp_path, DECODER, GeneratorSettings(kv_slots=2))
    with serve_http(InProcess(tmp_path, models=(DECODER,), generator=generator)) as server:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            answer = httpx.post(server.url + api.path, content=api.build([prompt]))
            assert api.parse(answer.content).text == text
    assert any(expected)
