"""Models whose weights exceed one protobuf message. The limit is lowered to a few kilobytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from build_artifacts import graph_files
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families.base import BuildBudget
from build_artifacts.graph_files import list_files
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8, CPU_INT8_STATIC
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from build_artifacts.steps.export import export
from deployments.artifacts.manifest import ArtifactManifest
from tests.support.prepared_build import PreparedBuild
from tests.support.tiny_encoders import tiny_checkpoint

UNTUNED = BuildBudget(tune_seconds=0)


@pytest.fixture(scope="module", autouse=True)
def low_limit() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_files, "MAX_GRAPH_BYTES", 4_000)
        # Use the real `export`: the cached exports of other tests contain their weights.
        patch.setattr("build_artifacts.encoders.candidates.export", export)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("large") / "model", layers=1)


def test_graphs_are_sealed_with_their_weight_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow one of them is on this host, the search stops at neither graph.
    monkeypatch.setattr("build_artifacts.encoders.screening._MAX_SLOWDOWN", math.inf)
    request = BuildRequest(
        ref=str(source),
        store=tmp_path / "store",
        recipe=BuildRecipe(candidates=(CPU_INT8, CPU_FP32), keep=2),
        budget=UNTUNED,
    )
    result = build(request, BuildProgress(io.StringIO()))
    manifest = ArtifactManifest.read(result.directory)
    graphs = {candidate.precision: candidate.graph for candidate in manifest.candidates}
    assert graphs == {
        "int8": "graphs/cpu-int8/graph.onnx",
        "fp32": "graphs/cpu-fp32/graph.onnx",
    }
    sizes = {name: sealed.size for name, sealed in manifest.files.items()}
    for candidate in manifest.candidates:
        both = sizes[candidate.graph] + sizes[f"{candidate.graph}.data"]
        assert manifest.count_bytes(candidate) == both


def test_other_steps_read_weight_files_or_refuse_them(source: Path, tmp_path: Path) -> None:
    shop = PreparedBuild.of(source, tmp_path / "work")
    assert len(list_files(shop.graphs.float_graph(CPU_FP32))) == 2
    ranked = shop.graphs.sensitive_nodes(CPU_FP32)
    assert len(set(ranked)) == 6, "query, key, value, output and two of the feed-forward layer"
    # Static int8 needs a quantizer that serializes the whole model in one message.
    static = replace(CPU_FP32, precision="int8", quantization=CPU_INT8_STATIC.quantization)
    with pytest.raises(UnsupportedModel, match=r"the float graph exceeds the .* GiB of this quan"):
        shop.graphs.graph(static)
