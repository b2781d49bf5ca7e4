"""Speed screening of candidates: ranking and memory limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from build_artifacts.encoders.candidates import build_graph_spec
from build_artifacts.encoders.screening import SpeedScreening, screen_speed
from build_artifacts.recipes import CPU_FP32
from deployments.artifacts.manifest import EngineOptions
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec
from deployments.errors import EngineFailed
from tests.support.prepared_build import PreparedBuild, set_available_memory, unreadable


def test_screening_mean_is_geometric() -> None:
    screening = SpeedScreening(times_ms={"even": (2.0, 50.0), "uneven": (1.0, 100.0)})
    assert screening.mean_ms("even") == pytest.approx(10)
    assert screening.mean_ms("uneven") == pytest.approx(10)


def test_fastest_of_any_shape_ranks_first() -> None:
    screening = SpeedScreening(
        times_ms={
            "second everywhere": (1.1, 1.1, 1.1),
            "short texts": (1.0, 3.0, 3.0),
            "long texts": (9.0, 1.0, 1.0),
            "last": (10.0, 10.0, 10.0),
        }
    )
    assert screening.fastest() == {"short texts", "long texts"}
    assert screening.ranked_names() == ["short texts", "long texts", "second everywhere", "last"]
    assert screening.describe().startswith("short texts 2.08 ms, long texts 2.08 ms, second")


def test_equal_times_select_first_graph() -> None:
    assert SpeedScreening(times_ms={"first": (1.0,), "second": (1.0,)}).fastest() == {"first"}


def test_empty_screening_has_no_ranking() -> None:
    assert SpeedScreening(times_ms={}).ranked_names() == []


def test_screening_round_trips_json() -> None:
    screening = SpeedScreening(times_ms={"one": (1.5, 2.5)})
    assert SpeedScreening.model_validate_json(screening.model_dump_json()) == screening
    with pytest.raises(ValidationError):
        SpeedScreening.model_validate_json('{"times_ms": {"one": ["fast"]}}')


def named_specs(prepared_build: PreparedBuild, *names: str) -> dict[str, GraphSpec]:
    """Return specs of these names, all of the same graph."""
    graph = prepared_build.graphs.graph(CPU_FP32)
    return {name: build_graph_spec(CPU_FP32, graph, prepared_build.prepared) for name in names}


def screen(prepared_build: PreparedBuild, specs: Mapping[str, GraphSpec]) -> SpeedScreening:
    items, metadata = prepared_build.prepared.reference.items, prepared_build.prepared.metadata
    return screen_speed(specs, EncoderSettings(), items, metadata.max_tokens)


def test_screening_keys_are_graph_names(
    prepared_build: PreparedBuild,
) -> None:
    specs = named_specs(prepared_build, "plain", "spinning")
    options = EngineOptions(spinning=True)
    specs["spinning"] = replace(specs["spinning"], options=options)
    screening = screen(prepared_build, specs)
    assert list(screening.times_ms) == ["plain", "spinning"]
    # Four shapes are timed, but two of them are equal after truncation to 64 tokens.
    assert {len(times) for times in screening.times_ms.values()} == {3}


def test_broken_graph_does_not_reduce_memory_for_others(
    prepared_build: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = named_specs(prepared_build, "first", "second", "third")
    broken = replace(working["first"], path=unreadable(tmp_path / "graph.onnx"))
    size = working["first"].path.stat().st_size
    (tmp_path / "graph.onnx.data").write_bytes(bytes(size))
    set_available_memory(monkeypatch, 13 * size)  # enough for two graphs
    screening = screen(prepared_build, {"broken": broken, **working})
    assert list(screening.times_ms) == ["first", "second"]
    assert list(screening.unmeasured) == ["broken", "third"]
    assert "Telepathy" in screening.unmeasured["broken"]
    assert screening.unmeasured["third"] == "it could not be measured together with the others"


def test_screening_without_memory_raises_engine_failed(
    prepared_build: PreparedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = named_specs(prepared_build, "first", "second")
    set_available_memory(monkeypatch, 100)
    with pytest.raises(EngineFailed, match="not enough memory to measure the first graph"):
        screen(prepared_build, specs)


def test_screening_whose_graphs_all_fail_in_measurement_raises_engine_failed(
    prepared_build: PreparedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.tuning.tuner.measure", lambda *_arguments: {})
    with pytest.raises(EngineFailed, match="every graph failed while it was measured"):
        screen(prepared_build, named_specs(prepared_build, "first", "second"))
