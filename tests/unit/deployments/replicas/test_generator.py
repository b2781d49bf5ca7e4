from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from contextlib import aclosing
from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.config import SchedulingSettings
from deployments.engines.decoder import Logits, TokenColumn
from deployments.errors import (
    ArtifactMissing,
    DeadlineExceeded,
    EmptyInput,
    InputTooLong,
    InvalidField,
    Overloaded,
    UnknownToken,
)
from deployments.generation.job import Job
from deployments.generation.preparation import RequestPreparer
from deployments.messages import (
    Chat,
    Chunk,
    Completion,
    FinishReason,
    GenerationCall,
    Grammar,
    ModelRef,
    SamplingParams,
    Started,
)
from deployments.replicas import generator
from deployments.replicas.generator import GeneratorReplica
from tests.support.decoder_artifacts import DECODER
from tests.support.fakes import TIMEOUT_S, ListRecorder, wait_until
from tests.support.generator_replicas import REPLY, args, call, complete, replica


async def test_complete_returns_the_concatenated_stream(store, refs) -> None:
    async with replica(store) as running:
        completion = await complete(running, call(refs[DECODER]))
        events = [event async for event in running.stream(call(refs[DECODER]))]
    started, *chunks = events
    assert isinstance(started, Started)
    assert started.prompt_tokens == completion.started.prompt_tokens
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert tuple(token for chunk in chunks for token in chunk.tokens) == completion.tokens
    assert completion.finished.reason is FinishReason.LENGTH
    assert completion.finished.generated_tokens == len(completion.tokens) == 12
    assert min(completion.finished.timings) > 0


async def test_chat_generates_until_the_end_token(store, refs) -> None:
    chat = Chat(({"role": "user", "content": "Good day"},))
    async with replica(store) as running:
        completion = await complete(running, call(refs["tiny/speaker"], chat, max_new_tokens=50))
    assert completion.text == REPLY
    assert completion.finished.reason is FinishReason.END


@pytest.mark.parametrize(
    ("include_stop_string", "text"),
    [pytest.param(False, "Hi", id="excluded"), pytest.param(True, "Hi you", id="included")],
)
async def test_stop_string_across_tokens_ends_the_text(
    store, refs, include_stop_string, text
) -> None:
    chat = Chat(({"role": "user", "content": "Good day"},))
    async with replica(store) as running:
        completion = await complete(
            running,
            call(
                refs["tiny/speaker"], chat, stop=(" you",), include_stop_string=include_stop_string
            ),
        )
    assert (completion.text, completion.finished.reason) == (text, FinishReason.STOP)


async def test_end_token_is_ignored_before_min_new_tokens(store, refs) -> None:
    chat = Chat(({"role": "user", "content": "Good day"},))
    async with replica(store) as running:
        completion = await complete(
            running, call(refs["tiny/speaker"], chat, min_new_tokens=20, max_new_tokens=30)
        )
    assert completion.finished.generated_tokens >= 20


async def test_logprobs_and_alternatives_are_returned_on_request(store, refs) -> None:
    async with replica(store) as running:
        completion = await complete(running, call(refs[DECODER], logprobs=3))
        plain = await complete(running, call(refs[DECODER]))
    assert [token.id for token in completion.tokens] == [token.id for token in plain.tokens]
    assert plain.tokens[0].logprob is None
    for token in completion.tokens:
        assert token.logprob is not None
        assert len(token.alternatives) == 3
        assert token.alternatives[0].id == token.id, "greedy selects the most probable token"
        assert token.alternatives[0].logprob == pytest.approx(token.logprob)


async def test_settings_apply_to_a_model_that_is_being_loaded(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpinned = args(store).model_copy(update={"models": ()})
    running = GeneratorReplica(unpinned, Device.CPU, ListRecorder())
    running.start()
    finish_loading = generator._LoadedGenerator

    def configure_meanwhile(*parts: Any) -> Any:
        running.configure(SchedulingSettings(max_waiting_requests=1))
        return finish_loading(*parts)

    monkeypatch.setattr(generator, "_LoadedGenerator", configure_meanwhile)
    endless = call(refs[DECODER], min_new_tokens=100, max_new_tokens=100)
    outcomes = await asyncio.gather(*(running.complete(endless) for _ in range(6)))
    await running.close()
    assert any(isinstance(outcome, Overloaded) for outcome in outcomes)


async def test_seed_gives_the_same_text_in_any_batch(store, refs) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
    request = call(refs[DECODER], sampling=sampling, max_new_tokens=30)
    async with replica(store) as running:
        alone = await complete(running, request)
        others = [call(refs[DECODER], f"{n} others") for n in range(6)]
        together = await asyncio.gather(
            *(running.complete(each) for each in [*others, request, *others])
        )
    again = together[len(others)]
    assert isinstance(again, Completion)
    assert (again.text, again.started.seed) == (alone.text, 7)


async def test_drawn_seed_is_reported_and_reproduces_the_text(store, refs) -> None:
    async with replica(store) as running:
        drawn = await complete(running, call(refs[DECODER], sampling=SamplingParams()))
        sampling = SamplingParams(seed=drawn.started.seed)
        again = await complete(running, call(refs[DECODER], sampling=sampling))
    assert again.text == drawn.text


async def test_long_prompts_of_one_client_do_not_delay_another(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()
    clients: list[str] = []
    build = RequestPreparer.build_job

    def build_job(preparer: RequestPreparer, request: GenerationCall, constraint: object) -> Job:
        assert may_start.wait(TIMEOUT_S)
        clients.append(request.client)
        return build(preparer, request, constraint)

    monkeypatch.setattr(RequestPreparer, "build_job", build_job)
    long = call(refs[DECODER], "x" * 100)
    loud = [long._replace(client="loud") for _ in range(4)]
    batch = long._replace(client="batch", priority=1)
    quiet = call(refs[DECODER])._replace(client="quiet")
    async with replica(store) as running:
        tasks = [asyncio.create_task(running.complete(one)) for one in (*loud, batch, quiet)]
        await wait_until(lambda: len(running._prompts._queue) == 5)
        may_start.set()
        outcomes = await asyncio.gather(*tasks)
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    assert clients == ["loud", "quiet", "loud", "loud", "loud", "batch"]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "field"),
    [
        pytest.param("x" * 5_000, {}, InputTooLong, "prompt", id="too long"),
        pytest.param((5, 10_000), {}, UnknownToken, "prompt", id="no such token"),
        pytest.param("", {}, EmptyInput, "prompt", id="empty"),
        pytest.param(
            "a", {"grammar": Grammar("regex", "(")}, InvalidField, "grammar", id="grammar"
        ),
        pytest.param(
            "a",
            {"sampling": SamplingParams(logit_bias=((10_000, 1.0),))},
            UnknownToken,
            "logit_bias",
            id="bias",
        ),
    ],
)
async def test_invalid_call_returns_its_error(store, refs, prompt, options, error, field) -> None:
    async with replica(store) as running:
        outcome = await running.complete(call(refs[DECODER], prompt, **options))
        assert isinstance(outcome, error)
        assert outcome.field == field
        assert (await complete(running, call(refs[DECODER]))).text, "the next call succeeds"


