"""Tests with the unmodified `openai` client and an in-process server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel

from deployments.errors import EngineFailed
from tests.support.chat_harness import USER, ChatHarness
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedReply
from tests.unit.deployments.ingress.apis.openai.test_tool_calls import CALL, WEATHER

openai = pytest.importorskip("openai")
httpx2 = pytest.importorskip("httpx2")


@asynccontextmanager
async def open_client(harness: ChatHarness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with harness.in_process.application() as app:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test/v1")
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="any", http_client=http, max_retries=0
        ) as client:
            yield client


async def test_openai_client_chats_and_streams(writing_store: Path) -> None:
    async with open_client(ChatHarness(writing_store)) as client:
        full = await client.chat.completions.create(model=DECODER, messages=[USER])
        stream = await client.chat.completions.create(
            model=DECODER, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert full.choices[0].message.content == "Hello"
    assert full.usage is not None
    assert full.usage.total_tokens == 7
    options_sent = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(options_sent) == "Hello"
    assert chunks[-1].usage == full.usage


async def test_openai_stream_helper_collects_the_message(writing_store: Path) -> None:
    async with (
        open_client(ChatHarness(writing_store)) as client,
        client.chat.completions.stream(
            model=DECODER, messages=[USER], logprobs=True, top_logprobs=1
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"
    assert final.choices[0].logprobs is not None
    assert [token.token for token in final.choices[0].logprobs.content or ()] == ["Hel", "lo"]


async def test_openai_client_reads_tool_calls(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(tuple(CALL)))
    async with open_client(harness) as client:
        full = await client.chat.completions.create(
            model=DECODER, messages=[USER], tools=[WEATHER], tool_choice="required"
        )
        async with client.chat.completions.stream(
            model=DECODER, messages=[USER], tools=[WEATHER]
        ) as stream:
            final = await stream.get_final_completion()
    for completion in (full, final):
        assert completion.choices[0].finish_reason == "tool_calls"
        (call,) = completion.choices[0].message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')


class City(BaseModel):
    name: str


async def test_openai_client_parses_structured_output(writing_store: Path) -> None:
    harness = ChatHarness(writing_store, lambda call: ScriptedReply(('{"name": "Rome"}',)))
    async with open_client(harness) as client:
        parsed = await client.chat.completions.parse(
            model=DECODER, messages=[USER], response_format=City
        )
    assert parsed.choices[0].message.parsed == City(name="Rome")
    assert harness.call.options.grammar is not None
    assert harness.call.options.grammar.kind == "json_schema"


async def test_openai_client_completes_and_streams(writing_store: Path) -> None:
    async with open_client(ChatHarness(writing_store)) as client:
        full = await client.completions.create(
            model=DECODER, prompt=["a", "b"], echo=True, logprobs=2, extra_body={"top_k": 3}
        )
        stream = await client.completions.create(model=DECODER, prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
    assert [choice.text for choice in full.choices] == ["aHello", "bHello"]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_openai_client_raises_its_exceptions(writing_store: Path) -> None:
    broken = ChatHarness(writing_store, lambda call: ScriptedReply(breaks=EngineFailed("broken")))
    async with open_client(broken) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=DECODER, messages=[USER], temperature=9)
        with pytest.raises(openai.NotFoundError, match="no/such"):
            await client.completions.create(model="no/such", prompt="a")
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.completions.create(model=DECODER, prompt="a")
        stream = await client.completions.create(model=DECODER, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            _ = [chunk async for chunk in stream]
