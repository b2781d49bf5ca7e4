from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec
from deployments.tuning.costs import CostTable, TuningTarget, Variant, read_costs, write_costs
from tests.support.cost_tables import variant
from tests.support.tuning_artifacts import seal_tunable, write_table


@pytest.fixture
def target(tmp_path: Path) -> TuningTarget:
    return seal_tunable(tmp_path)


def test_a_table_comes_back_as_it_was_kept(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain", "8x16": "twin+arena", "32x16": "twin+arena"})
    table = read_costs(target)
    assert table is not None
    assert table.to_json() == path.read_bytes()
    assert [v.name for v in table.selected_variants()] == ["twin+arena", "plain"]


def test_its_file_is_named_after_host_device_and_threads(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    fingerprint = target.host.fingerprint
    assert path == target.artifact / "hosts" / fingerprint / "cpu-1.json"


def test_without_a_table_there_is_none_and_nothing_to_tell(
    target: TuningTarget, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_costs(target) is None
    assert not caplog.records


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
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
    "unknown key": edited(lambda t: t.update(speed="high")),
    "of a later release": edited(lambda t: t.update(schema_version=3)),
    "no winners": edited(lambda t: t.update(selection=[])),
    "no rows": edited(lambda t: t.update(rows=[])),
    "a time that is no number": edited(lambda t: t["rows"][0]["costs"][0].update(median_ms=None)),
    "infinitely slow": edited(lambda t: t["rows"][0]["costs"][0].update(median_ms=float("inf"))),
    "no time at all": edited(lambda t: t["rows"][0]["costs"][0].update(median_ms=0)),
    "an empty shape": edited(lambda t: t["selection"][0][0].update(items=0)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_table_is_as_good_as_none(
    target: TuningTarget,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_table(target, {"1x16": "plain"})
    path.write_bytes(damage(path.read_bytes()))
    assert read_costs(target) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text


def test_what_cannot_be_read_is_as_good_as_none(target: TuningTarget) -> None:
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
    "other threads": ({"threads": 2}, "another kind of host"),
    "another provider": (
        {"providers": ("CUDAExecutionProvider",)},
        "measured on CUDAExecutionProvider, the encoder has CPUExecutionProvider",
    ),
}


@pytest.mark.parametrize(("change", "reason"), STALE.values(), ids=STALE.keys())
def test_a_stale_table_is_not_used(
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


def test_a_table_copied_from_another_host_is_not_used(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = CostTable.model_validate_json(path.read_bytes())
    elsewhere = table.host.model_copy(update={"name": "another CPU"})
    path.write_bytes(table.model_copy(update={"host": elsewhere}).to_json())
    assert read_costs(target) is None


def test_a_winner_that_was_never_sealed_is_not_used(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain", "8x16": "stranger"})
    assert read_costs(target) is None


def test_winners_of_two_precisions_are_not_used(target: TuningTarget) -> None:
    plain, twin = target.candidates
    mixed = target.manifest.model_copy(
        update={"candidates": (plain, twin.model_copy(update={"precision": "int8"}))}
    )
    write_table(target, {"1x16": "plain", "8x16": "twin"})
    assert read_costs(target) is not None
    changed = TuningTarget(target.artifact, mixed, Device.CPU, target.settings)
    assert read_costs(changed) is None


def test_encoders_with_other_threads_have_tables_of_their_own(target: TuningTarget) -> None:
    write_table(target, {"1x16": "plain"})
    wide = EncoderSettings(intra_op_threads=2)
    assert read_costs(target) is not None
    two = TuningTarget(target.artifact, target.manifest, Device.CPU, wide)
    assert read_costs(two) is None


def test_a_table_is_kept_whole_or_not_at_all(target: TuningTarget) -> None:
    path = write_table(target, {"1x16": "plain"})
    table = read_costs(target)
    assert table is not None
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    with pytest.raises(OSError, match=r"cpu-1\.json"):
        write_costs(target.artifact, table)
    assert list(path.parent.iterdir()) == [path]


def test_a_variant_is_its_candidate_with_other_session_options(target: TuningTarget) -> None:
    plain, _ = target.candidates
    sealed = plain.options.model_copy(update={"arena": True, "disabled_optimizers": ("A",)})
    as_sealed = Variant.of("plain", sealed)
    assert as_sealed.name == "plain+arena"
    assert as_sealed.options(sealed) == sealed
    without = variant("plain+spinning").options(sealed)
    assert (without.arena, without.spinning) == (False, True)
    assert without.disabled_optimizers == ("A",)


def test_a_placement_opens_what_was_sealed(target: TuningTarget) -> None:
    plain, twin = target.candidates
    assert target.spec(plain) == GraphSpec.of(target.artifact, target.manifest, plain)
    assert [c.name for c in (plain, twin)] == ["plain", "twin"]
