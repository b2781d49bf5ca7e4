"""ONNX Runtime with IO binding and one set of preallocated buffers per bucket of shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import open_engine
from deployments.engines.onnx.io_binding import IoBindingEngine
from deployments.errors import EngineFailed
from tests.integration.engines.conftest import BUCKETS, KINDS, SETTINGS, Written, spec_of
from tests.support.engine_programs import WORDS
from tests.support.fakes import build_item, item
from tests.support.tiny_encoders import ENCODER_HEADS

UNBOUND, BOUND = KINDS["onnxruntime"], KINDS["onnxruntime-in-buckets"]


@pytest.mark.parametrize("head", ENCODER_HEADS)
def test_full_bucket_matches_unbound_pass(head: ModelHead, written: Written) -> None:
    path = written(BOUND, head)
    with (
        closing(open_engine(spec_of(UNBOUND, path, head), SETTINGS)) as unbound,
        closing(open_engine(spec_of(BOUND, path, head), SETTINGS)) as bound,
    ):
        assert isinstance(bound, IoBindingEngine)
        assert not isinstance(unbound, IoBindingEngine)
        for items, tokens in BUCKETS:
            batch = collate([build_item(np.arange(tokens) % 8 + i) for i in range(items)])
            for ours, theirs in zip(bound.run(batch).items, unbound.run(batch).items, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_threads_wait_for_buffers(written: Written) -> None:
    spec = spec_of(BOUND, written(BOUND, ModelHead.VECTOR))
    with (
        closing(open_engine(spec, EncoderSettings(concurrent_passes=1))) as engine,
        ThreadPoolExecutor(4) as pool,
    ):
        words = [word for _ in range(50) for word in (1, 2, 3, 5)]
        answers = pool.map(lambda word: engine.run(collate([item(word)])).items[0], words)
        singles = {word: engine.run(collate([item(word)])).items[0] for word in (1, 2, 3, 5)}
        for word, answer in zip(words, answers, strict=True):
            np.testing.assert_array_equal(answer, singles[word])


def test_failed_pass_returns_its_buffers(written: Written) -> None:
    spec = spec_of(BOUND, written(BOUND, ModelHead.VECTOR))
    with closing(open_engine(spec, EncoderSettings(concurrent_passes=1))) as engine:
        for _ in range(3):
            with pytest.raises(EngineFailed):
                engine.run(collate([item(WORDS + 1)]))
        assert len(engine.run(collate([item(1)])).items) == 1


def test_impossible_bucket_fails_at_open(written: Written) -> None:
    spec = spec_of(BOUND, written(BOUND, ModelHead.VECTOR))
    hopeless = replace(spec, options=EngineOptions(buckets=((1, 4), (1, -3))))
    with pytest.raises(EngineFailed, match=spec.path.name):
        open_engine(hopeless, SETTINGS)
