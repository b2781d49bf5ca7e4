"""Parity models that tests share, because their creation and build take seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel
from tests.support.torch_threads import one_thread

LABELS = ("SAD", "GLAD", "MAD")


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    return ParityModel.make(
        tmp_path_factory.mktemp("classifier"), TaskName.TEXT_CLASSIFICATION, labels=LABELS
    )


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    return ParityModel.make(tmp_path_factory.mktemp("embedder"), TaskName.FEATURE_EXTRACTION)


@pytest.fixture(scope="session")
def mask_filler(tmp_path_factory: pytest.TempPathFactory) -> ParityModel:
    return ParityModel.make(tmp_path_factory.mktemp("mask-filler"), TaskName.FILL_MASK)
