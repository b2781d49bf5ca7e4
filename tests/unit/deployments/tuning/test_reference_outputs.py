"""The file of the reference outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deployments.errors import ArtifactError
from deployments.tuning.parity import Floats, ReferenceOutputs
from tests.support.fakes import build_item, item

VECTORS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
RAGGED = np.split(VECTORS, [3, 4])  # for heads with a row per token or mask


@pytest.mark.parametrize("expected", [list(VECTORS), RAGGED, [np.zeros((0, 4), np.float32)] * 2])
def test_reference_round_trips_through_its_file(expected: list[Floats], tmp_path: Path) -> None:
    items = tuple(build_item(range(n + 2), second_segment_start=n) for n in range(len(expected)))
    ReferenceOutputs(items, tuple(expected), "multi_label").write(tmp_path / "reference.npz")
    read = ReferenceOutputs.read(tmp_path / "reference.npz")
    assert read.problem_type == "multi_label"
    assert [i.ids.tolist() for i in read.items] == [i.ids.tolist() for i in items]
    assert [i.second_segment_start for i in read.items] == [i.second_segment_start for i in items]
    assert {i.ids.dtype for i in read.items} == {np.dtype(np.int32)}
    assert [output.shape for output in read.outputs] == [output.shape for output in expected]
    assert all(
        (actual == wanted).all() for actual, wanted in zip(read.outputs, expected, strict=True)
    )
    assert {output.dtype for output in read.outputs} == {np.dtype(np.float32)}


def write_reference(path: Path, **changed: object) -> None:
    ReferenceOutputs((item(1, 3), item(2)), tuple(VECTORS[:2])).write(path)
    with np.load(path) as file:
        arrays = dict(file) | changed
    with path.open("wb") as file:
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    "damage",
    [
        {"ids": None},
        {"id_ends": np.array([3, 5])},  # beyond the end of `ids`
        {"id_ends": np.array([4, 3])},
        {"second_segment_start": np.array([3])},
        {"outputs": np.array([{}], dtype=object)},  # needs unpickling
    ],
    ids=["missing", "too long", "backwards", "too few", "pickled"],
)
def test_damaged_reference_is_rejected(damage: dict[str, object], tmp_path: Path) -> None:
    write_reference(tmp_path / "reference.npz")
    ReferenceOutputs.read(tmp_path / "reference.npz")
    write_reference(tmp_path / "reference.npz", **damage)
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "reference.npz")


def test_reference_of_an_older_release_is_read(tmp_path: Path) -> None:
    write_reference(tmp_path / "reference.npz", similarity=np.array("dot"), problem_type=None)
    assert ReferenceOutputs.read(tmp_path / "reference.npz").problem_type is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY"])
def test_file_without_reference_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "reference.npz").write_bytes(content)
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "reference.npz")
    with pytest.raises(ArtifactError, match="not a file of reference outputs"):
        ReferenceOutputs.read(tmp_path / "none.npz")
