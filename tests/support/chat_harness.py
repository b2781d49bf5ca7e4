"""Harness for requests to an application with a scripted generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson

from deployments.config import IngressUserConfig
from deployments.messages import GenerationCall
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.generators import ScriptedGeneratorClient, ScriptedReply
from tests.support.in_process import InProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "What is a river?"}
CHAT_BODY = {"messages": [USER]}


@dataclass
class ChatHarness:
    """Client that sends each request to a new application. The applications share `generator`."""

    store: Path
    reply_to: Callable[[GenerationCall], ScriptedReply] = lambda call: ScriptedReply()
    settings: IngressUserConfig = field(default_factory=IngressUserConfig)

    def __post_init__(self) -> None:
        self.generator = ScriptedGeneratorClient(self.reply_to)
        self.in_process = InProcess(
            self.store,
            models=(EMBEDDER, DECODER),
            settings=self.settings,
            generator=self.generator,
        )

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        async with self.in_process.client() as http:
            return await http.post(path, json=body, **more)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Request a stream. Return its events without the end marker."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done = events_in(response.content)
        assert done == "[DONE]"
        return events

    @property
    def call(self) -> GenerationCall:
        """The last call that the generator received."""
        return self.generator.calls[-1]


def events_in(body: bytes) -> list[Any]:
    """Parse the events of a stream. The end marker becomes the string "[DONE]"."""
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") for event in events)
    texts = [event.removeprefix(b"data: ") for event in events]
    return ["[DONE]" if text == b"[DONE]" else orjson.loads(text) for text in texts]
