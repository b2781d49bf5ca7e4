"""Tests that all APIs serve a new task that is defined in one file and added to TASKS."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.types import Device
from deployments.messages import BatchKey, Call, CallBatch, ModelRef, Truncation
from deployments.tasks import TASKS
from deployments.transports.channel import codec
from tests.support.artifacts import EMBEDDER, tiny_manifest
from tests.support.in_process import InProcess
from tests.support.toy_task import NAME, VectorLength


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


def test_options_of_a_new_task_travel_over_channels() -> None:
    parsed = VectorLength().parse("a", {"digits": 3}, tiny_manifest())
    call = Call(parsed.texts, parsed.fields, parsed.options, Truncation.REFUSE, deadline_s=1.0)
    key = BatchKey(ModelRef(EMBEDDER, "0123456789ab"), NAME, Device.CPU, long=False)
    decoded = codec.decode_call_batch(codec.encode_call_batch(CallBatch(key, (call,)), 0.0), 0.0)
    assert decoded.calls == (call,)
