"""The same promises on a real GPU: bound buckets as CUDA graphs, TensorRT, torch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.config import LaneSettings
from deployments.engines import lacking, open_engine
from deployments.manifest import EngineOptions, Head
from tests.deployments.engines.conftest import BUCKETS, KINDS, Kind, Written, spec_of
from tests.deployments.engines.test_contract import ITEMS, check

pytestmark = pytest.mark.gpu

CUDA = ("CUDAExecutionProvider", "CPUExecutionProvider")
ONNX, TORCH = KINDS["onnxruntime"], KINDS["torch"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ONNX, EngineOptions()),
        (ONNX, EngineOptions(buckets=BUCKETS)),
        (ONNX, EngineOptions(buckets=BUCKETS, providers=("TensorrtExecutionProvider", *CUDA))),
        (TORCH, EngineOptions()),
        (TORCH, EngineOptions(buckets=BUCKETS)),
        (TORCH, EngineOptions(buckets=BUCKETS, compile=True)),
    ],
    ids=["cuda", "cuda-graphs", "tensorrt", "torch", "torch-in-buckets", "torch-compiled"],
)
@pytest.mark.parametrize("head", [Head.VECTOR, Head.TOKENS, Head.MASKS])
def test_the_gpu_answers_as_by_hand(
    kind: Kind, options: EngineOptions, head: Head, written: Written
) -> None:
    lane = LaneSettings(providers=CUDA, runs=2)
    spec = replace(spec_of(kind, Path("not yet written"), head), options=options)
    if reason := lacking(spec, lane):
        pytest.skip(reason)
    spec = replace(spec, path=written(kind, head))
    with closing(open_engine(spec, lane)) as engine:
        for items in (ITEMS[:1], ITEMS[:3], ITEMS, ITEMS[:1]):
            check(engine, head, items)
