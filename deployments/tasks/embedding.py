"""feature-extraction and sentence-similarity: texts to vectors, and vectors compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InvalidField
from deployments.tasks.base import (
    DecodeContext,
    Task,
    TaskInput,
    TextParameters,
    as_list,
    build_item_paths,
)
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.numbers import normalize


class SimilarityParameters(TextParameters):
    """Parameters of sentence-similarity."""

    prompt_name: str | None = None


class EmbeddingParameters(SimilarityParameters):
    """Parameters of feature-extraction."""

    normalize: bool | None = None
    dimensions: int | None = Field(None, ge=1)
    # Clients send it; these routes answer floats either way, for base64 breaks those clients.
    encoding_format: str | None = None


class EmbeddingOptions(NamedTuple):
    """How rows become embeddings."""

    normalize: bool
    dimensions: int


class FeatureExtraction(Task):
    """Embeddings, float32 [items, dimensions]."""

    name: ClassVar = TaskName.FEATURE_EXTRACTION
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = EmbeddingParameters
    response_type: ClassVar[Any] = list[list[float]]
    example: ClassVar[Mapping[str, Any]] = {"inputs": ["A cat.", "A kitten."]}

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """When parameters are sent that only this task has."""
        return bool({"normalize", "dimensions"} & set(parameters))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        params = parse_parameters(EmbeddingParameters, parameters)
        texts, fields, _ = as_list(self.inputs.read(inputs))
        dimensions = params.dimensions or manifest.output_width
        if dimensions > manifest.output_width:
            raise InvalidField(
                f"`parameters.dimensions` is {dimensions}, the model has {manifest.output_width}",
                field="parameters.dimensions",
            )
        normalize = manifest.normalize if params.normalize is None else params.normalize
        return TaskInput(
            texts=add_prompt(texts, params.prompt_name, manifest),
            fields=fields,
            options=EmbeddingOptions(normalize, dimensions),
            truncation=params.truncation,
        )

    def decode(self, context: DecodeContext, options: EmbeddingOptions) -> NDArray[np.float32]:
        """A list of vectors, also for one text: the shape every client version reads.

        Cut to the requested dimensions, then scaled: a cut vector is scaled anew.
        """
        cut = np.stack(context.rows)[:, : options.dimensions]
        # Contiguous, because the JSON encoder and the wire copy whole buffers.
        return normalize(cut) if options.normalize else np.ascontiguousarray(cut)


class SimilarityInput(BaseModel):
    """A sentence, and those it is compared with."""

    source_sentence: NonEmptyText
    sentences: Many[NonEmptyText]


class SentenceSimilarity(Task):
    """Cosine similarity of one sentence with each of several."""

    name: ClassVar = TaskName.SENTENCE_SIMILARITY
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[SimilarityInput]] = Inputs(
        SimilarityInput, "an object with `source_sentence` and `sentences`"
    )
    parameters: ClassVar[type[TextParameters]] = SimilarityParameters
    response_type: ClassVar[Any] = list[float]
    example: ClassVar[Mapping[str, Any]] = {
        "inputs": {"source_sentence": "A cat.", "sentences": ["A kitten.", "A tax."]}
    }

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        """An object with `source_sentence` or `sentences`."""
        return isinstance(inputs, dict) and bool({"source_sentence", "sentences"} & set(inputs))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: {"source_sentence": text, "sentences": [text, ...]}."""
        params = parse_parameters(SimilarityParameters, parameters)
        given = self.inputs.read(inputs)
        texts = (given.source_sentence, *given.sentences)
        return TaskInput(
            texts=add_prompt(texts, params.prompt_name, manifest),
            fields=(
                "inputs.source_sentence",
                *build_item_paths("inputs.sentences", len(given.sentences), single=False),
            ),
            options=None,
            truncation=params.truncation,
            many="inputs.sentences",
        )

    def decode(self, context: DecodeContext, options: None) -> list[float]:
        """Cosine of the first vector with each of the others."""
        units = normalize(np.stack(context.rows))
        return [float(cosine) for cosine in units[1:] @ units[0]]


def add_prompt(
    texts: tuple[str, ...], prompt_name: str | None, manifest: ArtifactManifest
) -> tuple[str, ...]:
    """`texts` behind the model's prompt of that name. Raises InvalidField for an unknown one."""
    name = manifest.default_prompt if prompt_name is None else prompt_name
    if name is None:
        return texts
    if name not in manifest.prompts:
        known = ", ".join(f"`{key}`" for key in manifest.prompts) or "none"
        raise InvalidField(
            f"`parameters.prompt_name`: the model has no prompt `{name}`; known: {known}",
            field="parameters.prompt_name",
        )
    return tuple(manifest.prompts[name] + text for text in texts)
