"""feature-extraction and sentence-similarity: embeddings and their similarity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

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
    TruncatingParameters,
    as_list,
    build_item_paths,
)
from deployments.tasks.inputs import Inputs, Many, NonEmptyText, one_or_many, parse_parameters
from deployments.tasks.numbers import normalize

# What the texts are, as clients of Cohere, Voyage and NVIDIA name it.
InputType: TypeAlias = Literal[
    "search_query", "query", "search_document", "document", "passage",
    "classification", "clustering",
]  # fmt: skip
_QUERY, _DOCUMENT = ("search_query", "query"), ("search_document", "document", "passage", "corpus")
# What checkpoints call the prompt of such texts, in lower case. Of several the first is selected.
# sentence-transformers' `encode_query` and `encode_document` search for such names too.
_PROMPTS: Mapping[InputType, tuple[str, ...]] = {
    "search_query": _QUERY,
    "query": _QUERY,
    "search_document": _DOCUMENT,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class SimilarityParameters(TruncatingParameters):
    prompt_name: str | None = None


class EmbeddingParameters(SimilarityParameters):
    normalize: bool | None = None
    dimensions: int | None = Field(None, ge=1)
    # Selects a prompt of the model, if it has one for this type and `prompt_name` names none.
    input_type: InputType | None = None
    # Ignored, because these routes return floats only. Clients that cannot read base64 send it.
    encoding_format: str | None = None


class EmbeddingOptions(NamedTuple):
    # None: before the truncation, as sentence-transformers does where the checkpoint truncates.
    normalize: bool | None
    dimensions: int


class FeatureExtraction(Task):
    """Task that returns embeddings, float32 [items, dimensions]."""

    name: ClassVar = TaskName.FEATURE_EXTRACTION
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = EmbeddingParameters
    options_type: ClassVar[Any] = EmbeddingOptions
    response_type: ClassVar[Any] = list[list[float]]
    example: ClassVar[Mapping[str, Any]] = {"inputs": ["A cat.", "A kitten."]}

    def matches(self, inputs: Any, parameters: Mapping[str, Any]) -> bool:
        return bool({"normalize", "dimensions"} & set(parameters))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(EmbeddingParameters, parameters)
        texts, fields, _ = as_list(self.inputs.read(inputs))
        default = manifest.default_dimensions
        dimensions = params.dimensions or default or manifest.output_width
        if dimensions > manifest.output_width:
            raise InvalidField(
                f"`parameters.dimensions` is {dimensions}; the maximum is {manifest.output_width}",
                field="parameters.dimensions",
            )
        normalize, is_shortened = params.normalize, bool(default) and params.dimensions is None
        if normalize is None and not (is_shortened and manifest.normalize):
            normalize = manifest.normalize
        return TaskInput(
            texts=add_prompt(texts, _select_prompt(params, manifest), manifest),
            fields=fields,
            options=EmbeddingOptions(normalize, dimensions),
            truncation=params.choose_truncation(manifest),
        )

    def decode(self, context: DecodeContext, options: EmbeddingOptions) -> NDArray[np.float32]:
        """Return [items, dimensions] even for one text: clients of all versions read a list.

        Vectors are truncated to the requested dimensions before they are normalized.
        """
        own_way = options.normalize is None
        vectors = _stack_vectors(context) if own_way else np.array(context.rows)
        truncated = vectors[:, : options.dimensions]
        # Contiguous, because the JSON encoder and the transport copy whole buffers.
        return normalize(truncated) if options.normalize else np.ascontiguousarray(truncated)


class SimilarityInput(BaseModel):
    source_sentence: NonEmptyText
    sentences: Many[NonEmptyText]


class SentenceSimilarity(Task):
    """Task that returns the similarity of one sentence with each of several other sentences.

    The similarity is the cosine, or the dot product for a model that was trained with dot products.
    """

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
        return isinstance(inputs, dict) and bool({"source_sentence", "sentences"} & set(inputs))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(SimilarityParameters, parameters)
        value = self.inputs.read(inputs)
        texts = (value.source_sentence, *value.sentences)
        return TaskInput(
            texts=add_prompt(texts, params.prompt_name, manifest),
            fields=(
                "inputs.source_sentence",
                *build_item_paths("inputs.sentences", len(value.sentences), single=False),
            ),
            options=None,
            truncation=params.choose_truncation(manifest),
            many="inputs.sentences",
            extra=1,
        )

    def decode(self, context: DecodeContext, options: None) -> list[float]:
        return [float(similarity) for similarity in compare_with_first(context)]


def prepare_vectors(
    vectors: NDArray[np.float32], default_dimensions: int | None, *, normalizes: bool
) -> NDArray[np.float32]:
    """Normalize vectors [N, W] of a model that normalizes its vectors before it truncates them.

    Vectors of other models stay as they are. sentence-transformers truncates after its modules.
    """
    return normalize(vectors) if normalizes and default_dimensions is not None else vectors


def _stack_vectors(context: DecodeContext) -> NDArray[np.float32]:
    manifest = context.manifest
    rows = np.array(context.rows)
    return prepare_vectors(rows, manifest.default_dimensions, normalizes=manifest.normalize)


def compare_with_first(context: DecodeContext) -> NDArray[np.float32]:
    """Return the similarities of the first vector with each of the others, [N - 1].

    The model's manifest states whether the similarities are cosines or dot products.
    """
    vectors = _stack_vectors(context)[:, : context.manifest.default_dimensions]
    if context.manifest.similarity == "cosine":
        vectors = normalize(vectors)
    similarities: NDArray[np.float32] = vectors[1:] @ vectors[0]
    return similarities


def parse_prompted(
    inputs: str | list[str], parameters: Mapping[str, Any], manifest: ArtifactManifest
) -> TaskInput:
    """Parse the `parameters` of a task that reads texts with a prompt and has no options."""
    params = parse_parameters(SimilarityParameters, parameters)
    texts, fields, _ = as_list(inputs)
    return TaskInput(
        texts=add_prompt(texts, params.prompt_name, manifest),
        fields=fields,
        options=None,
        truncation=params.choose_truncation(manifest),
    )


def _select_prompt(params: EmbeddingParameters, manifest: ArtifactManifest) -> str | None:
    if params.prompt_name is not None or params.input_type is None:
        return params.prompt_name
    names = {name.lower(): name for name in manifest.prompts}
    return next((names[each] for each in _PROMPTS[params.input_type] if each in names), None)


def add_prompt(
    texts: tuple[str, ...], prompt_name: str | None, manifest: ArtifactManifest
) -> tuple[str, ...]:
    """Prepend the model's prompt `prompt_name` to `texts`; None selects the default prompt.

    Raises InvalidField for an unknown name.
    """
    name = manifest.default_prompt if prompt_name is None else prompt_name
    if name is None:
        return texts
    if name not in manifest.prompts:
        known = ", ".join(f"`{key}`" for key in manifest.prompts) or "none"
        raise InvalidField(
            f"`parameters.prompt_name` is `{name}`; the model has the prompts: {known}",
            field="parameters.prompt_name",
        )
    return tuple(manifest.prompts[name] + text for text in texts)
