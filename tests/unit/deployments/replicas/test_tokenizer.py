from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.config import AppArgs, EncoderSettings, ModelSettings, TokenizerUserConfig
from deployments.deadlines import deadline_after
from deployments.errors import (
    ArtifactMissing,
    DeadlineExceeded,
    EngineFailed,
    InputTooLong,
    Overloaded,
    ServeError,
)
from deployments.messages import (
    BatchKey,
    Call,
    CallBatch,
    ModelRef,
    Text,
    TokenizedCall,
    Truncation,
    Windowing,
)
from deployments.records import TokenizeRecord, TokenizeRecorder
from deployments.registry import ModelRegistry
from deployments.replicas.tokenizer import INLINE_CHARACTERS, TokenizerReplica
from deployments.tokenization.slices import SLICE_CHARACTERS
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.windows import WindowTokenizer
from tests.support.artifacts import CLASSIFIER, EMBEDDER, MAX_TOKENS
from tests.support.fakes import TIMEOUT_S, PanicException, TokenizeLog, far_deadline, wait_until

SLICE = "good film " * (SLICE_CHARACTERS // 10)
LONG = "a " * INLINE_CHARACTERS  # tokenized in the thread, not on the event loop


@pytest.fixture
async def make_replica(tiny_store: Path) -> AsyncIterator[object]:
    """Yield a factory of tokenizer replicas over the tiny store. Close them after the test."""
    replicas: list[TokenizerReplica] = []

    def make(recorder: TokenizeRecorder) -> TokenizerReplica:
        replicas.append(TokenizerReplica(args(tiny_store), recorder))
        return replicas[-1]

    yield make
    for replica in replicas:
        await replica.close()


def args(store: Path) -> AppArgs:
    models = (ModelSettings(id=EMBEDDER), ModelSettings(id=CLASSIFIER))
    return AppArgs(store=store, models=models, encoders={Device.CPU: EncoderSettings()})


def batch(store: Path, *calls: Call, model: str = EMBEDDER) -> CallBatch:
    ref = ModelRegistry.of(args(store)).find(model).ref
    return CallBatch(BatchKey(ref, TaskName.FEATURE_EXTRACTION, Device.CPU, long=False), calls)


def call(*texts: Text, options: object = None, truncate: bool = False) -> Call:
    fields = tuple(f"inputs[{i}]" for i in range(len(texts)))
    truncation = Truncation.KEEP_START if truncate else Truncation.REFUSE
    return Call(texts, fields, options, truncation, far_deadline())


async def test_tokenize_batch_returns_lengths_and_one_id_buffer(
    make_replica, tiny_store: Path
) -> None:
    log = TokenizeLog()
    first, second = call("good film", "night", options="first"), call("the", options="second")
    encoded = await make_replica(log).tokenize_batch(batch(tiny_store, first, second))
    assert encoded.calls == (
        TokenizedCall((4, 3), 0, "first", first.deadline_s),
        TokenizedCall((3,), 0, "second", second.deadline_s),
    )
    assert [len(item.ids) for item in encoded.items()] == [4, 3, 3]
    assert encoded.tokenize_s > 0
    assert [(done.model, done.texts, done.cache_hits) for done in log.records] == [(EMBEDDER, 3, 0)]


@pytest.mark.parametrize("filler", ["", LONG], ids=["on the loop", "in the thread"])
async def test_too_long_call_leaves_no_gap_in_the_ids(
    filler: str, make_replica, tiny_store: Path
) -> None:
    replica = make_replica(TokenizeLog())
    calls = (
        call("good film"),
        call("good " * 20),
        call("night"),
        call(filler or "a", truncate=True),
    )
    encoded = await replica.tokenize_batch(batch(tiny_store, *calls))
    alone = await replica.tokenize_batch(batch(tiny_store, call("night")))
    before, refused, after, cut = encoded.calls
    assert isinstance(refused, InputTooLong)
    assert (before.lengths, after.lengths) == ((4,), (3,))
    assert cut.truncated == (1 if filler else 0)
    assert encoded.items()[1].ids.tolist() == alone.items()[0].ids.tolist()
    assert all(len(item.ids) <= MAX_TOKENS for item in encoded.items())


@pytest.mark.parametrize("error", [TypeError, PanicException])
async def test_call_that_breaks_the_tokenizer_fails_alone(
    error: type[BaseException], make_replica, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = CachingTokenizer.tokenize

    def fail_on_poison(tokenizer: CachingTokenizer, calls: Sequence[Call]) -> object:
        if any("poison" in call.texts for call in calls):
            raise error("the text of a client")
        return tokenize(tokenizer, calls)

    monkeypatch.setattr(CachingTokenizer, "tokenize", fail_on_poison)
    calls = call("good film"), call("poison"), call("night")
    encoded = await make_replica(TokenizeLog()).tokenize_batch(batch(tiny_store, *calls))
    before, failed, after = encoded.calls
    assert isinstance(failed, EngineFailed)
    assert "client" not in failed.message
    assert (before.lengths, after.lengths) == ((4,), (3,))
    assert [len(item.ids) for item in encoded.items()] == [4, 3]


async def test_second_segment_starts_are_sent_for_pairs_only(
    make_replica, tiny_store: Path
) -> None:
    single, paired = call("good film"), call("night", ("good film", "the"))
    encoded = await make_replica(TokenizeLog()).tokenize_batch(batch(tiny_store, single, paired))
    assert [outcome.second_segment_start for outcome in encoded.calls] == [(), (3, 4)]
    assert [item.second_segment_start for item in encoded.items()] == [4, 3, 4]


async def test_batch_of_a_missing_model_raises(make_replica, tiny_store: Path) -> None:
    known = batch(tiny_store, call("a"), call("b"))
    unknown = known._replace(key=known.key._replace(model=ModelRef("no/such", "0123456789ab")))
    with pytest.raises(ArtifactMissing) as raised:
        await make_replica(TokenizeLog()).tokenize_batch(unknown)
    assert raised.value.elsewhere, "another replica may have it"


async def test_batch_without_calls_loads_its_model(tiny_store: Path) -> None:
    configured = args(tiny_store).model_copy(update={"models": ()})
    replica = TokenizerReplica(configured, TokenizeLog())
    empty = batch(tiny_store)
    assert empty.key.model not in replica.pool
    assert (await replica.tokenize_batch(empty)).calls == ()
    assert empty.key.model in replica.pool
    await replica.close()


class BlockingRecorder:
    """A recorder that blocks its first call until `release` is set."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.release = threading.Event()

    def record(self, done: TokenizeRecord) -> None:
        self.recorded.append(threading.current_thread().name)
        if len(self.recorded) == 1:
            assert self.release.wait(TIMEOUT_S)


async def test_cancelled_batch_still_occupies_the_tokenizer_thread(
    make_replica, tiny_store: Path
) -> None:
    recorder = BlockingRecorder()
    replica = make_replica(recorder)
    cancelled = asyncio.ensure_future(
        replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    )
    await wait_until(lambda: bool(recorder.recorded))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    short = asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, call("night"))))
    await asyncio.sleep(0.02)
    assert not short.done(), "tokenizers are not thread-safe"
    recorder.release.set()
    assert (await short).calls[0].lengths == (3,)
    assert all(name.startswith("tokenizer") for name in recorder.recorded)


async def test_short_batch_is_tokenized_on_the_event_loop(make_replica, tiny_store: Path) -> None:
    recorder = BlockingRecorder()
    recorder.release.set()
    replica = make_replica(recorder)
    await replica.tokenize_batch(batch(tiny_store, call("night")))
    await replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    await replica.tokenize_batch(batch(tiny_store, call("a")._replace(windowing=Windowing())))
    assert recorder.recorded[0] == threading.main_thread().name
    assert all(name.startswith("tokenizer") for name in recorder.recorded[1:])


async def test_tokenizer_of_windows_is_opened_on_the_thread(
    make_replica, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    class RecordedTokenizer(WindowTokenizer):
        def __init__(self, directory: Path, max_tokens: int) -> None:
            threads.append(threading.current_thread().name)
            super().__init__(directory, max_tokens)

    monkeypatch.setattr("deployments.tokenization.tokenizer.WindowTokenizer", RecordedTokenizer)
    replica = make_replica(TokenizeLog())
    with_windows = call("a b")._replace(windowing=Windowing(stride=0))
    for _ in range(2):
        await replica.tokenize_batch(batch(tiny_store, with_windows))
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


async def test_cache_settings_apply_to_a_running_replica(make_replica, tiny_store: Path) -> None:
    replica = make_replica(TokenizeLog())
    plain = await replica.tokenize_batch(batch(tiny_store, call("good film")))
    for cache_bytes in (1_000_000, 0):
        replica.configure(TokenizerUserConfig(cache_bytes=cache_bytes))
        for _ in range(2):
            again = await replica.tokenize_batch(batch(tiny_store, call("good film")))
            assert again.ids == plain.ids


async def test_check_health_accepts_a_queue_and_rejects_a_hanging_thread(
    make_replica, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    tokenize = CachingTokenizer.tokenize

    def tokenize_slowly(
        self: CachingTokenizer, calls: Sequence[Call]
    ) -> list[TokenizedTexts | ServeError]:
        assert held.wait(TIMEOUT_S)
        return tokenize(self, calls)

    monkeypatch.setattr(CachingTokenizer, "tokenize", tokenize_slowly)
    replica = make_replica(TokenizeLog())
    batches = [
        asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, call(LONG))))
        for _ in range(3)
    ]
    await wait_until(lambda: replica._health.running_s() > 0)
    await replica.check_health()
    monkeypatch.setattr(replica, "_hang_timeout_s", 0.0)
    with pytest.raises(EngineFailed, match="a call has run for"):
        await replica.check_health()
    held.set()
    await asyncio.gather(*batches)
    await replica.check_health()


async def test_expired_call_is_not_tokenized(make_replica, tiny_store: Path) -> None:
    log = TokenizeLog()
    late = call("night")._replace(deadline_s=time.monotonic() - 1)
    encoded = await make_replica(log).tokenize_batch(
        batch(tiny_store, call("good film"), late, call("the"))
    )
    first, expired, last = encoded.calls
    assert isinstance(expired, DeadlineExceeded)
    assert [outcome.lengths for outcome in (first, last)] == [(4,), (3,)]
    assert [len(item.ids) for item in encoded.items()] == [4, 3]
    assert [done.texts for done in log.records] == [2]


async def test_expired_calls_do_not_change_the_measured_speed(
    make_replica, tiny_store: Path
) -> None:
    replica = make_replica(TokenizeLog())
    live = call(LONG, truncate=True)
    late = live._replace(deadline_s=time.monotonic() - 1)
    await replica.tokenize_batch(batch(tiny_store, live))
    predicted_s = replica.measure_load(backlog=1_000).queued_s
    await replica.tokenize_batch(batch(tiny_store, late))
    assert replica.measure_load(backlog=1_000).queued_s == predicted_s > 0


async def test_tokenize_record_counts_cache_hits(make_replica, tiny_store: Path) -> None:
    log = TokenizeLog()
    replica = make_replica(log)
    replica.configure(TokenizerUserConfig(cache_bytes=10_000))
    replica._thread.submit(int).result()  # wait until the thread has applied the setting
    for _ in range(2):
        await replica.tokenize_batch(batch(tiny_store, call("good film", "night")))
    assert [(done.texts, done.cache_hits) for done in log.records] == [(2, 0), (2, 2)]


async def test_load_counts_time_spent_on_texts_and_the_queue_of_the_thread(
    make_replica, tiny_store: Path
) -> None:
    recorder = BlockingRecorder()
    recorder.release.set()
    replica = make_replica(recorder)
    assert replica.measure_load() == (0.0, 0.0)
    await replica.tokenize_batch(batch(tiny_store, call("night")))
    await replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    busy, queued_s = replica.measure_load()
    assert busy > 0
    assert queued_s == 0.0
    recorder.release.clear()
    recorder.recorded.clear()
    running = asyncio.ensure_future(
        replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    )
    await wait_until(lambda: bool(recorder.recorded))
    one = replica.measure_load().queued_s
    queued = asyncio.ensure_future(
        replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    )
    await asyncio.sleep(0)
    assert replica.measure_load() == (pytest.approx(1.0), pytest.approx(2 * one))
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    assert replica.measure_load().queued_s == pytest.approx(one)
    recorder.release.set()
    await running


async def test_long_text_does_not_hold_the_tokenizer(make_replica, tiny_store: Path) -> None:
    """A paragraph of another client waits for one slice of a body of 400 KB, not for all of it."""
    log = TokenizeLog()
    replica = make_replica(log)
    big = call(*(f"{n} {SLICE}" for n in range(20)), truncate=True)._replace(client="big")
    small = call("the night " * 500, truncate=True)._replace(client="small")
    slow = asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, big)))
    await wait_until(lambda: len(log.records) >= 1)
    encoded = await replica.tokenize_batch(batch(tiny_store, small, model=CLASSIFIER))
    assert encoded.calls[0].lengths == (MAX_TOKENS,)
    models = [record.model for record in log.records]
    assert models.index(CLASSIFIER) <= 5
    assert not slow.done()
    whole = await slow
    assert whole.calls[0].lengths == (MAX_TOKENS,) * 20
    assert whole.calls[0].truncated == 20
    assert [record.texts for record in log.records if record.model == EMBEDDER] == [1] * 20


async def test_call_beyond_a_limit_stops_its_slices(make_replica, tiny_store: Path) -> None:
    big = call(*[SLICE] * 20)
    answer = await make_replica(log := TokenizeLog()).tokenize_batch(batch(tiny_store, big))
    assert isinstance(answer.calls[0], InputTooLong)
    assert len(log.records) == 1


async def test_caller_that_leaves_a_long_text_stops_its_slices(
    make_replica, tiny_store: Path
) -> None:
    log = TokenizeLog()
    replica = make_replica(log)
    big = call(*(f"{n} {SLICE}" for n in range(20)), truncate=True)
    task = asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, big)))
    await wait_until(lambda: len(log.records) >= 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await replica.tokenize_batch(batch(tiny_store, call(LONG, truncate=True)))
    assert len(log.records) < 10
    assert replica.measure_load().queued_s == 0


async def test_long_call_that_cannot_be_tokenized_in_time_is_refused(
    make_replica, tiny_store: Path
) -> None:
    log = TokenizeLog()
    replica = make_replica(log)
    big = call(*(f"{n} {SLICE}" for n in range(20)), truncate=True)
    hasty = big._replace(deadline_s=deadline_after(1e-3))
    slow = asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, big)))
    await wait_until(lambda: len(log.records) >= 2)
    refused = await replica.tokenize_batch(batch(tiny_store, hasty))
    assert isinstance(refused.calls[0], Overloaded)
    assert refused.calls[0].needed_s > 1e-3
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    accepted = await replica.tokenize_batch(batch(tiny_store, hasty))
    assert isinstance(accepted.calls[0], DeadlineExceeded), "idle: it may try"


async def test_short_calls_are_not_refused_for_the_deadline_of_another(
    make_replica, tiny_store: Path
) -> None:
    log = TokenizeLog()
    replica = make_replica(log)
    big = call(*(f"{n} {SLICE}" for n in range(20)), truncate=True)
    slow = asyncio.ensure_future(replica.tokenize_batch(batch(tiny_store, big)))
    await wait_until(lambda: len(log.records) >= 2)
    short = call("good film " * 90, truncate=True)
    hasty = short._replace(deadline_s=deadline_after(1e-3))
    others = [short] * (SLICE_CHARACTERS // 900 + 1)
    done = await replica.tokenize_batch(batch(tiny_store, hasty, *others))
    assert isinstance(done.calls[0], DeadlineExceeded)
    assert all(each.lengths == (MAX_TOKENS,) for each in done.calls[1:])
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
