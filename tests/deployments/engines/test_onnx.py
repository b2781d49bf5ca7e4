from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from deployments.batching.collate import collate
from deployments.config import LaneSettings
from deployments.engines import EngineInfo, open_engine
from deployments.engines.onnx import OnnxEngine, check_providers, ort_errors
from deployments.errors import EngineFailed
from deployments.manifest import Device
from tests.fakes import item
from tests.sealed import WIDTH, seal_tiny, tiny_manifest, word_vectors, write_graph

INFO = EngineInfo(compute_type="cpu-fp32")
# fp32 sums of at most 16 values of size 1.
TOLERANCE = 1e-5
WORDS = 20


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    write_graph(tmp_path / "tiny.onnx", word_vectors(WORDS))
    return tmp_path / "tiny.onnx"


def test_a_row_is_the_mean_of_the_words_it_was_given(graph: Path) -> None:
    rows = OnnxEngine(graph, INFO).run(collate([np.array([3, 5], dtype=np.int32)])).rows
    expected = word_vectors(WORDS)[[3, 5]].mean(axis=0)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [expected], atol=TOLERANCE)


def test_company_does_not_change_an_answer(graph: Path) -> None:
    engine = OnnxEngine(graph, INFO)
    short, long = item(3, 2), np.arange(16, dtype=np.int32)
    alone = engine.run(collate([short])).rows[0]
    together = engine.run(collate([long, short])).rows[1]
    cosine = alone @ together / np.linalg.norm(alone) / np.linalg.norm(together)
    assert cosine >= 0.999999  # fp32
    np.testing.assert_allclose(together, alone, atol=TOLERANCE)


def test_a_graph_with_token_types_gets_zeros(tmp_path: Path) -> None:
    write_graph(tmp_path / "typed.onnx", word_vectors(WORDS), token_types=True)
    write_graph(tmp_path / "plain.onnx", word_vectors(WORDS))
    typed, plain = (
        OnnxEngine(tmp_path / f"{name}.onnx", INFO).run(collate([item(3, 4)])).rows
        for name in ("typed", "plain")
    )
    np.testing.assert_allclose(typed, plain, atol=TOLERANCE)


def test_a_pass_that_fails_is_an_engine_failure_and_the_next_one_works(graph: Path) -> None:
    engine = OnnxEngine(graph, INFO)
    with pytest.raises(EngineFailed, match="cpu-fp32") as failure:
        engine.run(collate([item(WORDS + 1)]))  # no such word
    assert failure.value.__cause__ is not None
    assert engine.run(collate([item(1)])).rows.shape == (1, WIDTH)


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_graph_that_cannot_be_read_is_an_engine_failure(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(content)
    with pytest.raises(EngineFailed, match=r"broken\.onnx"):
        OnnxEngine(tmp_path / "broken.onnx", INFO)


def test_a_provider_that_is_not_installed_is_named() -> None:
    check_providers(("CPUExecutionProvider",))
    with pytest.raises(EngineFailed, match="`AbacusExecutionProvider`"):
        check_providers(("CPUExecutionProvider", "AbacusExecutionProvider"))


def test_a_closed_engine_refuses_to_run(graph: Path) -> None:
    engine = OnnxEngine(graph, INFO)
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(collate([item(1)]))


def ort_exceptions() -> list[type[Exception]]:
    found = [getattr(ort_state, name) for name in dir(ort_state)]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", [*ort_exceptions(), RuntimeError, ValueError])
def test_whatever_onnxruntime_raises_gets_our_name_and_keeps_its_own(kind: type[Exception]) -> None:
    with pytest.raises(EngineFailed, match="graph: went wrong") as failure, ort_errors("graph"):
        raise kind("went wrong")
    assert isinstance(failure.value.__cause__, kind)


@pytest.mark.parametrize("device", list(Device))
def test_the_sealed_candidate_says_what_its_engine_is_called(
    device: Device, tmp_path: Path
) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    manifest = tiny_manifest("tiny/model")
    candidate = manifest.candidate_for(device)
    assert candidate is not None
    engine = open_engine(directory, candidate, LaneSettings())
    assert engine.info == EngineInfo(compute_type=f"{device}-fp32")
    assert engine.run(collate([item(1)])).rows.shape == (1, WIDTH)
