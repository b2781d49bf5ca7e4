"""`/embed_sparse` of text-embeddings-inference, and SPLADE models in the other APIs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from deployments.artifacts.types import TaskName
from deployments.ingress.apis.text_embeddings.schemas import encode_sparse_vectors
from tests.support.all_models import SPLADE_MODEL, seal_token_model
from tests.support.artifacts import EMBEDDER, seal_tiny
from tests.support.in_process import InProcess

MODELS = (EMBEDDER, SPLADE_MODEL)
PATHS = ("/embed_sparse", f"/models/{SPLADE_MODEL}/embed_sparse")
TOO_LONG = "good " * 20  # 22 tokens; the maximum is 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("sparse")
    seal_tiny(store, EMBEDDER)
    seal_token_model(store, SPLADE_MODEL, TaskName.SPARSE_EMBEDDINGS)
    return store


async def ask(store: Path, path: str, body: Any, models: tuple[str, ...] = MODELS) -> Any:
    async with InProcess(store, models=models).client() as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("inputs", "texts"),
    [("good film", 1), (["good film", "night", "a train"], 3), ([5, 6], 1), (["a", [5]], 2)],
)
async def test_each_text_gets_its_nonzero_weights(
    path: str, inputs: Any, texts: int, store: Path
) -> None:
    async with InProcess(store, models=MODELS).client() as http:
        response = await http.post(path, json={"inputs": inputs, "normalize": True})
        again = await http.post(path, json={"inputs": inputs})
    vectors = response.json()
    assert len(vectors) == texts
    for vector in vectors:
        indices = [pair["index"] for pair in vector]
        assert indices == sorted(set(indices))
        assert all(set(pair) == {"index", "value"} and pair["value"] > 0 for pair in vector)
    assert any(vectors)
    assert response.headers["x-compute-type"] == "cpu-fp32"
    assert again.headers["x-cache"] == "hit"
    assert again.json() == vectors


async def test_weights_are_those_of_the_task(store: Path) -> None:
    texts = ["good film", "night"]
    async with InProcess(store, models=MODELS).client() as http:
        pairs = (await http.post("/embed_sparse", json={"inputs": texts})).json()
        native = (await http.post(f"/models/{SPLADE_MODEL}", json={"inputs": texts})).json()
        tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": texts}
        open_path = f"/v2/models/{SPLADE_MODEL}/infer"
        (output,) = (await http.post(open_path, json={"inputs": [tensor]})).json()["outputs"]
    assert [orjson.loads(row) for row in output["data"]] == native
    for vector, weights in zip(pairs, native, strict=True):
        assert [pair["index"] for pair in vector] == weights["indices"]
        assert [pair["value"] for pair in vector] == weights["values"]


def test_values_of_one_text_are_in_memory_at_a_time() -> None:
    weights = 2_000
    blocks: list[int] = []

    def vectors() -> Iterator[dict[str, Any]]:
        for _ in range(4):
            yield {
                "indices": np.arange(weights, dtype=np.int32),
                "values": np.ones(weights, np.float32),
            }
            blocks.append(sys.getallocatedblocks())

    assert len(orjson.loads(encode_sparse_vectors(vectors()))) == 4
    assert blocks[-1] - blocks[0] < weights


async def test_weights_do_not_depend_on_the_other_texts(store: Path) -> None:
    texts = ["good film", "night", "the river and the city"]
    async with InProcess(store, models=MODELS).client() as http:
        batched = (await http.post("/embed_sparse", json={"inputs": texts})).json()
        alone = [(await http.post("/embed_sparse", json={"inputs": t})).json()[0] for t in texts]
    for ours, theirs in zip(batched, alone, strict=True):
        assert [pair["index"] for pair in ours] == [pair["index"] for pair in theirs]
        values = [[pair["value"] for pair in vector] for vector in (ours, theirs)]
        np.testing.assert_allclose(*values, atol=1e-6)


async def test_long_texts_are_truncated_unless_disabled(store: Path) -> None:
    async with InProcess(store, models=MODELS).client() as http:
        cut = await http.post("/embed_sparse", json={"inputs": "night " + TOO_LONG})
        ends = [
            (await http.post("/embed_sparse", json={"inputs": "night " + TOO_LONG, **more})).json()
            for more in ({"truncation_direction": "Right"}, {"truncation_direction": "Left"})
        ]
        refused = await http.post("/embed_sparse", json={"inputs": TOO_LONG, "truncate": False})
    assert cut.headers["x-hf-warning"].startswith("input-truncated")
    assert ends[0] == cut.json() != ends[1]
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


async def test_prompt_precedes_the_text(store: Path) -> None:
    server = InProcess(store, models=MODELS)
    async with server.client() as http:
        server.pipeline.permitted.find(SPLADE_MODEL).manifest.prompts["query"] = "night "
        prompted = await http.post("/embed_sparse", json={"inputs": "film", "prompt_name": "query"})
        written = await http.post("/embed_sparse", json={"inputs": "night film"})
        unknown = await http.post("/embed_sparse", json={"inputs": "film", "prompt_name": "poem"})
    assert prompted.json() == written.json()
    assert (unknown.status_code, unknown.json()["error_type"]) == (422, "Validation")


async def test_model_that_is_not_splade_is_rejected_with_the_reason(store: Path) -> None:
    named = await ask(store, f"/models/{EMBEDDER}/embed_sparse", {"inputs": "good"})
    default = await ask(store, "/embed_sparse", {"inputs": "good"}, models=(EMBEDDER,))
    for response in (named, default):
        assert (response.status_code, response.json()["error_type"]) == (424, "Backend")
        assert "`sparse-embeddings`" in response.json()["error"]
    assert EMBEDDER in named.json()["error"]
    assert "/embed" in default.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (f"/models/{SPLADE_MODEL}/embed", {"inputs": "a"}, 424),
        (f"/models/{SPLADE_MODEL}/embed_all", {"inputs": "a"}, 424),
        (f"/models/{SPLADE_MODEL}/rerank", {"query": "a", "texts": ["b"]}, 424),
        ("/v1/embeddings", {"input": "a", "model": SPLADE_MODEL}, 400),
        (f"/models/{SPLADE_MODEL}/pipeline/feature-extraction", {"inputs": "a"}, 400),
    ],
)
async def test_dense_routes_name_the_task_of_a_splade_model(
    path: str, body: dict[str, Any], status: int, store: Path
) -> None:
    response = await ask(store, path, body)
    assert response.status_code == status
    assert "Its tasks: `sparse-embeddings`" in response.text


async def test_limit_of_texts_that_the_vocabulary_sets_is_announced(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = InProcess(store, models=(SPLADE_MODEL,))
    async with server.client() as http:
        vocabulary = server.pipeline.permitted.find(SPLADE_MODEL).manifest.output_width
        monkeypatch.setattr("deployments.large_outputs.MAX_VOCABULARY_VALUES", 5 * vocabulary)
        info = (await http.get("/info")).json()
        config = (await http.get(f"/v2/models/{SPLADE_MODEL}/config")).json()
        statuses = [
            (await http.post("/embed_sparse", json={"inputs": ["night"] * texts})).status_code
            for texts in (5, 6)
        ]
    assert (info["max_client_batch_size"], config["max_batch_size"]) == (5, 5)
    assert statuses == [200, 422]


async def test_model_is_described_as_splade(store: Path) -> None:
    async with InProcess(store, models=(SPLADE_MODEL,)).client() as http:
        info = (await http.get("/info")).json()
        model = (await http.get(f"/models/{SPLADE_MODEL}")).json()
    assert info["model_type"] == {"embedding": {"pooling": "splade"}}
    assert (model["tasks"], model["similarity"]) == (["sparse-embeddings"], "dot")
