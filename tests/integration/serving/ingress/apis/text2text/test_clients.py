"""Encoder-decoder models over the client of huggingface_hub and over OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from huggingface_hub import AsyncInferenceClient, set_async_client_factory
from huggingface_hub.errors import BadRequestError
from huggingface_hub.utils._http import async_hf_response_event_hook, default_async_client_factory

from deployments.config import GeneratorSettings
from tests.integration.serving.ingress.apis.text2text.conftest import MODELS, OWN_WAY_SAID, PREFIX
from tests.integration.serving.ingress.apis.text2text.test_tasks import RIVER, TEXT_KEYS
from tests.support.encoder_decoder_artifacts import (
    SUMMARIZER,
    TRANSLATOR,
    WRITER,
    TinyEncoderDecoder,
)
from tests.support.in_process import InProcess


@asynccontextmanager
async def hub_client(store: Path, path: str) -> AsyncIterator[Any]:
    """Yield a hub client of the application with a real generator."""
    server = InProcess(
        store, models=MODELS, writes=GeneratorSettings(kv_slots=4, max_context_tokens=64)
    )
    async with server.application() as app:
        transport = httpx2.ASGITransport(app)
        # The default client has the same hook. It reads the errors of streams.
        hooks = {"response": [async_hf_response_event_hook]}
        set_async_client_factory(lambda: httpx2.AsyncClient(transport=transport, event_hooks=hooks))
        try:
            async with AsyncInferenceClient(f"http://test/models/{path}") as client:
                yield client
        finally:
            set_async_client_factory(default_async_client_factory)


async def test_summarization_returns_a_summary(
    rewriting_store: Path, tiny_writer: TinyEncoderDecoder
) -> None:
    async with hub_client(rewriting_store, SUMMARIZER) as client:
        result = await client.summarization(RIVER)
        assert result.summary_text == tiny_writer.answer(PREFIX + RIVER, **OWN_WAY_SAID)
        arguments = {"num_beams": 2, "min_length": 6}
        result = await client.summarization(
            " ".join([RIVER] * 9),
            clean_up_tokenization_spaces=True,
            truncation="longest_first",
            generate_parameters=arguments,
        )
        assert result.summary_text


async def test_translation_returns_a_translation(
    rewriting_store: Path, tiny_writer: TinyEncoderDecoder
) -> None:
    async with hub_client(rewriting_store, TRANSLATOR) as client:
        arguments = {"num_beams": 3, "max_new_tokens": 8}
        result = await client.translation(
            RIVER, generate_parameters=arguments, truncation="only_first"
        )
        assert result.translation_text == tiny_writer.answer(RIVER, **arguments)
        with pytest.raises(BadRequestError, match="has no language codes"):
            await client.translation(RIVER, src_lang="en_XX", tgt_lang="fr_XX")


async def test_model_with_several_tasks_returns_the_key_of_each_method(
    rewriting_store: Path, tiny_writer: TinyEncoderDecoder
) -> None:
    text = tiny_writer.answer(RIVER)
    async with hub_client(rewriting_store, WRITER) as client:
        assert (await client.summarization(RIVER)).summary_text == text
        assert (await client.translation(RIVER)).translation_text == text
        assert await client.text_generation(RIVER) == text


@pytest.mark.parametrize(
    ("agent", "keys"),
    [
        ("@huggingface/inference/4.13.0 node", set(TEXT_KEYS.values())),
        ("curl/8.5", {"generated_text"}),
    ],
)
async def test_keys_of_all_tasks_are_for_hub_clients(
    agent: str, keys: set[str], http: httpx.AsyncClient
) -> None:
    headers, body = {"user-agent": agent}, {"inputs": RIVER}
    reply = await http.post(f"/models/{WRITER}", json=body, headers=headers)
    assert reply.json()[0].keys() == keys
    path = f"/models/{WRITER}/pipeline/summarization"
    reply = await http.post(path, json=body, headers=headers)
    assert reply.json()[0].keys() == {"summary_text"}


async def test_pipeline_urls_select_the_task(rewriting_store: Path) -> None:
    async with hub_client(rewriting_store, f"{WRITER}/pipeline/translation") as client:
        assert (await client.translation(RIVER)).translation_text
    async with hub_client(rewriting_store, f"{WRITER}/pipeline/summarization") as client:
        assert (await client.summarization(RIVER)).summary_text


@pytest.mark.parametrize("model", [SUMMARIZER, TRANSLATOR, WRITER])
async def test_text_generation_returns_text_without_the_prompt(
    model: str, rewriting_store: Path
) -> None:
    async with hub_client(rewriting_store, model) as client:
        text = await client.text_generation(RIVER)
        assert text
        assert not text.startswith(RIVER)
        assert await client.text_generation(RIVER, return_full_text=True) == RIVER + text
        details = await client.text_generation(RIVER, details=True, max_new_tokens=4)
        assert (details.details.generated_tokens, details.details.finish_reason) == (4, "length")


async def test_text_generation_streams(rewriting_store: Path) -> None:
    async with hub_client(rewriting_store, TRANSLATOR) as client:
        whole = await client.text_generation(RIVER)
        texts = await client.text_generation(RIVER, stream=True)
        parts = [text async for text in texts]
        assert "".join(parts) == whole
        assert len(parts) > 2
        texts = await client.text_generation(RIVER, stream=True, temperature=2.0, seed=4)
        assert "".join([text async for text in texts])


async def test_openai_completions_return_text(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    body = {"model": SUMMARIZER, "prompt": RIVER, "temperature": 0, "max_tokens": 10}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert reply["choices"][0]["text"] == tiny_writer.answer(RIVER, repetition_penalty=1.5)
    prompt_tokens = len(tiny_writer.tokenizer.encode(RIVER).ids)
    assert reply["usage"]["prompt_tokens"] == prompt_tokens


async def test_prompt_logprobs_are_rejected(http: httpx.AsyncClient) -> None:
    body = {"model": WRITER, "prompt": RIVER, "echo": True, "logprobs": 1}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_chat_without_template_is_rejected(http: httpx.AsyncClient) -> None:
    body = {"model": WRITER, "messages": [{"role": "user", "content": RIVER}]}
    reply = await http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


async def test_tgi_routes_return_one_object(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    body = {"inputs": RIVER, "parameters": {"max_new_tokens": 10}}
    reply = await http.post(f"/models/{WRITER}/generate", json=body)
    assert reply.json() == {"generated_text": tiny_writer.answer(RIVER)}
