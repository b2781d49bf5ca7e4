"""An encoder replica decodes the outputs of a task, and limits their size."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import TaskName
from deployments.errors import EngineFailed, InputTooLong, InvalidField, Overloaded, WrongTask
from deployments.messages import CallResult, TokenizedBatch, TokenOffsets
from deployments.tasks import DecodeContext
from deployments.tasks.embedding import FeatureExtraction
from tests.support.artifacts import EMBEDDER, WIDTH, seal, seal_tiny, seal_without_token_vectors
from tests.support.encoder_harness import TOLERANCE, EncoderHarness, call, replace_task
from tests.support.fakes import PanicException


class RejectingTask(FeatureExtraction):
    """A task that rejects calls with an item of one token."""

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        if any(len(item.ids) == 1 for item in computed.items):
            raise InvalidField("an item has one token", field="inputs")
        return super().decode(computed, options)


class BuggyTask(FeatureExtraction):
    """A task with a bug in `decode`."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        raise self.error("no such thing")


class TokenTask(FeatureExtraction):
    """A task that returns the tokens and the offsets of its items."""

    needs_vocabulary: ClassVar = True

    def decode(self, computed: DecodeContext, options: Any) -> Any:
        assert computed.vocabulary is not None
        tokens = [[computed.vocabulary.token(i) for i in item.ids] for item in computed.items]
        return tokens, computed.token_offsets, computed.manifest.id


