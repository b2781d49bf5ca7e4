"""A task in one file, added to TASKS, is served by every route."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import ModelHead
from deployments.tasks import TASKS, DecodeContext, Task, TaskInput
from deployments.tasks.base import TextParameters, as_list
from deployments.tasks.inputs import Inputs, NonEmptyText, one_or_many, parse_parameters
from tests.support.artifacts import EMBEDDER
from tests.support.in_process import InProcess

NAME = "vector-length"


class RoundingParameters(TextParameters):
    digits: int | None = None


class VectorLength(Task):
    """The norm of the embedding of each text."""

    name: ClassVar = NAME
    head: ClassVar = ModelHead.VECTOR
    inputs: ClassVar[Inputs[str | list[str]]] = Inputs(
        one_or_many(NonEmptyText), "a string or a list of strings"
    )
    parameters: ClassVar[type[TextParameters]] = RoundingParameters
    response_type: ClassVar[Any] = list[float]
    example: ClassVar[Mapping[str, Any]] = {"inputs": "A cat."}

    def parse(
        self, inputs: Any, parameters: Mapping[str, Any], manifest: ArtifactManifest
    ) -> TaskInput:
        params = parse_parameters(RoundingParameters, parameters)
        texts, fields, _ = as_list(self.inputs.read(inputs))
        return TaskInput(texts, fields, params.digits, params.truncation)

    def decode(self, context: DecodeContext, options: int | None) -> list[float]:
        lengths = [float((row**2).sum() ** 0.5) for row in context.rows]
        return [round(length, options) for length in lengths] if options else lengths


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, NAME, VectorLength())


async def test_new_task_answers_on_the_hugging_face_routes(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as client:
        body = {"inputs": ["a cat", "a dog"], "parameters": {"digits": 3}}
        response = await client.post(f"/pipeline/{NAME}/{EMBEDDER}", json=body)
        assert response.status_code == 200, response.text
        lengths = response.json()
        assert len(lengths) == 2
        assert all(length > 0 for length in lengths)
        assert lengths == [round(length, 3) for length in lengths]
        wrong = await client.post(f"/pipeline/{NAME}/{EMBEDDER}", json={"inputs": ""})
        assert (wrong.status_code, wrong.json()["field"]) == (400, "inputs")


async def test_new_task_answers_in_tensors(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as client:
        body = {
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}],
            "parameters": {"task": NAME},
        }
        response = await client.post(f"/v2/models/{EMBEDDER}/infer", json=body)
        assert response.status_code == 200, response.text
        (output,) = response.json()["outputs"]
        assert (output["name"], output["shape"]) == ("output", [2, 1])


async def test_new_task_is_listed_with_its_model(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as client:
        metadata = (await client.get(f"/v2/models/{EMBEDDER}")).json()
        assert NAME in [task["task"] for task in metadata["tasks"]]
        unknown = await client.post(f"/pipeline/no-task/{EMBEDDER}", json={"inputs": "a"})
        assert f"`{NAME}`" in unknown.text
