"""token-embeddings: one vector per token of each text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters
from deployments.tasks.embedding import SimilarityParameters, parse_prompted
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many


class TokenEmbeddings(Task):
    """Task that returns the last hidden state before pooling, float32 [T, W] per text."""

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
        return parse_prompted(self.inputs.read(inputs), parameters, manifest)

    def decode(self, context: DecodeContext, options: None) -> list[NDArray[np.float32]]:
        """Return a list of arrays, even for one text.

        The vectors are not normalized, and those of special tokens are included.
        """
        # Copy the rows, because they are views that keep the padded batch in memory.
        return [np.array(row) for row in context.rows]