async def test_task_error_fails_only_its_own_call(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_task(monkeypatch, RejectingTask())
    rejected, answered = await encoder.replica.infer(encoder.batch(call(1), call(2)))
    assert isinstance(rejected, InvalidField)
    assert rejected.field == "inputs"
    assert isinstance(answered, CallResult)


@pytest.mark.parametrize("error", [KeyError, PanicException])
async def test_task_bug_fails_its_call_but_not_the_encoder(
    error: type[BaseException], encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        replace_task(patch, BuggyTask(error))
        (failed,) = await encoder.replica.infer(encoder.batch(call(2)))
    (answered,) = await encoder.replica.infer(encoder.batch(call(2)))
    assert isinstance(failed, EngineFailed)
    assert "no such thing" not in failed.message, "it is in the log"
    assert isinstance(answered, CallResult)


async def test_decode_receives_vocabulary_items_and_offsets_of_its_call(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_task(monkeypatch, TokenTask())
    encoder = EncoderHarness(tiny_store)
    offsets = TokenOffsets(
        0, np.zeros((2, 2), np.int32), np.zeros(2, np.int8), np.zeros(2, np.int32)
    )
    calls = (call(1, 3), call(2)._replace(token_offsets=(offsets,)))
    first, second = await encoder.replica.infer(encoder.batch(*calls))
    await encoder.replica.close()
    assert isinstance(first, CallResult)
    assert isinstance(second, CallResult)
    assert first.value == ([["the"], ["the"] * 3], (), EMBEDDER)
    assert second.value == ([["the"] * 2], (offsets,), EMBEDDER)


def unpooled(batch: TokenizedBatch) -> TokenizedBatch:
    """Return the batch with the task token-embeddings."""
    return batch._replace(key=batch.key._replace(task=TaskName.TOKEN_EMBEDDINGS))


async def test_token_embeddings_return_one_vector_per_token(encoder: EncoderHarness) -> None:
    plain = encoder.batch(call(3, 1), call(2))
    vectors, tokens = await asyncio.gather(
        encoder.replica.infer(plain), encoder.replica.infer(unpooled(plain))
    )
    assert [np.shape(outcome.value) for outcome in vectors] == [(2, WIDTH), (1, WIDTH)]
    assert [[row.shape for row in outcome.value] for outcome in tokens] == [
        [(3, WIDTH), (1, WIDTH)],
        [(2, WIDTH)],
    ]
    # All tokens of a text are equal, so their mean equals the vector of each token.
    np.testing.assert_allclose(tokens[0].value[0], vectors[0].value[[0] * 3], atol=TOLERANCE)


async def test_token_embeddings_beyond_the_limit_are_rejected(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.large_outputs.MAX_TOKEN_VALUES", 8 * WIDTH)
    batch = encoder.batch(call(4, 5), call(4, 4))
    rejected, answered = await encoder.replica.infer(unpooled(batch))
    assert isinstance(rejected, InputTooLong)
    assert "9 tokens; the maximum for token vectors is 8" in rejected.message
    assert isinstance(answered, CallResult)
    assert all(isinstance(outcome, CallResult) for outcome in await encoder.replica.infer(batch))


async def test_large_outputs_of_all_calls_share_a_budget(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.MAX_OUTPUT_VALUES", 8 * WIDTH)
    calls = unpooled(encoder.batch(call(5), call(5)))
    accepted, refused = await encoder.replica.infer(calls)
    assert isinstance(accepted, CallResult)
    assert isinstance(refused, Overloaded)
    assert "large outputs" in refused.message
    (again,) = await encoder.replica.infer(unpooled(encoder.batch(call(5))))
    assert isinstance(again, CallResult)
    assert encoder.replica._output_values.used == 0


async def test_one_client_leaves_half_of_the_budget_to_others(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.encoder.MAX_OUTPUT_VALUES", 8 * WIDTH)
    calls = [call(3)._replace(client=client) for client in ("loud", "loud", "quiet")]
    first, second, other = await encoder.replica.infer(unpooled(encoder.batch(*calls)))
    assert isinstance(first, CallResult)
    assert isinstance(second, Overloaded)
    assert "of this client" in second.message
    assert isinstance(other, CallResult)
    assert encoder.replica._output_values.used == 0
    assert not encoder.replica._output_values._used_by


async def test_calls_leave_the_queue_if_a_later_one_cannot_be_queued(
    encoder: EncoderHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[asyncio.Future[Any]] = []
    submit = encoder.replica._scheduler.submit

    def fail_on_the_third(*args: Any, **options: Any) -> asyncio.Future[Any]:
        if len(submitted) == 2:
            raise ZeroDivisionError
        submitted.append(submit(*args, **options))
        return submitted[-1]

    monkeypatch.setattr(encoder.replica._scheduler, "submit", fail_on_the_third)
    with pytest.raises(ZeroDivisionError):
        await encoder.replica.infer(unpooled(encoder.batch(call(2), call(2), call(2))))
    assert all(each.cancelled() for each in submitted)
    assert encoder.replica._output_values.used == 0


async def test_fill_mask_beyond_the_mask_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.large_outputs.MAX_VOCABULARY_VALUES", 8 * WIDTH)
    # Skip the probe: the graph of the tiny embedder has no outputs per mask.
    monkeypatch.setattr("deployments.replicas.encoder.probe_engine", lambda _engine, _model: None)
    directory = seal_tiny(tmp_path, EMBEDDER, tasks=(TaskName.FILL_MASK,))
    manifest = ArtifactManifest.read(directory)
    seal(directory, manifest.model_copy(update={"mask_token": 5}))
    encoder = EncoderHarness(tmp_path)
    encoder.key = encoder.key._replace(task=TaskName.FILL_MASK)
    rejected, accepted = await encoder.replica.infer(encoder.batch(call(4, 5), call(4, 4)))
    await encoder.replica.close()
    assert isinstance(rejected, InputTooLong)
    assert "9 mask tokens; the maximum is 8" in rejected.message
    assert not isinstance(accepted, InputTooLong)


async def test_sparse_embeddings_count_towards_the_budget_of_large_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.large_outputs.MAX_VOCABULARY_VALUES", 2 * WIDTH)
    monkeypatch.setattr("deployments.replicas.encoder.MAX_OUTPUT_VALUES", 3 * WIDTH)
    seal_tiny(tmp_path, EMBEDDER, tasks=(TaskName.SPARSE_EMBEDDINGS,))
    encoder = EncoderHarness(tmp_path)
    encoder.key = encoder.key._replace(task=TaskName.SPARSE_EMBEDDINGS)
    calls = encoder.batch(call(1, 1, 1), call(2, 2), call(3, 3))
    rejected, answered, refused = await encoder.replica.infer(calls)
    assert encoder.replica._output_values.used == 0
    await encoder.replica.close()
    assert isinstance(rejected, InputTooLong)
    assert "3 texts; the maximum is 2" in rejected.message
    assert isinstance(answered, CallResult)
    assert isinstance(refused, Overloaded)


async def test_model_without_token_output_asks_for_a_new_build(tmp_path: Path) -> None:
    seal_without_token_vectors(tmp_path, EMBEDDER)
    encoder = EncoderHarness(tmp_path)
    (rejected,) = await encoder.replica.infer(unpooled(encoder.batch(call(2))))
    (answered,) = await encoder.replica.infer(encoder.batch(call(2)))
    await encoder.replica.close()
    assert isinstance(rejected, WrongTask)
    assert "Build the model again" in rejected.message
    assert isinstance(answered, CallResult)
