"""token-embeddings: texts to a vector for each of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters, as_list
from deployments.tasks.embedding import SimilarityParameters, add_prompt
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many, parse_parameters


class TokenEmbeddings(Task):
    """The model's last hidden state, which embeddings are pooled from: float32 [T, W] per text."""

    name: ClassVar = TaskName.TOKEN_EMBEDDINGS
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = SimilarityParameters
    response_type: ClassVar[Any] = list[list[list[float]]]
    example: ClassVar[Mapping[str, Any]] = {"inputs": ["A cat."]}
    unpooled: ClassVar = True

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        """`inputs`: a text or a list of texts."""
        params = parse_parameters(SimilarityParameters, parameters)
        texts, fields, _ = as_list(self.inputs.read(inputs))
        return TaskInput(
            texts=add_prompt(texts, params.prompt_name, manifest),
            fields=fields,
            options=None,
            truncation=params.truncation,
        )

    def decode(self, context: DecodeContext, options: None) -> list[NDArray[np.float32]]:
        """A list of texts, also for one, of as many vectors as each has tokens.

        Not scaled, special tokens included.
        """
        # Copied: rows are views that would keep the padding of the whole batch alive.
        return [np.array(row) for row in context.rows]
