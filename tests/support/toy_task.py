"""A task that one file adds to the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.tasks import DecodeContext, Task, TaskInput
from deployments.tasks.base import TextParameters, as_list
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many, parse_parameters

NAME = "vector-length"


class RoundingParameters(TextParameters):
    digits: int | None = None


class RoundingOptions(NamedTuple):
    digits: int | None


class VectorLength(Task):
    """Task that returns the norm of the embedding of each text."""

    name: ClassVar = NAME
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = RoundingParameters
    options_type: ClassVar = RoundingOptions
    response_type: ClassVar[Any] = list[float]
    example: ClassVar[Mapping[str, Any]] = {"inputs": "A cat."}

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(RoundingParameters, parameters)
        texts, fields, _ = as_list(self.inputs.read(inputs))
        options = RoundingOptions(params.digits)
        return TaskInput(texts, fields, options, params.choose_truncation(manifest))

    def decode(self, context: DecodeContext, options: RoundingOptions) -> list[float]:
        lengths = [float((row**2).sum() ** 0.5) for row in context.rows]
        if options.digits is None:
            return lengths
        return [round(length, options.digits) for length in lengths]
