"""Tiny models written once, for every test of them."""

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
class Made:
    """One tiny model, as transformers runs it and as it was written."""

    model: Any
    checkpoint: Path
    written: ExportedModel


Make = Callable[[str], Made]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            root = tmp_path_factory.mktemp(name)
            model = saved((GPT2 | ENCODER_DECODERS)[name], root / "checkpoint")
            (root / "graphs").mkdir()
            written = export_model(root / "checkpoint", root / "graphs")
            known[name] = Made(model, root / "checkpoint", written)
        return known[name]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost such small models more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
