"""feature-extraction and sentence-similarity: texts to vectors, and vectors compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deployments.errors import InvalidField
from deployments.manifest import ArtifactManifest, TaskName
from deployments.tasks.base import (
    TaskInput,
    TextParameters,
    item_fields,
    non_empty_text,
    normalised,
    parse_parameters,
    text_list,
)


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


class FeatureExtraction:
    """Embeddings, float32 [items, dimensions]."""

    name: ClassVar = TaskName.FEATURE_EXTRACTION
    parameters: ClassVar[type[TextParameters]] = EmbeddingParameters

    def claims(self, inputs: Any) -> bool:
        """Never by shape: texts fit many tasks."""
        return False

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        asked = parse_parameters(EmbeddingParameters, parameters)
        texts, single = text_list(inputs, "inputs")
        dimensions = asked.dimensions or manifest.width
        if dimensions > manifest.width:
            raise InvalidField(
                f"`parameters.dimensions` is {dimensions}, the model has {manifest.width}",
                field="parameters.dimensions",
            )
        normalize = manifest.normalize if asked.normalize is None else asked.normalize
        return TaskInput(
            texts=with_prompt(texts, asked.prompt_name, manifest),
            fields=item_fields("inputs", len(texts), single=single),
            options=EmbeddingOptions(normalize, dimensions),
            truncation=asked.truncation,
        )

    def decode(
        self,
        answers: Sequence[NDArray[np.float32]],
        options: EmbeddingOptions,
        manifest: ArtifactManifest,
    ) -> NDArray[np.float32]:
        """A list of vectors, also for one text: the shape every client version reads.

        Cut to the dimensions asked for, then scaled: a cut vector is scaled anew.
        """
        cut = np.stack(answers)[:, : options.dimensions]
        # Contiguous, because the JSON encoder and the wire copy whole buffers.
        return normalised(cut) if options.normalize else np.ascontiguousarray(cut)


class SentenceSimilarity:
    """Cosine similarity of one sentence with each of several."""

    name: ClassVar = TaskName.SENTENCE_SIMILARITY
    parameters: ClassVar[type[TextParameters]] = SimilarityParameters

    def claims(self, inputs: Any) -> bool:
        """An object with `source_sentence` or `sentences`."""
        return isinstance(inputs, dict) and bool({"source_sentence", "sentences"} & set(inputs))

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: {"source_sentence": text, "sentences": [text, ...]}."""
        asked = parse_parameters(SimilarityParameters, parameters)
        if not isinstance(inputs, dict):
            raise InvalidField(
                "`inputs` must be an object with `source_sentence` and `sentences`", field="inputs"
            )
        for key in ("source_sentence", "sentences"):
            if key not in inputs:
                path = f"inputs.{key}"
                raise InvalidField(f"Error in `{path}`: field required", field=path)
        source = non_empty_text(inputs["source_sentence"], "inputs.source_sentence")
        path = "inputs.sentences"
        if isinstance(inputs["sentences"], str):
            raise InvalidField(f"`{path}` must be a list of strings", field=path)
        sentences, _ = text_list(inputs["sentences"], path)
        return TaskInput(
            texts=with_prompt((source, *sentences), asked.prompt_name, manifest),
            fields=(
                "inputs.source_sentence",
                *item_fields(path, len(sentences), single=False),
            ),
            options=None,
            truncation=asked.truncation,
        )

    def decode(
        self, answers: Sequence[NDArray[np.float32]], options: None, manifest: ArtifactManifest
    ) -> list[float]:
        """Cosine of the first vector with each of the others."""
        units = normalised(np.stack(answers))
        return [float(cosine) for cosine in units[1:] @ units[0]]


def with_prompt(
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
