from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec
from deployments.errors import ArtifactMissing
from deployments.tuning.costs import CostTable, TuningTarget, Variant, read_costs, write_costs
from tests.support.cost_tables import variant
from tests.support.tuning_artifacts import seal_tunable, write_table


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


def test_read_costs_returns_the_written_table(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain", "8x16": "twin+spinning", "32x16": "twin+spinning"})
    table = read_costs(target)
    assert table is not None
    assert table.to_json() == path.read_bytes()
    assert [v.name for v in table.selected_variants()] == ["twin+spinning", "plain"]


def test_costs_path_has_host_device_and_threads(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    fingerprint = target.host.fingerprint
    assert path == target.artifact / "hosts" / fingerprint / "cpu-1.json"


def test_missing_table_is_none_without_a_log_line(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_costs(target) is None
    assert not caplog.records


def edit_json(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        table = json.loads(content)
        change(table)
        return json.dumps(table).encode()

    return edit


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-20],
    "empty": lambda _: b"",
    "not text": lambda _: b"\xff\xfe\x00",
    "not a table": lambda _: b"[1, 2]",
    "unknown key": edit_json(lambda t: t.update(speed="high")),
    "of a later release": edit_json(lambda t: t.update(schema_version=4)),
    "no winners": edit_json(lambda t: t.update(selection=[])),
    "no rows": edit_json(lambda t: t.update(rows=[])),
    "a time that is no number": edit_json(
        lambda t: t["rows"][0]["costs"][0].update(median_ms=None)
    ),
    "infinitely slow": edit_json(lambda t: t["rows"][0]["costs"][0].update(median_ms=float("inf"))),
    "no time at all": edit_json(lambda t: t["rows"][0]["costs"][0].update(median_ms=0)),
    "an empty shape": edit_json(lambda t: t["selection"][0][0].update(items=0)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_table_is_ignored_with_a_warning(
    target: TuningTarget,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_table(target, {"1x16": "plain"})
    path.write_bytes(damage(path.read_bytes()))
    assert read_costs(target) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text


def test_unreadable_table_is_ignored(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    path.unlink()
    path.mkdir()
    assert read_costs(target) is None


STALE: dict[str, tuple[dict[str, object], str]] = {
    "another runtime": (
        {"engines": {"onnxruntime": "onnxruntime 1.2.3"}},
        "measured with onnxruntime 1.2.3, this host has onnxruntime 1",
    ),
    "an engine that is gone": (
        {"engines": {"onnxruntime": "onnxruntime 1.2.3", "warp": "warp 9"}},
        "warp 9, this host has onnxruntime 1",
    ),
    "an engine that came later": ({"engines": {}}, "measured with nothing, this host has"),
    "another build": ({"version": "0" * 12}, "another artifact"),
    "other threads": ({"threads": 2}, "another number of threads"),
    "another provider": (
        {"providers": ("CUDAExecutionProvider",)},
        "measured on CUDAExecutionProvider, the encoder has CPUExecutionProvider",
    ),
}


@pytest.mark.parametrize(("change", "reason"), STALE.values(), ids=STALE.keys())
def test_stale_table_is_ignored_with_the_reason(
    target: TuningTarget,
    change: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = CostTable.model_validate_json(path.read_bytes())
    path.write_bytes(table.model_copy(update=change).to_json())
    with caplog.at_level(logging.INFO):
        assert read_costs(target) is None
    assert reason in caplog.text


def test_table_of_another_host_is_ignored(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = CostTable.model_validate_json(path.read_bytes())
    other_host = table.host.model_copy(update={"name": "another CPU"})
    path.write_bytes(table.model_copy(update={"host": other_host}).to_json())
    assert read_costs(target) is None


def test_table_with_unknown_winner_is_ignored(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain", "8x16": "stranger"})
    assert read_costs(target) is None


def test_table_with_winners_that_round_differently_is_ignored(target: TuningTarget) -> None:
    plain, twin = target.candidates
    mixed = target.manifest.model_copy(
        update={"candidates": (plain, twin.model_copy(update={"precision": "int8"}))}
    )
    write_table(target, {"1x16": "plain", "8x16": "twin"})
    assert read_costs(target) is not None
    changed = TuningTarget(target.artifact, mixed, Device.CPU, target.settings)
    assert read_costs(changed) is None


def test_table_of_another_thread_count_is_not_used(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain"})
    two_threads = EncoderSettings(intra_op_threads=2)
    assert read_costs(target) is not None
    other_target = TuningTarget(target.artifact, target.manifest, Device.CPU, two_threads)
    assert read_costs(other_target) is None


def test_failed_write_leaves_no_temporary_file(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = read_costs(target)
    assert table is not None
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match=r"cpu-1\.json"):
        write_costs(target.artifact, table)
    assert list(path.parent.iterdir()) == [path]


def test_table_does_not_bring_a_removed_version_back(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = read_costs(target)
    assert table is not None
    shutil.rmtree(target.artifact)
    with pytest.raises(ArtifactMissing, match="removed"):
        write_costs(target.artifact, table)
    assert not path.parents[2].exists()


def test_variant_options_override_the_sealed_options(target: TuningTarget) -> None:
    plain, _ = target.candidates
    sealed = plain.options.model_copy(update={"spinning": True, "disabled_optimizers": ("A",)})
    sealed_variant = Variant.of("plain", sealed)
    assert sealed_variant.name == "plain+spinning"
    assert sealed_variant.options(sealed) == sealed
    options = variant("plain").options(sealed)
    assert (options.spinning, options.disabled_optimizers) == (False, ("A",))


def test_target_spec_is_that_of_the_sealed_candidate(target: TuningTarget) -> None:
    plain, twin = target.candidates
    sealed = GraphSpec.of(target.artifact, target.manifest, plain)
    assert target.spec(plain) == replace(sealed, host_folder=target.costs_path.parent)
    assert [c.name for c in (plain, twin)] == ["plain", "twin"]
