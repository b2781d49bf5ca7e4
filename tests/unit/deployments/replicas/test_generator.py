from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.config import AppArgs, GeneratorSettings, ModelSettings, SchedulingSettings
from deployments.engines.decoder import DecoderInfo, DecoderSpec
from deployments.engines.decoder_factory import open_decoder
from deployments.engines.onnx_decoder import OnnxDecoder
from deployments.errors import (
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    EngineLost,
    InputTooLong,
    InvalidField,
    Overloaded,
    ServeError,
    UnknownModel,
    UnknownToken,
)
from deployments.generation.grammar import Constraint, GrammarCompiler
from deployments.generation.grammar_trials import TrialLimits
from deployments.messages import (
    Chat,
    Chunk,
    Completion,
    FinishReason,
    GenerationCall,
    GenerationOptions,
    Grammar,
    ModelRef,
    Prompt,
    SamplingParams,
    Started,
)
from deployments.records import StepRecord
from deployments.registry import ModelRegistry, RegisteredModel
from deployments.replicas.generator import GeneratorReplica
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder
from tests.support.fakes import TIMEOUT_S, ListRecorder, wait_until

GREEDY = SamplingParams(temperature=0)
REPLY = "Hi you!"
OTHER = Grammar("regex", "(a|b)")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("generators")
    seal_tiny_decoder(store)
    seal_tiny_decoder(store, "tiny/speaker", says=REPLY)
    return store


@pytest.fixture
def refs(store: Path) -> dict[str, ModelRef]:
    return {model.ref.id: model.ref for model in ModelRegistry.of(args(store)).open_models()}


def args(store: Path) -> AppArgs:
    return AppArgs(
        store=store,
        models=(ModelSettings(id=DECODER), ModelSettings(id="tiny/speaker")),
        encoders={},
        generators={Device.CPU: GeneratorSettings(kv_slots=2, max_context_tokens=200)},
    )


@asynccontextmanager
async def replica(
    store: Path, rules: SchedulingSettings | None = None
) -> AsyncIterator[GeneratorReplica]:
    steps: ListRecorder[StepRecord] = ListRecorder()
    running = GeneratorReplica(args(store), Device.CPU, steps)
    running.start()
    if rules is not None:
        running.configure(rules)
    try:
        yield running
    finally:
        await running.close()


def call(
    model: ModelRef,
    prompt: Prompt = "Once upon a time",
    *,
    deadline_s: float | None = None,
    **options: object,
) -> GenerationCall:
    chosen = GenerationOptions(**{"sampling": GREEDY, "max_new_tokens": 12} | options)
    return GenerationCall(model, prompt, chosen, deadline_s or time.monotonic() + 60)


async def complete(running: GeneratorReplica, request: GenerationCall) -> Completion:
    outcome = await running.complete(request)
    assert isinstance(outcome, Completion), outcome
    return outcome


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


async def test_grammar_constrains_the_text(store, refs) -> None:
    grammar = Grammar("regex", "(yes|no), [0-9]{3}")
    async with replica(store) as running:
        completion = await complete(
            running,
            call(
                refs[DECODER], grammar=grammar, sampling=SamplingParams(seed=3), max_new_tokens=40
            ),
        )
    word, digits = completion.text.split(", ")
    assert word in {"yes", "no"}
    assert len(digits) == 3
    assert digits.isdecimal()
    assert completion.finished.reason is FinishReason.END


