"""Tests with the unmodified client of huggingface_hub and an in-process server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import AsyncInferenceClient, set_async_client_factory
from huggingface_hub.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    ValidationError,
)
from huggingface_hub.utils._http import async_hf_response_event_hook, default_async_client_factory

from deployments.errors import DeadlineExceeded, EngineFailed, Overloaded, ServeError
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    CHUNKS,
    MODELS,
    TEXT,
    ScriptedGenerator,
)

URL = f"http://test/models/{DECODER}"


@asynccontextmanager
async def hub_client(store: Path, url: str = URL, **arguments: Any) -> AsyncIterator[Any]:
    """Open a huggingface_hub client of an in-process application with a scripted generator."""
    server = InProcess(store, models=MODELS, generator=ScriptedGenerator(**arguments))
    async with server.application() as app:
        transport = httpx2.ASGITransport(app)
        # This hook, which the default client also has, reads the body of an error response to a
        # stream request.
        hooks = {"response": [async_hf_response_event_hook]}
        set_async_client_factory(lambda: httpx2.AsyncClient(transport=transport, event_hooks=hooks))
        try:
            async with AsyncInferenceClient(url) as client:
                yield client
        finally:
            set_async_client_factory(default_async_client_factory)


async def test_text_generation_returns_a_text(writing_store: Path) -> None:
    async with hub_client(writing_store) as client:
        assert await client.text_generation("Once") == "Once" + TEXT
        assert await client.text_generation("Once", return_full_text=False) == TEXT


@pytest.mark.parametrize("url", ["http://test", "http://test/v1", f"{URL}/v1"])
async def test_text_generation_works_with_every_base_url(url: str, writing_store: Path) -> None:
    async with hub_client(writing_store, url) as client:
        assert await client.text_generation("Once", max_new_tokens=4) == "Once" + TEXT


async def test_text_generation_returns_details(writing_store: Path) -> None:
    async with hub_client(writing_store, f"{URL}/generate") as client:
        result = await client.text_generation(
            "Once",
            details=True,
            decoder_input_details=True,
            best_of=2,
            top_n_tokens=2,
            temperature=0.5,
            grammar={"type": "regex", "value": "[a-z ]+"},
        )
    assert result.generated_text == TEXT
    assert (result.details.finish_reason, result.details.generated_tokens) == ("eos_token", 4)
    assert [token.text for token in result.details.prefill] == ["Once", " upon"]
    assert [token.logprob for token in result.details.tokens] == [-0.25, -0.5, -1.0, -0.125]
    assert result.details.top_tokens[0][1]["text"] == " the"
    assert result.details.best_of_sequences[0].generated_text == TEXT


@pytest.mark.parametrize("url", [URL, "http://test", f"{URL}/generate_stream"])
async def test_text_generation_streams_tokens(url: str, writing_store: Path) -> None:
    async with hub_client(writing_store, url) as client:
        texts = await client.text_generation("Once", stream=True)
        assert [text async for text in texts] == [" a", " ti", "me", ""]
        events = await client.text_generation("Once", stream=True, details=True)
        *_, last = [event async for event in events]
    assert last.generated_text.endswith(TEXT)
    assert last.details.finish_reason == "eos_token"
    assert (last.index, last.token.special) == (4, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Overloaded("Model is overloaded"), OverloadedError),
        (EngineFailed("the engine failed"), GenerationError),
        (DeadlineExceeded("too late"), IncompleteGenerationError),
    ],
)
async def test_rejections_raise_the_matching_exception(
    error: ServeError, raised: type[Exception], stream: bool, writing_store: Path
) -> None:
    async with hub_client(writing_store, refusal=error) as client:
        with pytest.raises(raised, match=error.message):
            await client.text_generation("Once", stream=stream)


async def test_failures_within_a_stream_raise(writing_store: Path) -> None:
    chunks = [CHUNKS[0], EngineFailed("the engine failed")]
    async with hub_client(writing_store, chunks=chunks) as client:
        texts = await client.text_generation("Once", stream=True)
        assert await anext(texts) == " a"
        with pytest.raises(GenerationError, match="the engine failed"):
            await anext(texts)


async def test_invalid_parameters_are_named(writing_store: Path) -> None:
    async with hub_client(writing_store) as client:
        with pytest.raises(ValidationError, match=r"parameters\.temperature"):
            await client.text_generation("Once", temperature=-1.0)
