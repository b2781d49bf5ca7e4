"""An encoder replica with tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device, TaskName
from deployments.config import AppArgs, EncoderSettings, ModelSettings
from deployments.messages import BatchKey, TokenizedBatch, TokenizedCall
from deployments.records import ForwardPassRecord
from deployments.registry import ModelRegistry
from deployments.replicas.encoder import EncoderReplica
from deployments.tasks import TASKS, Task
from deployments.tasks.embedding import EmbeddingOptions
from tests.support.artifacts import EMBEDDER, WIDTH
from tests.support.fakes import ListRecorder, far_deadline, item

# Rounding error of fp32 sums of at most 16 values of magnitude 1.
TOLERANCE = 1e-5
RAW = EmbeddingOptions(normalize=False, dimensions=WIDTH)


def args(store: Path) -> AppArgs:
    encoders = {device: EncoderSettings(concurrent_passes=2) for device in Device}
    return AppArgs(store=store, models=(ModelSettings(id=EMBEDDER),), encoders=encoders)


class EncoderHarness:
    """An encoder replica and a record of its forward passes."""

    def __init__(self, store: Path, device: Device = Device.CPU) -> None:
        self.passes: ListRecorder[ForwardPassRecord] = ListRecorder()
        self.replica = EncoderReplica(args(store), device, self.passes)
        ref = ModelRegistry.of(args(store)).find(EMBEDDER).ref
        self.key = BatchKey(ref, TaskName.FEATURE_EXTRACTION, device, long=False)

    def batch(self, *calls: TokenizedCall | Exception) -> TokenizedBatch:
        """Build a batch whose items consist of token 5 only."""
        lengths = [n for call in calls if isinstance(call, TokenizedCall) for n in call.lengths]
        return TokenizedBatch(self.key, item(5, sum(lengths)).ids.tobytes(), calls, tokenize_s=0.25)


def call(*lengths: int, deadline_s: float | None = None, truncated: int = 0) -> TokenizedCall:
    return TokenizedCall(lengths, truncated, RAW, deadline_s or far_deadline())


def replace_task(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    table = {**TASKS, TaskName.FEATURE_EXTRACTION: task}
    for module in ("encoder", "encoder_calls"):
        monkeypatch.setattr(f"deployments.replicas.{module}.TASKS", table)
