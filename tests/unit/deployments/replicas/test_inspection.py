"""Tests of the calls of the tokenizer replica behind `/tokenize` and `/decode`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.config import AppArgs, ModelSettings
from deployments.errors import ArtifactMissing, UnknownToken
from deployments.messages import DecodeRequest, ModelRef, TextTokens, TokenizeRequest
from deployments.registry import ModelRegistry
from deployments.replicas.tokenizer import TokenizerReplica
from deployments.tokenization.slices import SLICE_CHARACTERS
from deployments.tokenization.vocabulary import TokenInspector
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.fakes import TIMEOUT_S, TokenizeLog, wait_until


@pytest.fixture
def args(tiny_store: Path) -> AppArgs:
    return AppArgs(store=tiny_store, models=(ModelSettings(id=EMBEDDER),), encoders={})


@pytest.fixture
async def replica(args: AppArgs) -> AsyncIterator[TokenizerReplica]:
    made = TokenizerReplica(args, TokenizeLog())
    yield made
    await made.close()


@pytest.fixture
def embedder(args: AppArgs) -> ModelRef:
    return ModelRegistry.of(args).find(EMBEDDER).ref


async def test_tokenize_and_decode_are_inverse(
    replica: TokenizerReplica, embedder: ModelRef
) -> None:
    tokenized = await replica.tokenize(TokenizeRequest(embedder, ("good film",), special=False))
    assert [len(tokens.ids) for tokens in tokenized] == [2]
    ids = tuple(tokenized[0].ids.tolist())
    assert await replica.decode(DecodeRequest(embedder, (ids,), skip_special=True)) == (
        "good film",
    )


async def test_tokenize_and_decode_return_errors(
    replica: TokenizerReplica, embedder: ModelRef
) -> None:
    absent = ModelRef("no/such", "0123456789ab")
    missing = await replica.tokenize(TokenizeRequest(absent, ("a",), special=True))
    unknown = await replica.decode(DecodeRequest(embedder, ((10**6,),), skip_special=True))
    assert isinstance(missing, ArtifactMissing)
    assert isinstance(unknown, UnknownToken)


async def test_inspections_take_fair_turns(
    replica: TokenizerReplica, embedder: ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()
    turns: list[int] = []
    inspect = TokenInspector.tokens

    def tokens(
        inspector: TokenInspector, texts: Sequence[str], *, special: bool
    ) -> tuple[TextTokens, ...]:
        assert may_start.wait(TIMEOUT_S)
        turns.append(len(texts))
        return inspect(inspector, texts, special=special)

    monkeypatch.setattr(TokenInspector, "tokens", tokens)
    text = "good film " * (SLICE_CHARACTERS // 20)
    big = TokenizeRequest(embedder, (text,) * 6, special=False, client="big")
    small = TokenizeRequest(embedder, ("the",), special=False, client="small")
    last = small._replace(texts=("the " * 1_500,) * 3, priority=1)
    # With three big calls, one of them always has a slice in the queue, also while another has not
    # yet queued the slice that follows its finished one.
    calls = [asyncio.ensure_future(replica.tokenize(one)) for one in (big, big, big, last, small)]
    await wait_until(lambda: len(replica._thread._queue) == 4)
    may_start.set()
    *big_results, _, _ = await asyncio.gather(*calls)
    assert turns == [2, 1, *[2] * 8, 3]
    assert [len(result) for result in big_results] == [6, 6, 6]


async def test_inspection_opens_no_second_tokenizer(tmp_path: Path) -> None:
    """A second one would double the memory, which the pool does not count."""
    directory = seal_tiny(tmp_path, EMBEDDER)
    args = AppArgs(store=tmp_path, models=(ModelSettings(id=EMBEDDER),), encoders={})
    replica = TokenizerReplica(args, TokenizeLog())
    (directory / TOKENIZER_NAME).unlink()
    ref = ModelRef(EMBEDDER, directory.name)
    (tokens,) = await replica.tokenize(TokenizeRequest(ref, ("good film",), special=False))
    assert len(tokens.ids) == 2
    await replica.close()
