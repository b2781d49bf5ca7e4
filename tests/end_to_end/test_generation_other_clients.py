"""Generation with clients of a second environment: old hub, TGI, Anthropic, LangChain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.client_environment import run_client, run_old_hub
from tests.support.ray_cluster import Cluster
from tests.support.served_models import (
    EMBEDDER,
    FIXED_PROMPT,
    FIXED_TEXT_MODEL,
    NUMBER_WORDS,
    SAYS,
    WRITER,
)


def tgi(cluster: Cluster, path: str, method: str, **arguments: Any) -> Any:
    return run_client("tgi.py", cluster.url + path, method, json.dumps(arguments))


def messages(cluster: Cluster, method: str, **arguments: Any) -> Any:
    user = {"role": "user", "content": "Hello"}
    fields = {"model": FIXED_TEXT_MODEL, "messages": [user], **arguments}
    return run_client("anthropic_messages.py", cluster.url, method, json.dumps(fields))


def test_anthropic_client_chats_streams_and_counts(cluster: Cluster) -> None:
    message = messages(cluster, "create", max_tokens=50, extra_body={"temperature": 0})
    assert [block["text"] for block in message["content"]] == [SAYS]
    stream = messages(cluster, "stream", max_tokens=50, extra_body={"temperature": 0})
    assert (stream["text"], stream["message"]["stop_reason"]) == (SAYS, "end_turn")
    counted = messages(cluster, "count_tokens")["input_tokens"]
    usage = message["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    named = messages(
        cluster, "request_id", max_tokens=1, extra_headers={"x-request-id": "message-1"}
    )
    assert named == "message-1"


def test_anthropic_client_lists_the_models_in_pages(cluster: Cluster) -> None:
    arguments = json.dumps({"limit": 2})
    models = run_client("anthropic_messages.py", cluster.url, "models", arguments)
    assert FIXED_TEXT_MODEL in [model["id"] for model in models]


def test_old_hub_client_returns_text(cluster: Cluster) -> None:
    response = run_old_hub(
        cluster.url,
        "text_generation",
        prompt=FIXED_PROMPT,
        model=FIXED_TEXT_MODEL,
        return_full_text=False,
    )
    assert response == SAYS


def test_old_hub_client_chats(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    response = run_old_hub(
        cluster.url, "chat_completion", messages=messages, model=FIXED_TEXT_MODEL, temperature=0.01
    )
    assert response["choices"][0]["message"]["content"] == SAYS


@pytest.mark.parametrize(
    ("method", "key"), [("summarization", "summary_text"), ("translation", "translation_text")]
)
def test_old_hub_client_finds_the_key_of_its_method(
    cluster: Cluster, method: str, key: str
) -> None:
    response = run_old_hub(cluster.url, method, text="12", model=NUMBER_WORDS)
    assert response[key] == "twelve"


def test_old_hub_client_lists_loaded_generators(cluster: Cluster) -> None:
    assert run_old_hub(cluster.url, "get_model_status", model=WRITER)["loaded"]


def test_tgi_client_returns_text(cluster: Cluster) -> None:
    path = f"/models/{FIXED_TEXT_MODEL}"
    response = tgi(
        cluster, path, "generate", prompt=FIXED_PROMPT, decoder_input_details=True, top_n_tokens=2
    )
    # On the route of one model, the generated text begins with the prompt.
    assert response["generated_text"].removeprefix(FIXED_PROMPT) == SAYS
    assert response["details"]["finish_reason"] == "eos_token"
    assert len(response["details"]["top_tokens"]) == len(response["details"]["tokens"])


@pytest.mark.parametrize(
    "path", [f"/models/{FIXED_TEXT_MODEL}", f"/models/{FIXED_TEXT_MODEL}/generate_stream"]
)
def test_tgi_client_reads_a_stream(cluster: Cluster, path: str) -> None:
    events = tgi(cluster, path, "generate_stream", prompt=FIXED_PROMPT)
    assert "".join(event["token"]["text"] for event in events) == SAYS
    assert events[-1]["generated_text"].endswith(SAYS)


def test_tgi_client_chats(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    response = tgi(
        cluster, f"/models/{FIXED_TEXT_MODEL}", "chat", messages=messages, temperature=0.01
    )
    assert response["choices"][0]["message"]["content"] == SAYS


def test_tgi_client_raises_errors(cluster: Cluster) -> None:
    long = tgi(cluster, f"/models/{FIXED_TEXT_MODEL}", "generate", prompt="word " * 2_000)
    assert long["raised"] == "ValidationError"
    assert "tokens" in long["message"]
    missing = tgi(cluster, "/models/nobody/nothing/generate", "generate", prompt="a")
    assert "nobody/nothing does not exist" in missing["message"]
    wrong = tgi(cluster, f"/models/{EMBEDDER}/generate", "generate", prompt="a")
    assert wrong["raised"] == "GenerationError"
    assert "generates no text" in wrong["message"]


def test_langchain_chats(cluster: Cluster) -> None:
    settings = {"model": FIXED_TEXT_MODEL, "temperature": 0}
    response = run_client("langchain_chat.py", f"{cluster.url}/v1", json.dumps(settings), "Hello")
    assert response["whole"] == SAYS
    assert "".join(response["streamed"]) == SAYS
