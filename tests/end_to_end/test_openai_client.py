"""openai's client, unmodified: embeddings and the list of models."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from openai import (
    AsyncOpenAI,
    BadRequestError,
    NotFoundError,
    OpenAI,
)
from tokenizers import Tokenizer

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.artifacts.store import find_artifact
from tests.support.ray_cluster import Cluster
from tests.support.served_models import CLASSIFIER, DAMAGED, EMBEDDER, SOUND
from tests.support.vectors import is_same_embedding

TEXT = "The same sentence through two doors."


@pytest.fixture
def openai(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(cluster: Cluster) -> Tokenizer:
    path = find_artifact(cluster.store, EMBEDDER) / TOKENIZER_NAME
    return Tokenizer.from_file(str(path))


def embedding(client: OpenAI, given: str | list[int]) -> list[float]:
    return client.embeddings.create(model=EMBEDDER, input=given).data[0].embedding


def test_embedding_equals_that_of_the_hub_client(cluster: Cluster, openai: OpenAI) -> None:
    mine = openai.embeddings.create(model=EMBEDDER, input=TEXT)
    hubs = InferenceClient(f"{cluster.url}/models/{EMBEDDER}").feature_extraction(TEXT)[0]
    assert mine.usage.prompt_tokens == 9
    assert is_same_embedding(mine.data[0].embedding, hubs)


def test_float_and_base64_embeddings_are_equal(openai: OpenAI) -> None:
    create = openai.embeddings.create
    floats = create(model=EMBEDDER, input=TEXT, encoding_format="float").data[0].embedding
    # For base64 the client returns a string, although its type hint says list[float].
    packed: Any = create(model=EMBEDDER, input=TEXT, encoding_format="base64").data[0].embedding
    assert isinstance(packed, str)
    unpacked = np.frombuffer(base64.b64decode(packed), dtype="<f4")
    assert unpacked == pytest.approx(floats, abs=1e-6)
    assert is_same_embedding(embedding(openai, TEXT), floats)


def test_dimensions_truncate_the_embedding(openai: OpenAI) -> None:
    reply = openai.embeddings.create(model=EMBEDDER, input=["a", "b"], dimensions=64)
    assert [item.index for item in reply.data] == [0, 1]
    assert [len(item.embedding) for item in reply.data] == [64, 64]
    assert np.linalg.norm(reply.data[0].embedding) == pytest.approx(1, abs=1e-4)


def test_token_ids_equal_their_text(openai: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    due = embedding(openai, TEXT)
    assert is_same_embedding(embedding(openai, ids), due)
    several = openai.embeddings.create(model=EMBEDDER, input=[ids, ids[:3]]).data
    assert is_same_embedding(several[0].embedding, due)
    assert not is_same_embedding(several[1].embedding, due)
    with pytest.raises(BadRequestError, match="99999"):
        embedding(openai, [5, 99999])


@pytest.mark.parametrize("path", ["", f"/models/{EMBEDDER}/v1"])
def test_embeddings_are_served_on_other_routes(cluster: Cluster, openai: OpenAI, path: str) -> None:
    other = OpenAI(base_url=cluster.url + path, api_key="unused", max_retries=0)
    assert is_same_embedding(embedding(other, TEXT), embedding(openai, TEXT))


async def test_asynchronous_client_embeds_and_lists_models(cluster: Cluster) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        reply = await client.embeddings.create(model=EMBEDDER, input=[TEXT] * 3)
        listed = [model.id async for model in client.models.list()]
    assert len(reply.data) == 3
    assert EMBEDDER in listed


def test_models_are_listed_and_retrieved(openai: OpenAI) -> None:
    listed = {model.id for model in openai.models.list()}
    assert listed == {*SOUND, DAMAGED}
    assert openai.models.retrieve(EMBEDDER).owned_by == "sentence-transformers"
    with pytest.raises(NotFoundError, match="nobody/nothing does not exist") as missing:
        openai.models.retrieve("nobody/nothing")
    assert missing.value.code == "model_not_found"


def test_errors_have_their_exception_types(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody/nothing does not exist") as missing:
        openai.embeddings.create(model="nobody/nothing", input="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(BadRequestError, match="`input` is an empty list") as refused:
        openai.embeddings.create(model=EMBEDDER, input=[])
    assert refused.value.param == "input"
    with pytest.raises(BadRequestError, match=CLASSIFIER):
        openai.embeddings.create(model=CLASSIFIER, input="a")


@pytest.mark.parametrize("path", ["/v1", f"/models/{EMBEDDER}/v1"])
def test_generation_is_rejected_for_encoders(cluster: Cluster, path: str) -> None:
    client = OpenAI(base_url=cluster.url + path, api_key="unused", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    with pytest.raises(BadRequestError, match="generates no text"):
        client.chat.completions.create(model=EMBEDDER, messages=messages)
    with pytest.raises(BadRequestError, match="generates no text"):
        client.completions.create(model=EMBEDDER, prompt="Hello")