async def test_truncate_prompt_tokens_keeps_the_last_tokens(store, refs) -> None:
    async with replica(store) as running:
        request = call(refs[DECODER], "x" * 5_000 + "!", truncate_prompt_tokens=50)
        started = (await complete(running, request)).started
        asked = request.options._replace(prompt_logprobs=True)
        logged = (await complete(running, request._replace(options=asked))).started
    assert started.prompt_tokens == logged.prompt_tokens == 50
    assert logged.prompt[-1].text == "!"


async def test_unknown_model_returns_its_error(store) -> None:
    async with replica(store) as running:
        outcome = await running.complete(call(ModelRef("tiny/other", "0" * 12)))
    assert isinstance(outcome, ArtifactMissing)


async def test_cancelled_reader_frees_its_slot(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = call(refs[DECODER], min_new_tokens=180, max_new_tokens=180)
    may_decode = threading.Event()
    async with replica(store, SchedulingSettings(max_draft_tokens=0)) as running:
        scheduler = running.pool.get(refs[DECODER]).scheduler
        decode = scheduler._decoder.decode

        def wait_and_decode(ids: TokenColumn, lengths: TokenColumn) -> Logits:
            assert may_decode.wait(TIMEOUT_S)
            return decode(ids, lengths)

        monkeypatch.setattr(scheduler._decoder, "decode", wait_and_decode)
        async with aclosing(running.stream(endless)) as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    break
            assert scheduler.slot_use.used == 1
        may_decode.set()
        await wait_until(lambda: scheduler.slot_use == (0, 0))
        may_decode.clear()
        waiting = asyncio.create_task(running.complete(endless))
        await wait_until(lambda: scheduler.slot_use.used == 1)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        may_decode.set()
        await wait_until(lambda: scheduler.slot_use == (0, 0))
        assert not running._readers


async def test_unread_stream_blocks_no_other_call(store, refs) -> None:
    request = call(refs[DECODER], min_new_tokens=150, max_new_tokens=150)
    async with replica(store) as running, aclosing(running.stream(request)) as unread:
        assert isinstance(await anext(unread), Started)
        scheduler = running.pool.get(refs[DECODER]).scheduler
        await wait_until(lambda: scheduler.slot_use == (0, 0))
        assert isinstance(await running.complete(call(refs[DECODER])), Completion)
        (rest,) = [event async for event in unread]
    assert isinstance(rest, Chunk)
    assert len(rest.tokens) == 150


async def test_expired_call_returns_deadline_exceeded(store, refs) -> None:
    async with replica(store) as running:
        late = call(refs[DECODER], deadline_s=time.monotonic() - 1)
        events = [event async for event in running.stream(late)]
    (only,) = events
    assert isinstance(only, DeadlineExceeded)


async def test_random_cancellations_leak_nothing_and_change_no_output(store, refs) -> None:
    prompts = [f"Say {n} again and again" for n in range(5)]
    async with replica(store) as running:
        expected = [(await complete(running, call(refs[DECODER], p))).text for p in prompts]
        tasks = []
        for number in range(200):
            prompt = prompts[number % len(prompts)]
            tasks.append(asyncio.create_task(running.complete(call(refs[DECODER], prompt))))
            if number % 3 == 0:
                asyncio.get_running_loop().call_later(number % 7 / 500, tasks[-1].cancel)
            if number % 10 == 9:
                await asyncio.gather(*tasks[-10:], return_exceptions=True)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        scheduler = running.pool.get(refs[DECODER]).scheduler
        await wait_until(lambda: scheduler.slot_use == (0, 0))
        assert not running._readers
    survivors = [(n, o) for n, o in enumerate(outcomes) if isinstance(o, Completion)]
    assert len(survivors) >= 130
    assert any(isinstance(o, asyncio.CancelledError) for o in outcomes)
    for number, completion in survivors:
        assert completion.text == expected[number % len(prompts)]
