"""Invalid `infer` requests and their error responses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import IngressUserConfig, LimitSettings
from tests.support.artifacts import EMBEDDER
from tests.support.in_process import InProcess

LENGTH = "inference-header-content-length"
PATH = f"/v2/models/{EMBEDDER}/infer"
TOO_LONG = "good " * 20  # 22 tokens; the maximum is 16


def message(**changes: Any) -> dict[str, Any]:
    return {"inputs": [tensor()], **changes}


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["good"], **changes}


WRONG: dict[str, Any] = {
    "not json": b"{",
    "not an object": [],
    "no inputs": {},
    "empty inputs": {"inputs": []},
    "inputs of a wrong type": {"inputs": {"text": "good"}},
    "no shape": {"inputs": [{"name": "text", "datatype": "BYTES", "data": ["good"]}]},
    "a wrong datatype": message(inputs=[tensor(datatype="STRING")]),
    "a negative shape": message(inputs=[tensor(shape=[-1])]),
    "a boolean shape": message(inputs=[tensor(shape=[True])]),
    "a fraction as shape": message(inputs=[tensor(shape=[1.0])]),
    "a huge shape": message(inputs=[tensor(shape=[1 << 62] * 8)]),
    "no data": message(inputs=[tensor(data=None)]),
    "too few data": message(inputs=[tensor(shape=[2])]),
    "data of a wrong type": message(inputs=[tensor(data=[7])]),
    "numbers as text": message(inputs=[tensor(datatype="INT32", data=[7])]),
    "the same input twice": message(inputs=[tensor(), tensor()]),
    "an unknown input": message(inputs=[tensor(), tensor(name="poem")]),
    "an empty text": message(inputs=[tensor(data=[""])]),
    "no texts": message(inputs=[tensor(shape=[0], data=[])]),
    "too many texts": message(inputs=[tensor(shape=[5], data=["a"] * 5)]),
    "a text too long": message(inputs=[tensor(data=[TOO_LONG])], parameters={"truncate": False}),
    "shared memory": message(inputs=[tensor(parameters={"shared_memory_region": "r"})]),
    "binary data that is not there": message(
        inputs=[tensor(data=None, parameters={"binary_data_size": 8})]
    ),
    "data twice": message(inputs=[tensor(parameters={"binary_data_size": 0})]),
    "a negative size": message(inputs=[tensor(data=None, parameters={"binary_data_size": -1})]),
    "a size of a wrong type": message(
        inputs=[tensor(data=None, parameters={"binary_data_size": True})]
    ),
    "an unknown parameter": message(parameters={"poem": 1}),
    "a parameter of a wrong type": message(parameters={"normalize": "yes"}),
    "an option of a wrong type": message(parameters={"use_gpu": "yes"}),
    "hardware that is not there": message(parameters={"hardware": "gpu"}),
    "a flag of a wrong type": message(parameters={"binary_data_output": "yes"}),
    "an unknown task": message(parameters={"task": "poetry"}),
    "a task of a wrong type": message(parameters={"task": ["poetry"]}),
    "a task of other models": message(parameters={"task": "fill-mask"}),
    "an id of a wrong type": message(id=7),
    "an unknown output": message(outputs=[{"name": "poem"}]),
    "an output twice": message(outputs=[{"name": "embedding"}] * 2),
    "classification": message(outputs=[{"name": "embedding", "parameters": {"classification": 2}}]),
    "shared memory out": message(
        outputs=[{"name": "embedding", "parameters": {"shared_memory_region": "r"}}]
    ),
    "a wrong flag out": message(outputs=[{"name": "embedding", "parameters": {"binary_data": 1}}]),
}


async def test_invalid_requests_return_an_error_string(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(items=4))
    async with InProcess(tiny_store, settings=settings).client() as http:
        for name, body in WRONG.items():
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await http.post(PATH, content=raw)
            assert response.status_code == 400, f"{name}: {response.text}"
            assert isinstance(response.json()["error"], str), name
        assert (await http.post(PATH, json=message())).status_code == 200


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("text", ["a", ""], "`text[1]` is empty"),
        ("input-0", ["a", ""], "`input-0[1]` is empty"),
        ("args", ["a", TOO_LONG], "`args[1]`"),
        ("args", ["a"] * 5, "`args` has 5 items"),
    ],
)
async def test_errors_name_the_tensor_of_the_client(
    name: str, data: list[str], words: str, tiny_store: Path
) -> None:
    body = {
        "inputs": [tensor(name=name, shape=[len(data)], data=data)],
        "parameters": {"truncate": False},
    }
    settings = IngressUserConfig(limits=LimitSettings(items=4))
    async with InProcess(tiny_store, settings=settings).client() as http:
        response = await http.post(PATH, json=body)
    assert words in response.json()["error"]


async def test_errors_of_columns_name_the_column(tiny_store: Path) -> None:
    sentences = tensor(name="sentences", shape=[2], data=["a", ""])
    body = {"inputs": [tensor(name="source_sentence"), sentences]}
    async with InProcess(tiny_store).client() as http:
        response = await http.post(PATH, json=body)
    assert response.json()["error"] == "`sentences[1]` is empty"


JSON_PART = json.dumps(message(inputs=[tensor(data=None, parameters={"binary_data_size": 8})]))
GOOD_BINARY = struct.pack("<I", 4) + b"good"


WRONG_LENGTHS: list[tuple[str | None, bytes]] = [
    (str(len(JSON_PART)), GOOD_BINARY + b"\0"),
    (str(len(JSON_PART)), GOOD_BINARY[:-1]),
    (str(len(JSON_PART)), b""),
    (str(len(JSON_PART) - 1), GOOD_BINARY),
    (str(len(JSON_PART) + 1), GOOD_BINARY),
    (str(len(JSON_PART) + 9), GOOD_BINARY),
    ("0", GOOD_BINARY),
    ("-1", GOOD_BINARY),
    ("+12", GOOD_BINARY),
    ("1_0", GOOD_BINARY),
    ("1.5", GOOD_BINARY),
    ("", GOOD_BINARY),
    ("many", GOOD_BINARY),
    ("9" * 5_000, GOOD_BINARY),
    (None, GOOD_BINARY),
]


async def test_invalid_header_length_is_rejected(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:

        async def post(length: str | None, binary: bytes) -> httpx.Response:
            headers = {} if length is None else {LENGTH: length}
            body = JSON_PART.encode() + binary
            return await http.post(PATH, content=body, headers=headers)

        for length in (str(len(JSON_PART)), f" {len(JSON_PART)} "):
            assert (await post(length, GOOD_BINARY)).status_code == 200
        for length, binary in WRONG_LENGTHS:
            response = await post(length, binary)
            assert response.status_code == 400, f"{length} {binary!r}: {response.text}"
            assert isinstance(response.json()["error"], str)


async def test_large_body_is_413(tiny_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(body_bytes=100))
    async with InProcess(tiny_store, settings=settings).client() as http:
        response = await http.post(PATH, json=message(id="x" * 100))
    assert response.status_code == 413
    assert isinstance(response.json()["error"], str)


async def test_options_are_parameters(tiny_store: Path) -> None:
    async with InProcess(tiny_store).client() as http:
        response = await http.post(PATH, json=message(parameters={"use_cache": "no"}))
    assert "`parameters.use_cache`" in response.json()["error"]
