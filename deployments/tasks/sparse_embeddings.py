"""sparse-embeddings: weights of the vocabulary's tokens for each text, by a SPLADE model.

SPLADE: Formal et al., "SPLADE v2: Sparse Lexical and Expansion Model for Information Retrieval"
(2021). Search engines compare such vectors by dot product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead, TaskName
from deployments.errors import InputTooLong
from deployments.tasks.base import DecodeContext, Task, TaskInput, TextParameters
from deployments.tasks.embedding import SimilarityParameters, parse_prompted
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many

# Limit of the weights in one response: 16 MB as JSON, 35 MB in the format of
# text-embeddings-inference. A SPLADE vector has a few hundred weights, but that of a masked
# language model without this training has ten thousand.
MAX_WEIGHTS = 1 << 20
# Seconds of `decode` per vocabulary entry: 15 us per text for BERT, 30 us with 10,000 weights.
_ENTRY_S = 1e-9


class SparseVector(TypedDict):
    """Token ids in ascending order, and the weight of each."""

    indices: list[int]
    values: list[float]


class SparseEmbeddings(Task):
    """Task that returns weights of vocabulary tokens for every text, as token ids and values."""

    name: ClassVar = TaskName.SPARSE_EMBEDDINGS
    head: ClassVar = ModelHead.SPARSE
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = SimilarityParameters
    response_type: ClassVar[Any] = list[SparseVector]
    example: ClassVar[Mapping[str, Any]] = {"inputs": ["A cat."]}

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        return parse_prompted(self.inputs.read(inputs), parameters, manifest)

    def decode(self, context: DecodeContext, options: None) -> list[dict[str, NDArray[Any]]]:
        """Return a list of SparseVector, even for one text, with arrays of int32 and float32.

        Raises InputTooLong if the response would exceed MAX_WEIGHTS.
        """
        weights = sum(int(np.count_nonzero(row > 0)) for row in context.rows)
        if weights > MAX_WEIGHTS:
            raise InputTooLong(
                f"the vectors of `inputs` have {weights} weights; the maximum is {MAX_WEIGHTS}. "
                "Send fewer or shorter texts.",
                field="inputs",
            )
        return [_select_weights(row) for row in context.rows]

    def predict_decode_s(self, context: DecodeContext, options: None) -> float:
        return _ENTRY_S * sum(row.size for row in context.rows)


def _select_weights(row: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    indices = np.flatnonzero(row > 0)  # a comparison first is eight times as fast
    return {"indices": indices.astype(np.int32), "values": row[indices]}
