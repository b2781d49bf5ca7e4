from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.errors import ArtifactError, EngineFailed
from deployments.tuning.costs import Placement, read_costs
from deployments.tuning.tuner import is_tuning, tune_exclusively
from tests.support.cost_tables import shape
from tests.support.tuning_artifacts import keep_table, seal_tunable

SECONDS = 0.05
STALE = {"engines": {"onnxruntime": "onnxruntime 1.2.3"}}


@pytest.fixture
def placement(tmp_path: Path) -> Placement:
    return seal_tunable(tmp_path)


@contextmanager
def somebody_tunes(placement: Placement) -> Iterator[None]:
    lock = placement.costs_path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_what_is_measured_is_kept(placement: Placement) -> None:
    table = tune_exclusively(placement, SECONDS)
    assert table is not None
    assert table == read_costs(placement)
    assert not is_tuning(placement)
    assert list(placement.costs_path.parent.iterdir()) == [placement.costs_path]


def test_the_model_is_measured_at_the_usual_shapes_it_reads_or_at_those_asked_for(
    placement: Placement,
) -> None:
    usual = tune_exclusively(placement, 2.0)
    asked = tune_exclusively(placement, SECONDS, force=True, shapes=[shape("2x3")])
    assert usual is not None
    assert asked is not None
    assert {str(where) for where, _ in usual.winners} == {"1x16", "4x16", "8x16", "32x16"}
    assert [str(where) for where, _ in asked.winners] == ["2x3"]


def test_a_valid_table_is_not_measured_again_unless_that_is_asked_for(
    placement: Placement,
) -> None:
    path = keep_table(placement, {"1x16": "twin"})
    before = path.read_bytes()
    assert tune_exclusively(placement, SECONDS) == read_costs(placement)
    assert path.read_bytes() == before
    tune_exclusively(placement, SECONDS, force=True)
    assert path.read_bytes() != before


def test_a_stale_table_is_replaced(placement: Placement) -> None:
    keep_table(placement, {"1x16": "twin"}, **STALE)
    assert read_costs(placement) is None
    assert tune_exclusively(placement, SECONDS) == read_costs(placement) is not None


def test_while_somebody_else_tunes_nobody_waits_unless_told_to(placement: Placement) -> None:
    assert not is_tuning(placement)
    with somebody_tunes(placement):
        assert is_tuning(placement)
        assert tune_exclusively(placement, SECONDS) is None
        assert tune_exclusively(placement, SECONDS, force=True) is None
    assert not is_tuning(placement)


def test_who_waits_takes_what_the_other_has_measured(placement: Placement) -> None:
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(tune_exclusively(placement, SECONDS, wait=True)), daemon=True
    )
    with somebody_tunes(placement):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        before = keep_table(placement, {"1x16": "twin"}).read_bytes()
    waiting.join(10)
    assert not waiting.is_alive()
    assert found == [read_costs(placement)]
    assert placement.costs_path.read_bytes() == before


def test_a_store_that_cannot_be_written_is_an_error_of_the_system(placement: Placement) -> None:
    (placement.artifact / "hosts").write_text("in the way")
    with pytest.raises(OSError, match="hosts"):
        tune_exclusively(placement, SECONDS)
    assert not is_tuning(placement)


def test_a_model_without_its_reference_cannot_be_tuned(placement: Placement) -> None:
    (placement.artifact / REFERENCE_NAME).write_bytes(b"nothing to hold it against")
    with pytest.raises(ArtifactError, match="not a reference"):
        tune_exclusively(placement, SECONDS)
    assert read_costs(placement) is None


def test_when_nothing_is_right_here_no_table_is_kept(tmp_path: Path) -> None:
    placement = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    corrupted = placement.manifest.model_copy(update={"candidates": placement.candidates[1:]})
    wrong = Placement(placement.artifact, corrupted, placement.device, placement.settings)
    with pytest.raises(EngineFailed, match="no graph is right on this host"):
        tune_exclusively(wrong, SECONDS)
    assert not placement.costs_path.exists()
    assert not is_tuning(placement)
