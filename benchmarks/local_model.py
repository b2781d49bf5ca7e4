"""A sealed artifact opened without a server: the same encoder, engine and task, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchmarkError
from deployments.batching.collate import collate
from deployments.config import LaneSettings
from deployments.encoding.encoder import Encoder
from deployments.engines import Engine, GraphSpec, open_engine
from deployments.errors import ArtifactError, InputTooLong
from deployments.manifest import ArtifactManifest, Candidate, Device
from deployments.messages import Call, EncodedItem
from deployments.store import LATEST_NAME, model_directory, resolve_version
from deployments.tasks import TASKS, Task


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One version of a model and the graph that answers for it."""

    manifest: ArtifactManifest
    directory: Path
    candidate: Candidate

    @classmethod
    def open(
        cls, store: Path, model_id: str, version: str, device: Device = Device.CPU
    ) -> LocalModel:
        """The model with its digests checked. Raises BenchmarkError."""
        try:
            version = resolve_version(store, model_id, version)
            directory = model_directory(store, model_id) / version
            manifest = ArtifactManifest.read(directory)
        except ArtifactError as exc:
            raise BenchmarkError(
                exc.message, hint="name the store that holds it with --store DIR"
            ) from exc
        candidate = manifest.candidate_for(device)
        if candidate is None:
            raise BenchmarkError(
                f"`{model_id}` has no graph for the {device}", hint="build it again"
            )
        return cls(manifest, directory, candidate)

    @classmethod
    def named(cls, store: Path, name: str) -> LocalModel:
        """The model called `ID`, or `ID:VERSION`. Raises BenchmarkError."""
        model_id, _, version = name.partition(":")
        return cls.open(store, model_id, version or LATEST_NAME)

    @property
    def compute_type(self) -> str:
        """As in the header `x-compute-type`."""
        return f"{self.candidate.device}-{self.candidate.precision}"

    @property
    def task(self) -> Task:
        """The model's own task. Raises BenchmarkError for one that is not served."""
        name = self.manifest.tasks[0]
        if name not in TASKS:
            raise BenchmarkError(
                f"`{self.manifest.id}` was built for `{name}`, which is not served yet",
                hint="name an embedding model or a classifier with --model ID",
            )
        return TASKS[name]

    def items(self, texts: Sequence[str]) -> list[EncodedItem]:
        """What the server's engine would get for each text; longer ones are cut."""
        parsed = self.task.parse(list(texts), {"truncate": True}, self.manifest)
        call = Call(parsed.texts, parsed.fields, parsed.options, parsed.truncation, 0.0)
        (encoded,) = Encoder(self.directory, self.manifest.max_tokens).encode([call])
        if isinstance(encoded, InputTooLong):
            raise encoded
        return encoded.items

    def engine(self, *, threads: int) -> Engine:
        """An engine with `threads` threads per forward pass. Raises EngineFailed."""
        lane = LaneSettings(threads_per_run=threads)
        return open_engine(GraphSpec.of(self.directory, self.manifest, self.candidate), lane)

    def values_alone(self, texts: Sequence[str], *, threads: int) -> list[Any]:
        """What the server would answer to each text sent alone, computed one by one."""
        task = self.task
        options = task.parse(texts[0], {}, self.manifest).options
        engine = self.engine(threads=threads)
        rows = rows_alone(engine, self.items(texts))
        engine.close()
        return [task.decode([row], options, self.manifest) for row in rows]


def rows_alone(engine: Engine, items: Sequence[EncodedItem]) -> NDArray[np.float32]:
    """The engine's row for every item in a batch of its own, [N, W]."""
    return np.stack([engine.run(collate([item])).items[0] for item in items])
