"""A sealed artifact opened without a server: the same encoder, engine and task, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.errors import BenchmarkError
from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.store import LATEST_NAME, find_artifact
from deployments.artifacts.types import Device
from deployments.batching.batches import collate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import ArtifactError, InvalidField, ServeError
from deployments.messages import Call, TokenizedItem
from deployments.tasks import TASKS, DecodeContext, Task, TaskInput
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.vocabulary import TokenVocabulary


def open_torch(
    source: str | None, manifest: ArtifactManifest, scratch: Path, threads: int
) -> EncoderEngine:
    """The model an artifact was built from, answering the same rows.

    `source` is what `build_artifacts build` takes; None: the manifest's own. What must be unpacked
    goes under `scratch`. Raises BenchmarkError or a BuildError.
    """
    from build_artifacts.checkpoints.metadata import read_metadata
    from build_artifacts.checkpoints.models import load_model
    from build_artifacts.report.stages import TorchReferenceEngine
    from build_artifacts.search.preparation import Original
    from build_artifacts.sources.hub import HuggingFaceHub
    from build_artifacts.steps.resolve import resolve

    checkpoint = resolve(source or find_source(manifest), scratch, HuggingFaceHub())
    metadata = read_metadata(checkpoint, manifest.tasks)
    model = load_model(checkpoint.weights, head=manifest.head, dtype="float32")
    return TorchReferenceEngine(Original(model, metadata), threads)


def find_source(manifest: ArtifactManifest) -> str:
    """Where the artifact's weights came from. Raises BenchmarkError for a merged adapter."""
    if manifest.source.adapter is not None:
        raise BenchmarkError(
            f"`{manifest.id}` was merged with an adapter, so its source is another model",
            hint="name a directory with the merged model: --torch DIR",
        )
    return manifest.source.ref


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
            directory = find_artifact(store, model_id, version)
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
        """The model's own task."""
        return TASKS[self.manifest.tasks[0]]

    def items(self, texts: Sequence[str]) -> list[TokenizedItem]:
        """What the server's engine would get for each text; longer ones are cut.

        Raises BenchmarkError when the model's task takes something else than texts.
        """
        return self._encoded(self._encoder(), self._parsed(list(texts))).items

    def engine(self, *, threads: int) -> EncoderEngine:
        """An engine with `threads` threads per forward pass. Raises EngineFailed."""
        settings = EncoderSettings(intra_op_threads=threads)
        return open_engine(GraphSpec.of(self.directory, self.manifest, self.candidate), settings)

    def unbatched_values(self, texts: Sequence[str], *, threads: int) -> list[Any]:
        """What the server would answer to each text sent alone, computed one by one."""
        encoder = self._encoder()
        vocabulary = TokenVocabulary(self.directory) if self.task.needs_vocabulary else None
        engine = self.engine(threads=threads)
        values = []
        for text in texts:
            parsed = self._parsed(text)
            encoded = self._encoded(encoder, parsed)
            computed = DecodeContext(
                rows=[engine.run(collate([item])).items[0] for item in encoded.items],
                items=encoded.items,
                token_offsets=encoded.token_offsets,
                manifest=self.manifest,
                vocabulary=vocabulary,
            )
            values.append(self.task.decode(computed, parsed.options))
        engine.close()
        return values

    def _encoder(self) -> CachingTokenizer:
        return CachingTokenizer(self.directory, self.manifest.max_tokens)

    def _parsed(self, inputs: str | list[str]) -> TaskInput:
        try:
            return self.task.parse(inputs, {"truncate": True}, self.manifest)
        except InvalidField as exc:
            raise BenchmarkError(
                f"`{self.manifest.id}` was built for `{self.task.name}`: {exc.message}",
                hint="name a model that takes plain texts with --model ID",
            ) from exc

    def _encoded(self, encoder: CachingTokenizer, parsed: TaskInput) -> TokenizedTexts:
        call = Call(
            texts=parsed.texts,
            fields=parsed.fields,
            options=parsed.options,
            truncation=parsed.truncation,
            deadline_s=0.0,
            windowing=parsed.windowing,
        )
        (encoded,) = encoder.tokenize([call])
        if isinstance(encoded, ServeError):
            raise encoded
        return encoded


def unbatched_outputs(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> NDArray[np.float32]:
    """The engine's row for every item in a batch of its own, [N, W]."""
    return np.stack([engine.run(collate([item])).items[0] for item in items])
