"""Tests of `IngressReplica.configure`: settings reach every part while the server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import IngressUserConfig
from deployments.errors import BadSetting
from deployments.ingress.micro_batches import GetSettings, SendMicroBatch, SubmitCall
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import RecordingEncoder, send_unbatched
from tests.support.generators import ScriptedGeneratorClient
from tests.support.in_process import InProcess
from tests.support.keys import add_key

PAGE = {"origin": "https://page.example"}


async def embed(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post(f"/models/{EMBEDDER}", json={"inputs": ["a", "b"]}, headers=PAGE)


@pytest.mark.parametrize(
    ("settings", "header", "before", "after"),
    [
        ({}, "x-cache", "miss", "hit"),
        ({"cache": {"max_bytes": 0}}, "x-cache", "miss", "miss"),
        ({"placement": {"default": "gpu"}}, "x-compute-type", "cpu-fp32", "gpu-fp32"),
        ({"cors": {"origins": [PAGE["origin"]]}}, "vary", None, "origin"),
    ],
)
async def test_settings_change_later_responses(
    settings: dict[str, Any], header: str, before: str | None, after: str, tiny_store: Path
) -> None:
    server = InProcess(tiny_store, gpus=1)
    async with server.client() as http:
        first = await embed(http)
        server.replica.configure(IngressUserConfig.parse(settings))
        later = await embed(http)
    assert (first.status_code, later.status_code) == (200, 200)
    assert (first.headers.get(header), later.headers.get(header)) == (before, after)


async def test_limits_refuse_later_requests(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.client() as http:
        permitted = await embed(http)
        server.replica.configure(IngressUserConfig.parse({"limits": {"items": 1}}))
        refused = await embed(http)
    assert (permitted.status_code, refused.status_code) == (200, 422)


async def test_key_file_is_required_from_later_requests(tiny_store: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys.json"
    add_key(key_file)
    server = InProcess(tiny_store)
    async with server.client() as http:
        permitted = await embed(http)
        server.replica.configure(IngressUserConfig(key_file=key_file))
        with pytest.raises(BadSetting):
            server.replica.configure(IngressUserConfig(key_file=tmp_path / "missing.json"))
        refused = await embed(http)
    assert (permitted.status_code, refused.status_code) == (200, 401)


@pytest.mark.parametrize("broken", ["key_file", "tracing"])
async def test_no_setting_is_applied_if_one_cannot_be(
    broken: str, tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "keys.json"
    if broken == "tracing":
        add_key(key_file)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    changed = {"key_file": key_file, "limits": {"items": 1}, "tracing": {"enabled": True}}
    server = InProcess(tiny_store)
    async with server.client() as http:
        with pytest.raises(BadSetting):
            server.replica.configure(IngressUserConfig.parse(changed))
        later = await embed(http)
        server.replica.configure(IngressUserConfig())  # ends an export, if there is one
    assert later.status_code == 200


async def test_pulls_are_permitted_to_later_requests(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress.builds.has_compiler", lambda: False)
    server = InProcess(tiny_store)
    async with server.client() as http:
        forbidden = await http.post("/models", json={"source": "org/model"})
        server.replica.configure(IngressUserConfig.parse({"builds": {"allow_pull": True}}))
        permitted = await http.post("/models", json={"source": "org/model"})
    assert "`builds.allow_pull` is false" in forbidden.text
    assert "no compiler" in permitted.text


async def test_later_calls_have_the_new_deadlines(writing_store: Path) -> None:
    encoder, generator = RecordingEncoder(), ScriptedGeneratorClient()
    server = InProcess(writing_store, (EMBEDDER, DECODER), encoder=encoder, generator=generator)
    settings = {"timeout_s": 1e6, "generation_timeout_s": 1e6, "cache": {"max_bytes": 0}}
    async with server.client() as http:
        for _ in range(2):
            await embed(http)
            await http.post("/v1/completions", json={"model": DECODER, "prompt": "Once"})
            server.replica.configure(IngressUserConfig.parse(settings))
    for calls in (encoder.calls, generator.calls):
        first, later = calls
        assert later.deadline_s - first.deadline_s > 9e5


async def test_micro_batches_have_the_new_limits(tiny_store: Path) -> None:
    readers: list[GetSettings] = []

    def build_submit(send: SendMicroBatch, get_settings: GetSettings) -> SubmitCall:
        readers.append(get_settings)
        return send_unbatched(send, get_settings)

    server = InProcess(tiny_store, batched=build_submit)
    async with server.client() as http:
        await embed(http)
        settings = IngressUserConfig.parse({"batching": {"max_batch_size": 7}})
        server.replica.configure(settings)
    assert [read() for read in readers] == [settings.batching]


async def test_idle_cores_may_sleep_during_later_requests(tiny_store: Path) -> None:
    server = InProcess(tiny_store)
    async with server.application():
        assert server.idle_cores.is_enabled
        server.replica.configure(IngressUserConfig(keep_cores_awake=False))
        assert not server.idle_cores.is_enabled