async def test_grammar_compilation_does_not_block_other_calls(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, done = threading.Event(), threading.Event()
    compiled = GrammarCompiler.compile

    def compile_slowly(
        compiler: GrammarCompiler, grammar: Grammar, limits: TrialLimits
    ) -> Constraint:
        compiling.set()
        assert done.wait(20)
        return compiled(compiler, grammar, limits)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    request = call(refs[DECODER], grammar=Grammar("regex", "yes|no"))
    async with replica(store) as running:
        slow = asyncio.create_task(complete(running, request))
        assert await asyncio.to_thread(compiling.wait, 20)
        await asyncio.wait_for(complete(running, call(refs[DECODER])), 20)
        assert not slow.done()
        done.set()
        assert (await slow).text in {"yes", "no"}


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


async def test_costly_grammars_are_rejected_and_others_go_on(store, refs) -> None:
    costly = [
        call(refs[DECODER], grammar=Grammar("json_schema", f'{{"multipleOf": {number}}}'))
        for number in (9999991, 9999973, 9999971)
    ]
    simple = call(refs[DECODER], grammar=Grammar("regex", "(yes|no)"))
    async with replica(store) as running:
        await complete(running, simple)
        refused = [asyncio.create_task(running.complete(one)) for one in costly]
        assert (await complete(running, simple)).text in ("yes", "no")
        assert (await complete(running, call(refs[DECODER], grammar=OTHER))).text in ("a", "b")
        assert not any(task.done() for task in refused)
        for outcome in await asyncio.gather(*refused):
            assert isinstance(outcome, InvalidField)
            assert outcome.field == "grammar"
            assert "takes more than 1 s or 128 MB" in outcome.message
        again = await running.complete(costly[0])
        assert isinstance(again, InvalidField), "remembered"


async def test_compiled_grammars_share_a_budget(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.generator.MAX_GRAMMAR_BYTES", 1)
    async with replica(store) as running:
        outcome = await running.complete(call(refs[DECODER], grammar=OTHER))
        assert isinstance(outcome, Overloaded)
        assert "bytes of compiled grammars" in outcome.message
        await complete(running, call(refs[DECODER]))
        monkeypatch.undo()
        await complete(running, call(refs[DECODER], grammar=OTHER))
        assert running._grammar_bytes.used == 0


async def test_truncate_prompt_tokens_keeps_the_last_tokens(store, refs) -> None:
    async with replica(store) as running:
        completion = await complete(
            running, call(refs[DECODER], "x" * 5_000, truncate_prompt_tokens=50)
        )
    assert completion.started.prompt_tokens == 50


async def test_unknown_model_returns_its_error(store) -> None:
    async with replica(store) as running:
        outcome = await running.complete(call(ModelRef("tiny/other", "0" * 12)))
    assert isinstance(outcome, UnknownModel)


async def test_cancelled_reader_frees_its_slot(store, refs) -> None:
    endless = call(refs[DECODER], min_new_tokens=180, max_new_tokens=180)
    async with replica(store) as running:
        loop = running._models[refs[DECODER]].loop
        async with aclosing(running.stream(endless)) as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    break
            assert loop.load[0] == 1
        await wait_until(lambda: loop.load == (0, 0))
        waiting = asyncio.create_task(running.complete(endless))
        await wait_until(lambda: loop.load[0] == 1)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await wait_until(lambda: loop.load == (0, 0))
        assert not running._readers


async def test_unread_stream_blocks_no_other_call(store, refs) -> None:
    request = call(refs[DECODER], min_new_tokens=150, max_new_tokens=150)
    async with replica(store) as running, aclosing(running.stream(request)) as unread:
        assert isinstance(await anext(unread), Started)
        loop = running._models[refs[DECODER]].loop
        await wait_until(lambda: loop.load == (0, 0))
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
        loop = running._models[refs[DECODER]].loop
        await wait_until(lambda: loop.load == (0, 0))
        assert not running._readers
    survivors = [(n, o) for n, o in enumerate(outcomes) if isinstance(o, Completion)]
    assert len(survivors) >= 130
    assert any(isinstance(o, asyncio.CancelledError) for o in outcomes)
    for number, completion in survivors:
        assert completion.text == expected[number % len(prompts)]


async def test_check_health_fails_when_the_engine_is_lost(store, refs) -> None:
    async with replica(store) as running:
        await complete(running, call(refs[DECODER]))
        health = running._models[refs[DECODER]].loop.health
        health.record_failure(EngineLost("all processes have ended"))
        with pytest.raises(EngineLost, match="have ended"):
            await running.check_health()


async def test_check_health_fails_when_a_step_hangs(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(store) as running:
        loop = running._models[refs[DECODER]].loop
        held = threading.Event()
        monkeypatch.setattr(loop._decoder, "prefill", lambda *_, **__: held.wait(TIMEOUT_S))
        answer = asyncio.create_task(running.complete(call(refs[DECODER])))
        await wait_until(lambda: loop.health.running_s() > 0)
        await running.check_health()
        monkeypatch.setattr(running, "_hang_timeout_s", 0.0)
        with pytest.raises(EngineFailed, match=r"tiny/.* a call has run for"):
            await running.check_health()
        held.set()
        assert isinstance(await answer, ServeError)
        await wait_until(lambda: loop.health.running_s() == 0)  # the answer leaves first
        await running.check_health()


@pytest.mark.parametrize("subject", ["prompt", "grammar"])
async def test_check_health_fails_when_a_prompt_or_grammar_hangs(
    subject: str, store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(store) as running:
        preparer = running._models[refs[DECODER]].preparer
        held = threading.Event()
        method = {"prompt": "build_job", "grammar": "compile_grammar"}[subject]
        monkeypatch.setattr(preparer, method, lambda *_: held.wait(TIMEOUT_S))
        grammar = OTHER if subject == "grammar" else None
        answer = asyncio.create_task(running.complete(call(refs[DECODER], grammar=grammar)))
        health = getattr(running, f"_{subject}_health")
        await wait_until(lambda: health.running_s() > 0)
        await running.check_health()
        monkeypatch.setattr(running, "_hang_timeout_s", 0.0)
        with pytest.raises(EngineFailed, match=f"{subject} thread: a call has run for"):
            await running.check_health()
        held.set()
        with contextlib.suppress(Exception):
            await answer


async def test_check_health_fails_when_the_thread_of_the_steps_ended(store, refs) -> None:
    async with replica(store) as running:
        loop = running._models[refs[DECODER]].loop
        await running.check_health()
        loop.close()
        await running.check_health()  # it was asked to end
        loop._is_closing = False
        with pytest.raises(EngineFailed, match="the thread of its steps has ended"):
            await running.check_health()


async def test_failed_model_load_closes_its_engine(
    store, refs, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class FailingPreparer:
        def __init__(self, model: RegisteredModel, info: DecoderInfo) -> None:
            raise EngineFailed(f"{model.ref.id}: preparation failed")

    monkeypatch.setattr("deployments.replicas.generator.RequestPreparer", FailingPreparer)
    monkeypatch.setattr(OnnxDecoder, "close", lambda self: closed.append(self.info.compute_type))
    async with replica(store) as running:
        outcomes = [await running.complete(call(refs[DECODER])) for _ in range(3)]
    assert closed == ["cpu-fp32", "cpu-fp32"], "one engine per model"
    assert all(isinstance(o, EngineFailed) and "preparation failed" in o.message for o in outcomes)
    assert len({id(outcome) for outcome in outcomes}) == 3, "each has its own traceback"
    assert not any(error.__traceback__ for error in running._failed.values())


def test_open_decoder_closes_a_decoder_that_fails_warmup(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: OnnxDecoder, *args: object, **kwargs: object) -> None:
        raise EngineFailed("no memory left")

    closed: list[OnnxDecoder] = []
    monkeypatch.setattr(OnnxDecoder, "decode", broken)
    monkeypatch.setattr(OnnxDecoder, "close", lambda self: closed.append(self))
    model = next(ModelRegistry.of(args(store)).open_models())
    spec = DecoderSpec.of(model.directory, model.manifest, model.manifest.candidates[0])
    with pytest.raises(EngineFailed, match="no memory left"):
        open_decoder(spec, GeneratorSettings(kv_slots=2, max_context_tokens=100))
    assert len(closed) == 1


async def test_load_is_the_used_slots_and_the_measured_time_of_waiting_requests(
    store, refs
) -> None:
    async with replica(store) as running:
        assert running.load() == (0.0, 0.0)
        await complete(running, call(refs[DECODER]))
        streams = [running.stream(call(refs[DECODER], max_new_tokens=150)) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.ensure_future(running.complete(call(refs["tiny/speaker"])))
        busy = running.load().busy
        assert busy == 1.0
        assert isinstance(await waiting, Completion)
        waiting = asyncio.ensure_future(running.complete(call(refs[DECODER])))
        await wait_until(lambda: running.load().queued_s > 0)
        for stream in streams:
            await stream.aclose()
        assert isinstance(await waiting, Completion)
        assert running.load() == (0.0, 0.0)
