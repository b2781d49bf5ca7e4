"""`/generate`: response format, details, headers and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from deployments.artifacts.store import resolve_version
from deployments.config import IngressUserConfig, LimitSettings
from deployments.errors import (
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    InputTooLong,
    InvalidField,
    ModelLoading,
    Overloaded,
    ServeError,
)
from deployments.messages import Chunk, FinishReason, GenerationCall, Started, Token
from tests.support.artifacts import EMBEDDER
from tests.support.decoder_artifacts import DECODER
from tests.support.in_process import InProcess
from tests.support.scripted_generation import (
    MODELS,
    TEXT,
    ScriptedGenerator,
    ask,
    ending,
)


async def generate(writing_store: Path, parameters: dict[str, Any], **generator: Any) -> Any:
    body = {"inputs": "Once upon", "parameters": parameters}
    return await ask(writing_store, ScriptedGenerator(**generator), "/generate", body)


@pytest.mark.parametrize("path", ["/generate", f"/models/{DECODER}/generate", "/generate/"])
async def test_generate_returns_one_object_without_the_prompt(
    path: str, writing_store: Path
) -> None:
    generator = ScriptedGenerator()
    response = await ask(writing_store, generator, path, {"inputs": "Once upon"})
    assert (response.status_code, response.json()) == (200, {"generated_text": TEXT})
    (call,) = generator.calls
    assert (call.model.id, call.prompt) == (DECODER, "Once upon")
    assert generator.running == 0


async def test_return_full_text_prepends_the_prompt(writing_store: Path) -> None:
    response = await generate(writing_store, {"return_full_text": True})
    assert response.json() == {"generated_text": "Once upon" + TEXT}


async def test_details_have_all_tokens(writing_store: Path) -> None:
    response = await generate(writing_store, {"details": True, "seed": 7, "temperature": 0.5})
    assert response.json()["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": 7,
        "prefill": [],
        "tokens": [
            {"id": 7, "text": " a", "logprob": -0.25, "special": False},
            {"id": 11, "text": " ti", "logprob": -0.5, "special": False},
            {"id": 12, "text": "me", "logprob": -1.0, "special": False},
            {"id": 2, "text": "", "logprob": -0.125, "special": True},
        ],
    }


async def test_greedy_decoding_reports_no_seed(writing_store: Path) -> None:
    drawn = await generate(writing_store, {"details": True, "do_sample": True})
    likeliest = await generate(writing_store, {"details": True, "seed": 7})
    assert drawn.json()["details"]["seed"] == 42
    assert likeliest.json()["details"]["seed"] is None


async def test_decoder_input_details_adds_prompt_tokens(writing_store: Path) -> None:
    response = await generate(writing_store, {"decoder_input_details": True})
    assert response.json()["details"]["prefill"] == [
        {"id": 5, "text": "Once", "logprob": None},
        {"id": 6, "text": " upon", "logprob": -2.5},
    ]


async def test_top_n_tokens_adds_top_tokens(writing_store: Path) -> None:
    response = await generate(writing_store, {"details": True, "top_n_tokens": 2})
    first, *others = response.json()["details"]["top_tokens"]
    assert first == [
        {"id": 7, "text": " a", "logprob": -0.25, "special": False},
        {"id": 9, "text": " the", "logprob": -1.75, "special": False},
    ]
    assert others == [[], [], []]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.LENGTH, "length"),
        (FinishReason.END, "eos_token"),
        (FinishReason.STOP, "stop_sequence"),
    ],
)
async def test_details_have_the_finish_reason(
    reason: FinishReason, word: str, writing_store: Path
) -> None:
    chunks = [Chunk("a.", (Token(1, "a.", -1.0),), ending(reason, 1))]
    response = await generate(writing_store, {"details": True}, chunks=chunks)
    assert response.json()["details"]["finish_reason"] == word


async def test_best_of_returns_discarded_sequences_in_details(writing_store: Path) -> None:
    generator = ScriptedGenerator()
    body = {"inputs": "Once", "best_of": 3, "do_sample": True, "return_full_text": True}
    plain = await ask(writing_store, generator, "/generate", body)
    response = await ask(writing_store, generator, "/generate", {**body, "details": True})
    assert plain.json() == {"generated_text": "Once" + TEXT}
    others = response.json()["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == ["Once" + TEXT] * 2
    assert others[0]["tokens"] == response.json()["details"]["tokens"]
    assert response.headers["x-generated-tokens"] == "12"
    assert response.headers["x-time-per-token"] == "15", "per token of one sequence"
    assert len(generator.calls) == 6


class PromptEchoGenerator(ScriptedGenerator):
    """Generator that answers each prompt with the prompt."""

    async def stream(self, call: GenerationCall) -> AsyncGenerator[Started | Chunk, None]:
        text = str(call.prompt)
        yield Started(1, 0, 42, "cpu-int4", ())
        yield Chunk(text, (Token(7, text, -0.25),), ending(tokens=1))


async def test_discarded_sequences_are_those_of_their_prompt(writing_store: Path) -> None:
    parameters = {"best_of": 2, "do_sample": True, "details": True, "return_full_text": False}
    body = {"inputs": ["Once", "Then"], "parameters": parameters}
    response = await ask(writing_store, PromptEchoGenerator(), f"/models/{DECODER}", body)
    for prompt, (best,) in zip(("Once", "Then"), response.json(), strict=True):
        (other,) = best["details"]["best_of_sequences"]
        assert (best["generated_text"], other["generated_text"]) == (prompt, prompt)


async def test_headers_have_token_counts_and_milliseconds(writing_store: Path) -> None:
    headers = (await generate(writing_store, {})).headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "cpu-int4"
    assert headers["x-compute-characters"] == "9"
    assert headers["x-sha"] == resolve_version(writing_store, DECODER, "latest")
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("2", "4")
    assert (headers["x-queue-time"], headers["x-inference-time"]) == ("10", "60")
    assert headers["x-time-per-token"] == "15"
    assert 0 < float(headers["x-compute-time"]) < 5
    assert {"x-total-time", "x-validation-time"} <= set(headers)
    assert "decode;dur=40.00" in headers["server-timing"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidField("`grammar` is no schema", field="grammar"), 422, "validation"),
        (InputTooLong("`prompt` has 999 tokens", field="prompt"), 422, "validation"),
        (EmptyInput("`prompt` has no tokens", field="prompt"), 422, "validation"),
        (Overloaded("Model is overloaded"), 429, "overloaded"),
        (EngineFailed("the engine failed"), 424, "generation"),
        (DeadlineExceeded("too late"), 504, "incomplete_generation"),
        (ServeError("odd"), 500, "incomplete_generation"),
    ],
)
async def test_generator_errors_have_a_lower_case_type(
    error: ServeError, status: int, kind: str, writing_store: Path
) -> None:
    response = await generate(writing_store, {}, refusal=error)
    assert (response.status_code, response.json()["error_type"]) == (status, kind)
    assert response.json()["code"] == error.code
    assert ("retry-after" in response.headers) == (status == 429)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (InputTooLong("`prompt` has 9 tokens", field="prompt"), "`inputs` has 9 tokens"),
        (InvalidField("`grammar`: no", field="grammar"), "`parameters.grammar`: no"),
        (
            InvalidField("`max_new_tokens`: no", field="max_new_tokens"),
            "`parameters.max_new_tokens`: no",
        ),
    ],
)
async def test_generator_errors_name_fields_of_the_body(
    error: ServeError, sentence: str, writing_store: Path
) -> None:
    assert (await generate(writing_store, {}, refusal=error)).json()["error"] == sentence


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"inputs": ""}, 422, "validation"),
        ({"inputs": ["a", "b"]}, 422, "validation"),
        ({}, 422, "validation"),
        ([], 400, "validation"),
        ({"inputs": "a", "parameters": {"top_p": 1}}, 422, "validation"),
        ({"inputs": "a", "parameters": {"num_beams": 1}}, 400, "validation"),
        ({"inputs": "a", "options": {"require_gpu": True}}, 422, "validation"),
        ({"inputs": "a", "model": "no/such"}, 404, "validation"),
        ({"inputs": "a", "model": EMBEDDER}, 424, "generation"),
    ],
)
async def test_invalid_bodies_have_the_tgi_error_format(
    body: Any, status: int, kind: str, writing_store: Path
) -> None:
    generator = ScriptedGenerator()
    response = await ask(writing_store, generator, "/generate", body)
    assert (response.status_code, response.json()["error_type"]) == (status, kind)
    assert not generator.calls


async def test_cold_start_sets_retry_after(writing_store: Path) -> None:
    loading = ModelLoading("Model tiny/decoder is currently loading", estimated_time_s=20.0)
    response = await generate(writing_store, {}, refusal=loading)
    assert (response.status_code, response.json()["estimated_time"]) == (503, 20.0)
    assert response.headers["retry-after"] == "20"


async def test_too_many_sequences_are_rejected(writing_store: Path) -> None:
    settings = IngressUserConfig(limits=LimitSettings(choices=2))
    body = {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True}}
    response = await ask(writing_store, ScriptedGenerator(), "/generate", body, settings=settings)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert "`parameters.best_of`" in response.json()["error"]


async def test_missing_generative_model_is_an_error(
    writing_store: Path,
) -> None:
    body = {"inputs": "a"}
    response = await ask(writing_store, ScriptedGenerator(), "/generate", body, models=(EMBEDDER,))
    assert (response.status_code, response.json()["error_type"]) == (424, "generation")


async def test_wrong_method_has_the_tgi_error_format(writing_store: Path) -> None:
    async with InProcess(writing_store, models=MODELS).client() as http:
        for path in ("/generate", f"/models/{DECODER}/generate_stream"):
            response = await http.put(path)
            assert (response.status_code, response.json()["error_type"]) == (405, "validation")
