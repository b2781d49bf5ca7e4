from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.errors import ArtifactError, EngineFailed
from deployments.tuning.costs import TuningTarget, read_costs
from deployments.tuning.tuner import is_tuning, tune_exclusively
from tests.support.cost_tables import shape
from tests.support.tuning_artifacts import seal_tunable, write_table

SECONDS = 0.05
STALE = {"engines": {"onnxruntime": "onnxruntime 1.2.3"}}


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


@contextmanager
def somebody_tunes(target: TuningTarget) -> Iterator[None]:
    lock = target.costs_path.with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_what_is_measured_is_kept(target: TuningTarget) -> None:
    table = tune_exclusively(target, SECONDS)
    assert table is not None
    assert table == read_costs(target)
    assert not is_tuning(target)
    assert list(target.costs_path.parent.iterdir()) == [target.costs_path]


def test_the_model_is_measured_at_the_usual_shapes_it_reads_or_at_those_asked_for(
    target: TuningTarget,
) -> None:
    usual = tune_exclusively(target, 2.0)
    asked = tune_exclusively(target, SECONDS, force=True, shapes=[shape("2x3")])
    assert usual is not None
    assert asked is not None
    assert {str(where) for where, _ in usual.selection} == {"1x16", "4x16", "8x16", "32x16"}
    assert [str(where) for where, _ in asked.selection] == ["2x3"]


def test_a_valid_table_is_not_measured_again_unless_that_is_asked_for(
    target: TuningTarget,
) -> None:
    path = write_table(target, {"1x16": "twin"})
    before = path.read_bytes()
    assert tune_exclusively(target, SECONDS) == read_costs(target)
    assert path.read_bytes() == before
    tune_exclusively(target, SECONDS, force=True)
    assert path.read_bytes() != before


def test_a_stale_table_is_replaced(target: TuningTarget) -> None:
    write_table(target, {"1x16": "twin"}, **STALE)
    assert read_costs(target) is None
    assert tune_exclusively(target, SECONDS) == read_costs(target) is not None


def test_while_somebody_else_tunes_nobody_waits_unless_told_to(target: TuningTarget) -> None:
    assert not is_tuning(target)
    with somebody_tunes(target):
        assert is_tuning(target)
        assert tune_exclusively(target, SECONDS) is None
        assert tune_exclusively(target, SECONDS, force=True) is None
    assert not is_tuning(target)


def test_who_waits_takes_what_the_other_has_measured(target: TuningTarget) -> None:
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(tune_exclusively(target, SECONDS, wait=True)), daemon=True
    )
    with somebody_tunes(target):
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        before = write_table(target, {"1x16": "twin"}).read_bytes()
    waiting.join(10)
    assert not waiting.is_alive()
    assert found == [read_costs(target)]
    assert target.costs_path.read_bytes() == before


def test_a_store_that_cannot_be_written_is_an_error_of_the_system(target: TuningTarget) -> None:
    (target.artifact / "hosts").write_text("in the way")
    with pytest.raises(OSError, match="hosts"):
        tune_exclusively(target, SECONDS)
    assert not is_tuning(target)


def test_a_model_without_its_reference_cannot_be_tuned(target: TuningTarget) -> None:
    (target.artifact / REFERENCE_NAME).write_bytes(b"nothing to hold it against")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        tune_exclusively(target, SECONDS)
    assert read_costs(target) is None


def test_when_nothing_is_right_here_no_table_is_kept(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    corrupted = target.manifest.model_copy(update={"candidates": target.candidates[1:]})
    wrong = TuningTarget(target.artifact, corrupted, target.device, target.settings)
    with pytest.raises(EngineFailed, match="no graph passes the accuracy gate on this host"):
        tune_exclusively(wrong, SECONDS)
    assert not target.costs_path.exists()
    assert not is_tuning(target)
