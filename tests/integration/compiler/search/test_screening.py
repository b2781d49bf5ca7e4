"""Who is tried first after a short contest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pydantic import ValidationError

from build_artifacts.recipes import CPU_FP32
from build_artifacts.search.graphs import build_graph_spec
from build_artifacts.search.screening import SpeedScreening, screen_speed
from deployments.artifacts.manifest import EngineOptions
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec
from deployments.errors import EngineFailed
from tests.support.prepared_build import PreparedBuild, unreadable


def test_a_factor_counts_the_same_at_every_length() -> None:
    trial = SpeedScreening(times_ms={"even": (2.0, 50.0), "uneven": (1.0, 100.0)})
    assert trial.mean_ms("even") == pytest.approx(10)
    assert trial.mean_ms("uneven") == pytest.approx(10)


def test_who_is_fastest_somewhere_comes_before_who_is_fast_everywhere() -> None:
    trial = SpeedScreening(
        times_ms={
            "second everywhere": (1.1, 1.1, 1.1),
            "short texts": (1.0, 3.0, 3.0),
            "long texts": (9.0, 1.0, 1.0),
            "last": (10.0, 10.0, 10.0),
        }
    )
    assert trial.fastest() == {"short texts", "long texts"}
    assert trial.ranked_names() == ["short texts", "long texts", "second everywhere", "last"]
    assert trial.describe().startswith("short texts 2.08 ms, long texts 2.08 ms, second")


def test_of_equally_fast_ones_the_first_is_the_fastest() -> None:
    assert SpeedScreening(times_ms={"first": (1.0,), "second": (1.0,)}).fastest() == {"first"}


def test_a_trial_that_nobody_finished_has_no_order() -> None:
    assert SpeedScreening(times_ms={}).ranked_names() == []


def test_a_trial_is_kept_as_it_was() -> None:
    trial = SpeedScreening(times_ms={"one": (1.5, 2.5)})
    assert SpeedScreening.model_validate_json(trial.model_dump_json()) == trial
    with pytest.raises(ValidationError):
        SpeedScreening.model_validate_json('{"times_ms": {"one": ["fast"]}}')


def specs_of(workshop: PreparedBuild, *names: str) -> dict[str, GraphSpec]:
    """One graph under many names."""
    graph = workshop.graphs.graph(CPU_FP32)
    return {name: build_graph_spec(CPU_FP32, graph, workshop.prepared) for name in names}


def held_on(workshop: PreparedBuild, specs: Mapping[str, GraphSpec]) -> SpeedScreening:
    items, metadata = workshop.prepared.reference.items, workshop.prepared.metadata
    return screen_speed(specs, EncoderSettings(), items, metadata.max_tokens)


def leave_free(monkeypatch: pytest.MonkeyPatch, available_bytes: int) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=available_bytes)
    )


def test_graphs_are_named_like_their_recipes_whatever_options_they_have(
    workshop: PreparedBuild,
) -> None:
    specs = specs_of(workshop, "plain", "spinning")
    options = EngineOptions(spinning=True, arena=True)
    specs["spinning"] = replace(specs["spinning"], options=options)
    trial = held_on(workshop, specs)
    assert list(trial.times_ms) == ["plain", "spinning"]
    # Of four shapes, three once they are cut to the 64 tokens that the model reads.
    assert {len(times) for times in trial.times_ms.values()} == {3}


def test_what_does_not_run_takes_no_room_from_what_does(
    workshop: PreparedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = specs_of(workshop, "first", "second", "third")
    broken = replace(fine["first"], path=unreadable(tmp_path / "graph.onnx"))
    size = fine["first"].path.stat().st_size
    (tmp_path / "graph.onnx.data").write_bytes(bytes(size))
    leave_free(monkeypatch, 13 * size)  # enough for two
    trial = held_on(workshop, {"broken": broken, **fine})
    assert list(trial.times_ms) == ["first", "second"]


def test_without_memory_for_one_graph_nothing_is_compared(
    workshop: PreparedBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = specs_of(workshop, "first", "second")
    leave_free(monkeypatch, 100)
    with pytest.raises(EngineFailed, match="not enough memory to measure the first graph"):
        held_on(workshop, specs)
