"""Parity models that tests share, because their creation and build take seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deployments.artifacts.types import TaskName
from tests.support.parity_models import ParityModel

LABELS = ("SAD", "GLAD", "MAD")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread. On a busy machine, more threads make tiny models slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
