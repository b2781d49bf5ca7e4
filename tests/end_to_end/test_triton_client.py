"""Unmodified Triton client: the Open Inference Protocol, by default with binary tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from tests.support.ray_cluster import Cluster
from tests.support.served_models import CLASSIFIER, DAMAGED, EMBEDDER, NLI_MODEL, QA_MODEL, SOUND
from tests.support.vectors import is_same_embedding

TEXTS = ["a gorgeous, witty film", "a dull one, żółć 🚂"]


@pytest.fixture
def triton(cluster: Cluster) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(cluster.url.removeprefix("http://")) as client:
        yield client


def texts_input(name: str, texts: Sequence[str], *, binary: bool = True) -> InferInput:
    """Return the texts as a BYTES tensor [len(texts), 1]."""
    tensor = InferInput(name, [len(texts), 1], "BYTES")
    values = np.array([text.encode() for text in texts], dtype=object).reshape(-1, 1)
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


def version_of(triton: InferenceServerClient, model: str) -> str:
    version: str = triton.get_model_metadata(model)["versions"][0]
    return version


def test_server_and_models_are_live_and_ready(triton: InferenceServerClient) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert all(triton.is_model_ready(model) for model in SOUND)
    assert triton.is_model_ready(EMBEDDER, version_of(triton, EMBEDDER))
    assert not triton.is_model_ready(EMBEDDER, "9")
    assert not triton.is_model_ready(DAMAGED)
    assert not triton.is_model_ready("nobody/nothing")


def test_server_and_models_have_metadata(triton: InferenceServerClient) -> None:
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    response = triton.get_model_metadata(EMBEDDER)
    assert response["name"] == EMBEDDER
    assert [(t["name"], t["datatype"]) for t in response["inputs"]] == [("text", "BYTES")]
    assert [(t["name"], t["datatype"]) for t in response["outputs"]] == [("embedding", "FP32")]
    assert triton.get_model_config(EMBEDDER)["max_batch_size"] > 1
    version = version_of(triton, EMBEDDER)
    assert triton.get_model_metadata(EMBEDDER, version) == response
    assert triton.get_model_config(EMBEDDER, version)["name"] == EMBEDDER


def test_index_has_every_model_and_its_state(triton: InferenceServerClient) -> None:
    index = {entry["name"]: entry for entry in triton.get_model_repository_index()}
    assert {name for name, entry in index.items() if entry["state"] == "READY"} >= {*SOUND}
    assert index[DAMAGED]["state"] == "UNAVAILABLE"
    assert "tokenizer.json" in index[DAMAGED]["reason"]


def test_models_are_loaded_and_pinned_ones_stay(triton: InferenceServerClient) -> None:
    triton.load_model(EMBEDDER)
    with pytest.raises(InferenceServerException, match="nobody/nothing does not exist"):
        triton.load_model("nobody/nothing")
    with pytest.raises(InferenceServerException, match=r"tokenizer\.json"):
        triton.load_model(DAMAGED)
    with pytest.raises(InferenceServerException, match="stays loaded"):
        triton.unload_model(EMBEDDER)
    assert triton.is_model_ready(EMBEDDER)


def test_statistics_count_inferences(triton: InferenceServerClient) -> None:
    def counted() -> int:
        (one,) = triton.get_inference_statistics(CLASSIFIER)["model_stats"]
        count: int = one["inference_count"]
        return count

    before = counted()
    triton.infer(CLASSIFIER, [texts_input("text", TEXTS)])
    assert counted() == before + len(TEXTS)
    everything = triton.get_inference_statistics()["model_stats"]
    assert {one["name"] for one in everything} == {*SOUND}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["text", "args", "input-0"])
def test_texts_return_embeddings(
    cluster: Cluster, triton: InferenceServerClient, name: str, binary: bool
) -> None:
    result = triton.infer(
        EMBEDDER,
        [texts_input(name, TEXTS, binary=binary)],
        outputs=[InferRequestedOutput("embedding", binary_data=binary)],
        request_id="42",
    )
    rows = result.as_numpy("embedding")
    assert (rows.dtype, rows.shape) == (np.float32, (2, 384))
    hubs = InferenceClient(f"{cluster.url}/models/{EMBEDDER}").feature_extraction(TEXTS)
    assert all(map(is_same_embedding, rows, hubs))
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("42", EMBEDDER)
    assert response["model_version"] == version_of(triton, EMBEDDER)


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests_are_supported(triton: InferenceServerClient, compression: str) -> None:
    given = [texts_input("text", TEXTS)]
    plain = triton.infer(EMBEDDER, given).as_numpy("embedding")
    squeezed = triton.infer(
        EMBEDDER,
        given,
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    assert all(map(is_same_embedding, squeezed.as_numpy("embedding"), plain))


def test_version_is_supported(triton: InferenceServerClient) -> None:
    version = version_of(triton, EMBEDDER)
    result = triton.infer(EMBEDDER, [texts_input("text", TEXTS)], model_version=version)
    assert result.get_response()["model_version"] == version


def test_texts_are_classified(triton: InferenceServerClient) -> None:
    result = triton.infer(CLASSIFIER, [texts_input("text", TEXTS)], parameters={"top_k": 1})
    assert result.as_numpy("label").tolist() == [[b"POSITIVE"], [b"NEGATIVE"]]
    assert (result.as_numpy("score") > 0.5).all()


def test_candidate_labels_are_a_tensor(triton: InferenceServerClient) -> None:
    labels = InferInput("candidate_labels", [2], "BYTES")
    labels.set_data_from_numpy(np.array([b"film", b"food"], dtype=object))
    result = triton.infer(NLI_MODEL, [texts_input("text", TEXTS), labels])
    assert {*result.as_numpy("label")[0]} == {b"film", b"food"}
    assert result.as_numpy("score").sum(axis=1) == pytest.approx(1)


def test_questions_are_json_rows(triton: InferenceServerClient) -> None:
    context = "The lighthouse on Gull Point was built in 1871 from grey granite."
    question = "When was the lighthouse on Gull Point built?"
    tensors = [texts_input("question", [question]), texts_input("context", [context])]
    output = triton.infer(QA_MODEL, tensors).as_numpy("output")
    assert output.shape == (1, 1)
    answer = json.loads(output[0, 0])
    assert answer["answer"] == "1871" == context[answer["start"] : answer["end"]]


def test_concurrent_requests_are_answered(triton: InferenceServerClient, cluster: Cluster) -> None:
    with InferenceServerClient(cluster.url.removeprefix("http://"), concurrency=4) as client:
        pending = [client.async_infer(EMBEDDER, [texts_input("text", [t])]) for t in TEXTS * 2]
        rows = [one.get_result().as_numpy("embedding")[0] for one in pending]
    assert is_same_embedding(rows[0], rows[2])
    assert not is_same_embedding(rows[0], rows[1])


@pytest.mark.parametrize(
    ("model", "name", "asked", "sentence"),
    [
        ("nobody/nothing", "text", {}, "404.*nobody/nothing does not exist"),
        (DAMAGED, "text", {}, "503.*tokenizer.json"),
        (EMBEDDER, "text", {"model_version": "9"}, "404.*no version `9`"),
        (EMBEDDER, "text", {"parameters": {"dimensions": 0}}, "400.*dimensions"),
        (EMBEDDER, "text", {"outputs": [InferRequestedOutput("logits")]}, "400.*logits"),
        (QA_MODEL, "text", {}, "400.*question"),
    ],
)
def test_errors_have_status_and_message(
    triton: InferenceServerClient, model: str, name: str, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InferenceServerException, match=sentence) as refused:
        triton.infer(model, [texts_input(name, TEXTS)], **asked)
    assert refused.value.status() == sentence[:3]
