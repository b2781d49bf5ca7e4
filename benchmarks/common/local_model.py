"""Artifacts opened in this process, with the tokenizer, engine and task code of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.errors import BenchmarkError
from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.types import Device
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import InvalidField, ServeError
from deployments.messages import Call, TokenizedItem
from deployments.plan.plan_file import read_plan
from deployments.plan.resolution import find_for_inspection
from deployments.tasks import TASKS, DecodeContext, Task, TaskInput
from deployments.tokenization.tokenizer import CachingTokenizer, TokenizedTexts
from deployments.tokenization.vocabulary import TokenVocabulary


def open_torch(
    source: str | None, manifest: ArtifactManifest, scratch: Path, threads: int
) -> EncoderEngine:
    """Open the torch model from which an artifact was built.

    The engine's outputs have the layout of the artifact's outputs. `source` has the form that
    `hundredfold build` takes. None means the source in the manifest. Unpacked files go to
    `scratch`. Raises BenchmarkError or BuildError if the source is unusable.
    """
    from build_artifacts.checkpoints.models import load_model
    from build_artifacts.encoders.reference_engine import TorchReferenceEngine
    from build_artifacts.families import read_metadata
    from build_artifacts.sources.hub import HuggingFaceHub
    from build_artifacts.steps.resolve import resolve

    checkpoint = resolve(source or find_source(manifest), scratch, HuggingFaceHub())
    metadata = read_metadata(checkpoint, manifest.tasks)
    model = load_model(checkpoint.weights, head=metadata.loaded_head, dtype="float32")
    return TorchReferenceEngine(model, metadata, threads)


def find_source(manifest: ArtifactManifest) -> str:
    """Return the source of an artifact's weights. Raise BenchmarkError for a merged adapter."""
    if manifest.source.adapter is not None:
        raise BenchmarkError(
            f"`{manifest.id}` contains a merged adapter, so its source is a different model",
            hint="name the directory of the merged model: --torch DIR",
        )
    return manifest.source.ref


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One version of a model, and its default candidate (compiled variant) for one device."""

    manifest: ArtifactManifest
    directory: Path
    candidate: Candidate

    @classmethod
    def open(cls, store: Path, name: str, device: Device = Device.CPU) -> LocalModel:
        """Open the model `id`, `id@version` or `id@alias`, and check the digests of its files.

        Raises BenchmarkError if the model is missing, invalid, or not built for `device`.
        """
        try:
            directory = find_for_inspection(store, read_plan(store), name)
            manifest = ArtifactManifest.read(directory)
        except ServeError as exc:
            raise BenchmarkError(
                exc.message, hint="name the store that contains the model with --store DIR"
            ) from exc
        candidate = manifest.candidate_for(device)
        if candidate is None:
            raise BenchmarkError(
                f"`{name}` has no candidate for device {device}",
                hint="build the model again for this device",
            )
        return cls(manifest, directory, candidate)

    @property
    def compute_type(self) -> str:
        """Value of the header `x-compute-type` for this candidate, such as `cpu-int8`."""
        return f"{self.candidate.device}-{self.candidate.precision}"

    @property
    def task(self) -> Task:
        """The default task of the model: the first task of its manifest."""
        return TASKS[self.manifest.tasks[0]]

    def tokenize(self, texts: Sequence[str]) -> list[TokenizedItem]:
        """Tokenize and truncate `texts` as the server does.

        Raise BenchmarkError if the model's task does not take plain texts.
        """
        return self._tokenize(self._open_tokenizer(), self._parse(list(texts))).items

    def open_engine(self, *, threads: int) -> EncoderEngine:
        """Open an engine with `threads` threads per pass. Raises EngineFailed if it cannot open."""
        settings = EncoderSettings(intra_op_threads=threads)
        return open_engine(GraphSpec.of(self.directory, self.manifest, self.candidate), settings)

    def unbatched_values(
        self, texts: Sequence[str], *, threads: int, engine: EncoderEngine | None = None
    ) -> list[Any]:
        """Compute the response value of each text, with one forward pass per tokenized item.

        `engine` must have the output layout of the artifact, as engines of `open_torch` have. None
        means the artifact's own engine. The method closes the engine in both cases.
        """
        tokenizer = self._open_tokenizer()
        vocabulary = TokenVocabulary(self.directory) if self.task.needs_vocabulary else None
        values = []
        with closing(engine or self.open_engine(threads=threads)) as opened:
            for text in texts:
                parsed = self._parse(text)
                tokenized = self._tokenize(tokenizer, parsed)
                context = DecodeContext(
                    rows=[opened.run(collate([item])).items[0] for item in tokenized.items],
                    items=tokenized.items,
                    token_offsets=tokenized.token_offsets,
                    manifest=self.manifest,
                    vocabulary=vocabulary,
                )
                values.append(self.task.decode(context, parsed.options))
        return values

    def _open_tokenizer(self) -> CachingTokenizer:
        manifest = self.manifest
        return CachingTokenizer(
            self.directory, manifest.max_tokens, pair_template=manifest.pair_template
        )

    def _parse(self, inputs: str | list[str]) -> TaskInput:
        try:
            return self.task.parse(inputs, {"truncate": True}, self.manifest)
        except InvalidField as exc:
            raise BenchmarkError(
                f"`{self.manifest.id}` is a model for `{self.task.name}`: {exc.message}",
                hint="name a model that takes plain texts with --model ID",
            ) from exc

    def _tokenize(self, tokenizer: CachingTokenizer, parsed: TaskInput) -> TokenizedTexts:
        call = Call(
            texts=parsed.texts,
            fields=parsed.fields,
            options=parsed.options,
            truncation=parsed.truncation,
            deadline_s=0.0,
            windowing=parsed.windowing,
        )
        (tokenized,) = tokenizer.tokenize([call])
        if isinstance(tokenized, ServeError):
            raise tokenized
        return tokenized


def unbatched_outputs(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> NDArray[np.float32]:
    """Run one forward pass per item. Return the outputs, [items, width]."""
    return np.stack([engine.run(collate([item])).items[0] for item in items])
