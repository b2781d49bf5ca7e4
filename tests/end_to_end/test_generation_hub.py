"""Generation with the client of huggingface_hub and with curl."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import jsonschema
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError

from tests.end_to_end.test_generation_openai import TALLY, USER
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER, FIXED_PROMPT, FIXED_TEXT_MODEL, SAYS, WRITER


@pytest.fixture(params=[f"/models/{FIXED_TEXT_MODEL}", f"/models/{FIXED_TEXT_MODEL}/generate"])
def error_format(request: pytest.FixtureRequest, cluster: Cluster) -> InferenceClient:
    return InferenceClient(cluster.url + request.param)


def test_text_generation_returns_text(error_format: InferenceClient) -> None:
    assert error_format.text_generation(FIXED_PROMPT, return_full_text=False) == SAYS


def test_details_are_returned(error_format: InferenceClient) -> None:
    response = error_format.text_generation(
        FIXED_PROMPT,
        details=True,
        return_full_text=False,
        decoder_input_details=True,
        top_n_tokens=2,
    )
    assert response.generated_text == SAYS
    details = response.details
    assert details is not None
    assert (details.finish_reason, details.seed) == ("eos_token", None)
    *words, end = details.tokens
    assert "".join(token.text for token in words) == SAYS
    assert [token.special for token in words] == [False] * len(words)
    assert end.special
    # At the last position the most likely token is the end-of-sequence token.
    assert details.top_tokens[-1][0]["special"]
    assert not details.top_tokens[0][0]["special"]
    assert [token.text for token in details.prefill] == [FIXED_PROMPT]


@pytest.mark.parametrize(
    "path", [f"/models/{FIXED_TEXT_MODEL}", f"/models/{FIXED_TEXT_MODEL}/generate_stream"]
)
def test_stream_has_an_event_per_token(cluster: Cluster, path: str) -> None:
    client = InferenceClient(cluster.url + path)
    assert "".join(client.text_generation(FIXED_PROMPT, stream=True)) == SAYS
    *_, last = client.text_generation(
        FIXED_PROMPT, stream=True, details=True, return_full_text=False
    )
    assert last.generated_text == SAYS
    assert last.details is not None
    assert last.details.finish_reason == "eos_token"


@pytest.mark.parametrize(
    "path", ["/v1", f"/models/{FIXED_TEXT_MODEL}", f"/models/{FIXED_TEXT_MODEL}/v1"]
)
def test_chat_is_answered_with_and_without_stream(cluster: Cluster, path: str) -> None:
    client = InferenceClient(base_url=cluster.url + path)
    response = client.chat_completion([USER], model=FIXED_TEXT_MODEL, temperature=0)
    assert response.choices[0].message.content == SAYS
    stream = client.chat_completion([USER], model=FIXED_TEXT_MODEL, temperature=0, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == SAYS


def test_output_follows_schema_and_grammar(cluster: Cluster) -> None:
    chat = InferenceClient(base_url=f"{cluster.url}/v1")
    form: Any = {"type": "json_schema", "json_schema": {"name": "tally", "schema": TALLY}}
    response = chat.chat_completion([USER], model=WRITER, seed=4, response_format=form)
    jsonschema.validate(json.loads(response.choices[0].message.content or ""), TALLY)
    writer = InferenceClient(f"{cluster.url}/models/{WRITER}")
    dated = writer.text_generation(
        "On ",
        do_sample=True,
        seed=4,
        return_full_text=False,
        grammar={"type": "regex", "value": "[0-9]{4}-[0-9]{2}"},
    )
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", dated)


def test_errors_have_their_exception_types(cluster: Cluster) -> None:
    writer = InferenceClient(f"{cluster.url}/models/{WRITER}")
    with pytest.raises(ValidationError, match=r"parameters\.temperature"):
        writer.text_generation("a", temperature=-1.0)
    missing = InferenceClient(f"{cluster.url}/models/nobody/nothing")
    with pytest.raises(HfHubHTTPError, match="nobody/nothing does not exist"):
        missing.text_generation("a")
    with pytest.raises(HfHubHTTPError, match="generates no text"):
        InferenceClient(base_url=f"{cluster.url}/v1").chat_completion([USER], model=EMBEDDER)


def curl(cluster: Cluster, path: str, body: Any) -> str:
    done = subprocess.run(
        ["curl", "-sSN", "--fail-with-body", "-d", json.dumps(body), cluster.url + path],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_curl_returns_generated_text(cluster: Cluster) -> None:
    body = {"inputs": FIXED_PROMPT, "model": FIXED_TEXT_MODEL, "parameters": {"max_new_tokens": 20}}
    assert json.loads(curl(cluster, "/generate", body)) == {"generated_text": SAYS}
    assert json.loads(curl(cluster, f"/models/{FIXED_TEXT_MODEL}", body)) == [
        {"generated_text": FIXED_PROMPT + SAYS}
    ]


@pytest.mark.parametrize(
    "path", ["/generate_stream", f"/models/{FIXED_TEXT_MODEL}/generate_stream"]
)
def test_curl_reads_events(cluster: Cluster, path: str) -> None:
    response = curl(cluster, path, {"inputs": FIXED_PROMPT, "model": FIXED_TEXT_MODEL})
    events = [json.loads(line.removeprefix("data:")) for line in response.split("\n\n") if line]
    assert "".join(event["token"]["text"] for event in events) == SAYS
    assert events[-1]["generated_text"] == SAYS
