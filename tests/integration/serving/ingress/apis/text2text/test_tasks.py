"""Summarization, translation and text2text-generation over HTTP with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.ingress.apis.text2text.routes import clean_up_spaces
from tests.integration.serving.ingress.apis.text2text.conftest import MODELS, OWN_WAY_SAID, PREFIX
from tests.support.encoder_decoder_artifacts import (
    SUMMARIZER,
    TRANSLATOR,
    WRITER,
    TinyEncoderDecoder,
)
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    ScriptedGenerator,
    events_in,
)

RIVER, BRIDGE = "the river rose over the road .", "a bridge was closed , and the road is open"
ROAD = "rain over the town"

TEXT_KEYS = {SUMMARIZER: "summary_text", TRANSLATOR: "translation_text", WRITER: "generated_text"}


async def post_json(http: httpx.AsyncClient, path: str, body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("model", TEXT_KEYS)
async def test_one_text_returns_a_list_of_one_object(model: str, http: httpx.AsyncClient) -> None:
    (answer,) = await post_json(http, f"/models/{model}", {"inputs": RIVER})
    assert list(answer) == [TEXT_KEYS[model]]
    assert answer[TEXT_KEYS[model]]


@pytest.mark.parametrize("path", ["/", "/v1", "/invocations"])
async def test_model_of_the_body_is_used(path: str, http: httpx.AsyncClient) -> None:
    answers = await post_json(http, path, {"inputs": RIVER, "model": TRANSLATOR})
    assert answers == await post_json(http, f"/models/{TRANSLATOR}", RIVER)


@pytest.mark.parametrize("path", ["/pipeline/{task}/{model}", "/models/{model}/pipeline/{task}"])
@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
        ("text2text-generation", "generated_text"),
    ],
)
async def test_path_task_selects_the_task(
    path: str, task: str, key: str, http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    (answer,) = await post_json(http, path.format(task=task, model=WRITER), {"inputs": RIVER})
    assert answer == {key: tiny_writer.answer(RIVER)}


async def test_records_have_the_requested_task(rewriting_store: Path) -> None:
    server = InProcess(rewriting_store, models=MODELS, generator=ScriptedGenerator())
    async with server.client() as http:
        await post_json(http, f"/pipeline/translation/{WRITER}", {"inputs": RIVER})
        await post_json(http, f"/models/{SUMMARIZER}", {"inputs": RIVER})
    assert [record.task for record in server.recorder.records] == ["translation", "summarization"]


async def test_several_texts_return_a_flat_list(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    answers = await post_json(http, f"/models/{TRANSLATOR}", {"inputs": [RIVER, BRIDGE, ROAD]})
    alone = [tiny_writer.answer(text) for text in (RIVER, BRIDGE, ROAD)]
    assert answers == [{"translation_text": text} for text in alone]
    assert len(set(alone)) == 3
    assert await post_json(http, f"/models/{TRANSLATOR}", [ROAD]) == answers[2:]


async def test_defaults_are_those_of_the_checkpoint(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    for text in (RIVER, BRIDGE, ROAD):
        (answer,) = await post_json(http, f"/models/{SUMMARIZER}", {"inputs": text})
        assert answer == {"summary_text": tiny_writer.answer(PREFIX + text, **OWN_WAY_SAID)}
    assert tiny_writer.answer(PREFIX + RIVER) != tiny_writer.answer(RIVER)


async def test_prompt_prefix_depends_on_the_task(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    path = f"/models/{SUMMARIZER}/pipeline"
    (answer,) = await post_json(http, f"{path}/text2text-generation", {"inputs": RIVER})
    assert answer == {"generated_text": tiny_writer.answer(RIVER, **OWN_WAY_SAID)}
    (first,) = await post_json(http, f"{path}/summarization", {"inputs": RIVER})
    (second,) = await post_json(http, f"{path}/summarization", {"inputs": PREFIX + RIVER})
    assert first == second, "a prefix in the input is not added again"


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3},
        {"num_beams": 3, "length_penalty": -2.0, "no_repeat_ngram_size": 2},
        {"num_beams": 2, "early_stopping": True, "min_new_tokens": 4},
        {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
        {"num_beams": 3, "repetition_penalty": 3.0, "min_new_tokens": 6},
        {"repetition_penalty": 3.0, "min_new_tokens": 6},
        {"max_length": 4, "min_length": 4},
        {"max_new_tokens": 30, "min_length": 20, "no_repeat_ngram_size": 1},
        {"min_new_tokens": 6},
    ],
)
async def test_parameters_give_the_output_of_transformers(
    arguments: dict[str, Any], http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    body = {"inputs": [RIVER, BRIDGE], "parameters": arguments}
    expected = [
        {"generated_text": tiny_writer.answer(text, **arguments)} for text in (RIVER, BRIDGE)
    ]
    assert await post_json(http, f"/models/{WRITER}", body) == expected


@pytest.mark.parametrize(
    "name", ["generate_parameters", "generation_parameters", "generate_kwargs"]
)
async def test_generate_parameters_may_be_nested(
    name: str, http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    expected = [{"generated_text": tiny_writer.answer(RIVER, num_beams=3, min_new_tokens=5)}]
    for more in (
        {"parameters": {name: {"num_beams": 3, "min_new_tokens": 5}}},
        {"parameters": {name: {"num_beams": 2, "min_new_tokens": 5}, "num_beams": 3}},
        {"parameters": {name: {"num_beams": 3, "min_new_tokens": 5}, "num_beams": None}},
        {name: {"num_beams": 3}, "min_new_tokens": 5},
    ):
        assert await post_json(http, f"/models/{WRITER}", {"inputs": RIVER, **more}) == expected


async def test_long_text_is_rejected_unless_truncation_is_set(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    long, path = " ".join([RIVER] * 9), f"/models/{TRANSLATOR}"
    for parameters in ({}, {"truncation": "do_not_truncate"}, {"truncation": False}):
        response = await http.post(path, json={"inputs": [RIVER, long], "parameters": parameters})
        assert (response.status_code, response.json()["code"]) == (422, "input_too_long")
        assert response.json()["field"] == "inputs[1]"
    ids = tiny_writer.tokenizer.encode(long).ids
    for truncation in ("longest_first", "only_first", True):
        body = {"inputs": long, "parameters": {"truncation": truncation}}
        response = await http.post(path, json=body)
        kept = tiny_writer.tokenizer.decode(ids[:23])
        assert response.json() == [{"translation_text": tiny_writer.answer(kept)}]
        assert response.headers["x-prompt-tokens"] == "24", "the end token is one of them"


async def test_do_sample_samples_tokens(http: httpx.AsyncClient) -> None:
    path = f"/models/{SUMMARIZER}"
    drawn = {"do_sample": True, "seed": 3, "temperature": 3.0, "num_return_sequences": 3}
    answers = await post_json(http, path, {"inputs": RIVER, "parameters": drawn})
    assert len({answer["summary_text"] for answer in answers}) == 3
    assert await post_json(http, path, {"inputs": RIVER, "parameters": drawn}) == answers
    both = await post_json(http, path, {"inputs": [RIVER, BRIDGE], "parameters": drawn})
    assert [len(part) for part in both] == [3, 3]
    assert both[0] == answers
    likeliest = await post_json(http, path, {"inputs": RIVER})
    for arguments in ({"do_sample": False, "temperature": 3.0}, {"temperature": 1.0}, {"top_k": 0}):
        assert await post_json(http, path, {"inputs": RIVER, "parameters": arguments}) == likeliest


async def test_token_level_parameters_disable_default_beams(
    http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    greedy = {**OWN_WAY_SAID, "num_beams": 1, "length_penalty": None}
    whole = tiny_writer.answer(PREFIX + BRIDGE, **greedy)
    assert whole != tiny_writer.answer(PREFIX + BRIDGE, **OWN_WAY_SAID)
    stop = whole[12:14]  # after the minimum of new tokens, within which stop strings have no effect
    body = {"inputs": BRIDGE, "parameters": {"stop": [stop]}}
    (answer,) = await post_json(http, f"/models/{SUMMARIZER}", body)
    assert answer == {"summary_text": whole[: whole.index(stop) + 2]}


@pytest.mark.parametrize(("no_repeat_ngram_size", "expected_size"), [(None, 0), (3, 3)])
async def test_grammar_disables_the_default_ngram_limit(
    no_repeat_ngram_size: int | None, expected_size: int, rewriting_store: Path
) -> None:
    generator = ScriptedGenerator()
    server = InProcess(rewriting_store, models=(SUMMARIZER,), generator=generator)
    arguments = {
        "grammar": {"type": "regex", "value": "(yes ){6}"},
        "no_repeat_ngram_size": no_repeat_ngram_size,
    }
    async with server.client() as http:
        await post_json(http, f"/models/{SUMMARIZER}", {"inputs": BRIDGE, "parameters": arguments})
    assert generator.calls[-1].options.no_repeat_ngram_size == expected_size


async def test_clean_up_tokenization_spaces_removes_spaces(http: httpx.AsyncClient) -> None:
    # Ten distinct words of the tiny vocabulary include punctuation.
    arguments: dict[str, Any] = {"no_repeat_ngram_size": 1, "min_new_tokens": 10}
    path = f"/models/{TRANSLATOR}"
    (plain,) = await post_json(http, path, {"inputs": BRIDGE, "parameters": arguments})
    arguments["clean_up_tokenization_spaces"] = True
    (clean,) = await post_json(http, path, {"inputs": BRIDGE, "parameters": arguments})
    expected = clean_up_spaces(plain["translation_text"])
    assert clean["translation_text"] == expected != plain["translation_text"]


async def test_details_are_returned_with_the_text(http: httpx.AsyncClient) -> None:
    body = {"inputs": RIVER, "parameters": {"details": True}}
    (answer,) = await post_json(http, f"/models/{SUMMARIZER}", body)
    assert answer["summary_text"] == answer["generated_text"] != ""
    details = answer["details"]
    assert (details["seed"], details["prefill"]) == (None, [])
    assert len(details["tokens"]) == details["generated_tokens"]
    assert all(token["logprob"] <= 0 for token in details["tokens"])


@pytest.mark.parametrize("model", [SUMMARIZER, TRANSLATOR])
async def test_stream_has_an_event_per_token_of_the_output(
    model: str, http: httpx.AsyncClient, tiny_writer: TinyEncoderDecoder
) -> None:
    own = {**OWN_WAY_SAID, "num_beams": 1, "length_penalty": None}
    prompt, arguments = (PREFIX + RIVER, own) if model == SUMMARIZER else (RIVER, {})
    response = await http.post(f"/models/{model}", json={"inputs": RIVER, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = events_in(response.content)
    assert len(events) > 2
    assert last["generated_text"] == tiny_writer.answer(prompt, **arguments)
    assert "".join(one["token"]["text"] for one in [*events, last]) == last["generated_text"]


async def test_max_time_returns_partial_text(http: httpx.AsyncClient) -> None:
    far_deadline = {"max_time": 30, "min_new_tokens": 5}
    (answer,) = await post_json(
        http, f"/models/{WRITER}", {"inputs": RIVER, "parameters": far_deadline}
    )
    assert answer["generated_text"]
    for number in (1e-6, 1e-9):
        body = {"inputs": RIVER, "parameters": {"max_time": number, "num_beams": 2}}
        response = await http.post(f"/models/{WRITER}", json=body)
        assert (response.status_code, response.json()["field"]) == (504, "parameters.max_time")


async def test_beam_search_ended_by_max_time_is_recorded_once(rewriting_store: Path) -> None:
    server = InProcess(rewriting_store, models=MODELS, generator=ScriptedGenerator(pause_s=60))
    body = {"inputs": RIVER, "parameters": {"max_time": 0.05, "num_beams": 2}}
    async with server.client() as http:
        response = await http.post(f"/models/{WRITER}", json=body)
    assert response.status_code == 504
    assert [(each.model, each.status) for each in server.recorder.records] == [(WRITER, 504)]


@pytest.mark.parametrize(
    ("parameters", "field"),
    [({"num_beams": 5}, "num_beams"), ({"decoder_input_details": True}, "decoder_input_details")],
)
async def test_generator_errors_name_the_parameter(
    parameters: dict[str, Any], field: str, http: httpx.AsyncClient
) -> None:
    response = await http.post(
        f"/models/{WRITER}", json={"inputs": RIVER, "parameters": parameters}
    )
    assert (response.status_code, response.json()["field"]) == (400, f"parameters.{field}")
    assert f"`parameters.{field}`" in response.json()["error"][0]
