"""Tiny decoders and encoder-decoders, exported once for all tests of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from build_artifacts.decoders.graphs.export import ExportedModel, export_model
from tests.support.tiny_checkpoints import DECODERS, ENCODER_DECODERS, saved
from tests.support.torch_threads import one_thread


@dataclass(frozen=True)
class ExportedCase:
    """A tiny model in transformers and its exported graphs."""

    model: Any
    checkpoint: Path
    written: ExportedModel


ExportModel = Callable[[str], ExportedCase]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportModel:
    cache: dict[str, ExportedCase] = {}

    def export_once(name: str) -> ExportedCase:
        if name not in cache:
            root = tmp_path_factory.mktemp(name)
            model = saved((DECODERS | ENCODER_DECODERS)[name], root / "checkpoint")
            (root / "graphs").mkdir()
            written = export_model(root / "checkpoint", root / "graphs")
            cache[name] = ExportedCase(model, root / "checkpoint", written)
        return cache[name]

    return export_once


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
