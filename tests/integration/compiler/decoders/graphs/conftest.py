"""Tiny models, exported once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from build_artifacts.decoders.graphs.export import ExportedModel, export_model
from tests.support.tiny_checkpoints import ENCODER_DECODERS, GPT2, saved


@dataclass(frozen=True)
class ExportedCase:
    """A tiny model in transformers and its exported graphs."""

    model: Any
    checkpoint: Path
    written: ExportedModel


Make = Callable[[str], ExportedCase]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    known: dict[str, ExportedCase] = {}

    def make(name: str) -> ExportedCase:
        if name not in known:
            root = tmp_path_factory.mktemp(name)
            model = saved((GPT2 | ENCODER_DECODERS)[name], root / "checkpoint")
            (root / "graphs").mkdir()
            written = export_model(root / "checkpoint", root / "graphs")
            known[name] = ExportedCase(model, root / "checkpoint", written)
        return known[name]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads slow such small models down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
