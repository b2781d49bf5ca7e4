"""CPU memory of ONNX Runtime, with a graph that needs 80 kB per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec
from deployments.engines.onnx.encoder import OnnxEngine
from deployments.engines.onnx.memory import MAX_RETAINED_TOKENS, SMALL_PASSES, ArenaTrimmer
from deployments.messages import TokenizedItem
from tests.support.engine_programs import write_model

WIDE = 20_000  # numbers per token
PASS_BYTES = MAX_RETAINED_TOKENS * WIDE * 4


def write_wide(path: Path) -> GraphSpec:
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=1),
        helper.make_node("Unsqueeze", ["ids", "last"], ["column"]),
        helper.make_node("MatMul", ["column", "row"], ["wide"]),
        helper.make_node("ReduceMean", ["wide", "middle"], ["output"], keepdims=0),
    ]
    constants = {
        "last": np.array([2]),
        "middle": np.array([1]),
        "row": np.ones((1, WIDE), np.float32),
    }
    write_model(path, nodes, constants, ("input_ids",))
    return GraphSpec(
        path=path,
        device=Device.CPU,
        precision="fp32",
        engine="onnxruntime",
        options=EngineOptions(),
        head=ModelHead.VECTOR,
    )


@pytest.fixture
def engines(tmp_path: Path) -> list[OnnxEngine]:
    spec = write_wide(tmp_path / "wide.onnx")
    return [OnnxEngine(spec, EncoderSettings()) for _ in range(3)]


def run(engine: OnnxEngine, tokens: int, items: int = 1) -> None:
    ids = np.ones(tokens, np.int32)
    engine.run(collate([TokenizedItem(ids, tokens) for _ in range(items)]))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.usefixtures("no_collection")
def test_sessions_share_memory_and_return_it_when_passes_get_small(
    engines: list[OnnxEngine],
) -> None:
    run(engines[0], 8)
    before = resident_bytes()
    for engine in engines:
        run(engine, MAX_RETAINED_TOKENS)
    assert 0.8 * PASS_BYTES < resident_bytes() - before < 1.5 * PASS_BYTES
    for number in range(SMALL_PASSES):
        run(engines[number % 2], 8)
    assert resident_bytes() - before < 0.3 * PASS_BYTES


@pytest.mark.usefixtures("no_collection")
def test_large_pass_returns_its_memory(engines: list[OnnxEngine]) -> None:
    run(engines[0], 8)
    before = resident_bytes()
    run(engines[0], MAX_RETAINED_TOKENS, items=2)
    assert resident_bytes() - before < 0.3 * PASS_BYTES


def test_memory_is_kept_while_large_passes_return() -> None:
    trimmer = ArenaTrimmer()
    tokens = [1_000, *[100] * (SMALL_PASSES - 1), 1_000, *[300] * SMALL_PASSES * 2]
    assert {trimmer.options(one) for one in tokens} == {None}
    returned = [trimmer.options(100) is not None for _ in range(SMALL_PASSES * 2)]
    assert returned.index(True) == SMALL_PASSES - 1
    assert returned.count(True) == 1, "100 tokens are the largest pass now"


def test_small_passes_return_what_a_large_pass_left_to_others() -> None:
    trimmer = ArenaTrimmer()
    assert trimmer.options(MAX_RETAINED_TOKENS + 1) is not None
    returned = [trimmer.options(100) is not None for _ in range(SMALL_PASSES * 2)]
    assert returned.index(True) == SMALL_PASSES - 1
    assert returned.count(True) == 1


def test_large_passes_on_a_gpu_keep_their_memory() -> None:
    """A GPU stalls while memory is returned and allocated again."""
    trimmer = ArenaTrimmer(is_gpu=True)
    tokens = [16_000, 16_000, *[100] * (SMALL_PASSES - 1)]
    assert {trimmer.options(one) for one in tokens} == {None}
    options = trimmer.options(100)
    assert options is not None
    arenas = options.get_run_config_entry("memory.enable_memory_arena_shrinkage")
    assert arenas == "cpu:0;gpu:0"
