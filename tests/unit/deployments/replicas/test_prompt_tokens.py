"""Tokens of prompts, by a generator replica."""

from __future__ import annotations

from deployments.errors import EmptyInput
from deployments.messages import Chat
from tests.support.generator_replicas import call, complete, replica


async def test_chat_is_tokenized_without_generating(store, refs) -> None:
    chat = call(refs["tiny/speaker"], Chat(({"role": "user", "content": "Good day"},)))
    long = call(refs["tiny/speaker"], tuple(range(5)) * 1_000)
    async with replica(store) as running:
        tokens = await running.tokenize_prompt(chat)
        beyond_the_context = await running.tokenize_prompt(long)
        error = await running.tokenize_prompt(call(refs["tiny/speaker"], Chat(())))
        completion = await complete(running, chat)
    assert len(tokens) == completion.started.prompt_tokens
    assert beyond_the_context == tuple(range(5)) * 1_000
    assert isinstance(error, EmptyInput)
