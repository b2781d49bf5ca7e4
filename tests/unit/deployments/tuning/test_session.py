from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.errors import ArtifactError, EngineFailed
from deployments.tuning.costs import TuningTarget, read_costs
from deployments.tuning.tuner import is_tuning, tune_exclusively
from tests.support.cost_tables import shape
from tests.support.tuning_artifacts import STALE, hold_tuning_lock, seal_tunable, write_table
from tests.support.waiting import TIMEOUT_S

SECONDS = 0.05


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


def test_measured_table_is_written(target: TuningTarget) -> None:
    table = tune_exclusively(target, SECONDS)
    assert table is not None
    assert table == read_costs(target)
    assert not is_tuning(target)
    assert list(target.costs_path.parent.iterdir()) == [target.costs_path]


def test_shapes_are_the_supported_or_the_given_ones(
    target: TuningTarget,
) -> None:
    default_table = tune_exclusively(target, 2.0)
    requested_table = tune_exclusively(target, SECONDS, force=True, shapes=[shape("2x3")])
    assert default_table is not None
    assert requested_table is not None
    assert {str(where) for where, _ in default_table.selection} == {"1x16", "4x16", "8x16", "32x16"}
    assert [str(where) for where, _ in requested_table.selection] == ["2x3"]


def test_valid_table_is_measured_again_only_with_force(
    target: TuningTarget,
) -> None:
    path = write_table(target, {"1x16": "twin"})
    before = path.read_bytes()
    assert tune_exclusively(target, SECONDS) == read_costs(target)
    assert path.read_bytes() == before
    tune_exclusively(target, SECONDS, force=True)
    assert path.read_bytes() != before


def test_stale_table_is_replaced(target: TuningTarget) -> None:
    write_table(target, {"1x16": "twin"}, **STALE)
    assert read_costs(target) is None
    assert tune_exclusively(target, SECONDS) == read_costs(target) is not None


def test_tuning_returns_none_while_the_lock_is_held(target: TuningTarget) -> None:
    assert not is_tuning(target)
    with hold_tuning_lock(target):
        assert is_tuning(target)
        assert tune_exclusively(target, SECONDS) is None
        assert tune_exclusively(target, SECONDS, force=True) is None
    assert not is_tuning(target)


def test_waiting_caller_uses_the_table_of_the_other(target: TuningTarget) -> None:
    results = []
    waiting_thread = threading.Thread(
        target=lambda: results.append(tune_exclusively(target, SECONDS, wait=True)), daemon=True
    )
    with hold_tuning_lock(target):
        waiting_thread.start()
        waiting_thread.join(0.2)
        assert waiting_thread.is_alive()
        before = write_table(target, {"1x16": "twin"}).read_bytes()
    waiting_thread.join(TIMEOUT_S)
    assert not waiting_thread.is_alive()
    assert results == [read_costs(target)]
    assert target.costs_path.read_bytes() == before


def test_read_only_store_raises_os_error(target: TuningTarget) -> None:
    (target.artifact / "hosts").write_text("in the way")
    with pytest.raises(OSError, match="hosts"):
        tune_exclusively(target, SECONDS)
    assert not is_tuning(target)


def test_damaged_reference_raises_artifact_error(target: TuningTarget) -> None:
    (target.artifact / REFERENCE_NAME).write_bytes(b"nothing to hold it against")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        tune_exclusively(target, SECONDS)
    assert read_costs(target) is None


def test_no_accurate_candidate_writes_no_table(tmp_path: Path) -> None:
    target = seal_tunable(tmp_path, names=["plain", "astray"], wrong=["astray"])
    corrupted = target.manifest.model_copy(update={"candidates": target.candidates[1:]})
    wrong = TuningTarget(target.artifact, corrupted, target.device, target.settings)
    with pytest.raises(EngineFailed, match="no graph passes the accuracy gate on this host"):
        tune_exclusively(wrong, SECONDS)
    assert not target.costs_path.exists()
    assert not is_tuning(target)
