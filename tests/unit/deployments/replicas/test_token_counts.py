"""Counts of the tokens of prompts, by a generator replica."""

from __future__ import annotations

from deployments.errors import EmptyInput
from deployments.messages import Chat
from tests.support.generator_replicas import call, complete, replica


async def test_tokens_of_a_chat_are_counted_without_generating(store, refs) -> None:
    chat = call(refs["tiny/speaker"], Chat(({"role": "user", "content": "Good day"},)))
    long = call(refs["tiny/speaker"], tuple(range(5)) * 1_000)
    async with replica(store) as running:
        counted = await running.count_tokens(chat)
        beyond_the_context = await running.count_tokens(long)
        error = await running.count_tokens(call(refs["tiny/speaker"], Chat(())))
        completion = await complete(running, chat)
    assert counted == completion.started.prompt_tokens
    assert beyond_the_context == 5_000
    assert isinstance(error, EmptyInput)
