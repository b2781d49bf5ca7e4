"""Conversion of text-generation-inference parameters to generation options, and its errors."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from deployments.errors import EmptyInput, InvalidField, ServeError, UnknownParameter
from deployments.ingress.apis.text_generation.requests import (
    GenerateRequest,
    RouteDefaults,
    parse_generate_request,
)
from deployments.ingress.request_options import RequestOptions
from deployments.messages import GenerationOptions, Grammar, SamplingParams

HUB, STREAM = RouteDefaults(full_text=True, many=True), RouteDefaults(streams=True)


def parse(parameters: dict[str, Any], defaults: RouteDefaults = HUB) -> GenerateRequest:
    return parse_generate_request({"inputs": "Once", "parameters": parameters}, defaults)


def options(parameters: dict[str, Any], defaults: RouteDefaults = HUB) -> GenerationOptions:
    return parse(parameters, defaults).to_generation_request(RequestOptions()).options


def test_defaults_are_greedy_without_a_token_limit() -> None:
    assert options({}) == GenerationOptions(
        sampling=SamplingParams(temperature=0.0), include_stop_string=True
    )


def test_null_parameters_are_ignored() -> None:
    nothing = dict.fromkeys(("temperature", "seed", "stop", "best_of", "grammar", "details"))
    assert options(nothing) == options({})
    body = {"inputs": "Once", "parameters": None, "options": None, "stream": None}
    parsed = parse_generate_request(body, HUB).to_generation_request(RequestOptions())
    assert parsed.options == options({})


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1.0}, 0.0),
        ({"do_sample": False, "temperature": 1.0}, 0.0),
        ({"do_sample": True, "temperature": 1.0}, 1.0),
        ({"temperature": 1.0, "top_k": 5}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.7),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.5}, 1.0),
        ({"typical_p": 0.5}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"seed": 3}, 0.0),
        ({"repetition_penalty": 1.1}, 0.0),
    ],
)
def test_sampling_parameters_enable_sampling(
    parameters: dict[str, Any], temperature: float
) -> None:
    assert options(parameters).sampling.temperature == temperature


def test_all_parameters_reach_the_generator() -> None:
    values = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "typical_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "frequency_penalty": -0.5,
        "seed": (1 << 64) - 1,
        "stop": ["\n", "."],
        "details": True,
        "decoder_input_details": True,
        "top_n_tokens": 3,
        "truncate": 100,
        "grammar": {"type": "regex", "value": "[a-z]+"},
    }
    assert options(values) == GenerationOptions(
        sampling=SamplingParams(
            temperature=0.5,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            typical_p=0.8,
            repetition_penalty=1.3,
            frequency_penalty=-0.5,
            seed=(1 << 64) - 1,
        ),
        max_new_tokens=9,
        min_new_tokens=2,
        stop=("\n", "."),
        include_stop_string=True,
        grammar=Grammar("regex", "[a-z]+"),
        logprobs=3,
        prompt_logprobs=True,
        truncate_prompt_tokens=100,
    )


@pytest.mark.parametrize(
    ("parameters", "defaults", "logprobs"),
    [
        ({}, HUB, None),
        ({"top_n_tokens": 2}, HUB, None),  # without `details`, the response has no tokens
        ({"details": True}, HUB, 0),
        ({"decoder_input_details": True}, HUB, 0),
        ({}, STREAM, 0),
        ({"top_n_tokens": 2}, STREAM, 2),
    ],
)
def test_logprobs_are_computed_for_details_and_streams(
    parameters: dict[str, Any], defaults: RouteDefaults, logprobs: int | None
) -> None:
    assert options(parameters, defaults).logprobs == logprobs


@pytest.mark.parametrize(
    ("values", "stop"),
    [
        ({"stop_sequences": ["x"]}, ("x",)),
        ({"stop": ["y"], "stop_sequences": ["x"]}, ("y", "x")),
        ({"stop": ["y"], "stop_sequences": ["y"]}, ("y",)),
        ({"stop": list("abcdefghijklmnop")}, tuple("abcdefghijklmnop")),
        ({"stop": [], "stop_sequences": []}, ()),
    ],
)
def test_stop_sequences_are_added_to_stop(values: dict[str, Any], stop: tuple[str, ...]) -> None:
    assert options(values).stop == stop


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"properties": {"a": {"type": "string"}}}),
        ("json", '{"properties": {"a": {"type": "string"}}}'),
        ("json_schema", {"properties": {"a": {"type": "string"}}}),
        ("json_schema", {"name": "thing", "schema": {"properties": {"a": {"type": "string"}}}}),
    ],
)
def test_grammar_accepts_schema_object_text_and_named_schema(kind: str, value: Any) -> None:
    grammar = options({"grammar": {"type": kind, "value": value}}).grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert orjson.loads(grammar.value) == {"properties": {"a": {"type": "string"}}}


def test_nested_parameters_override_top_level_ones() -> None:
    body = {"inputs": "Once", "max_new_tokens": 5, "top_k": 7, "parameters": {"top_k": 9}}
    result = parse_generate_request(body, HUB).to_generation_request(RequestOptions()).options
    assert (result.max_new_tokens, result.sampling.top_k) == (5, 9)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.0}, "top_p"),
        ({"typical_p": 1}, "typical_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": "text"}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"truncate": 0}, "truncate"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"max_time": 0}, "max_time"),
        ({"watermark": True}, "watermark"),
        ({"adapter_id": "some/adapter"}, "adapter_id"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"best_of": 2, "do_sample": True, "max_time": 1}, "max_time"),
        ({"best_of": 2, "do_sample": True, "num_return_sequences": 2}, "num_return_sequences"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"grammar": {"type": "poem", "value": ""}}, "grammar.type"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": "no schema"}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": "[1]"}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": "[" * 5_000}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": 7}}, "grammar.value"),
        ({"grammar": "[a-z]"}, "grammar"),
    ],
)
def test_invalid_parameter_is_named(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ServeError) as raised:
        options(parameters)
    assert isinstance(raised.value, InvalidField | EmptyInput)
    assert raised.value.field == f"parameters.{field}"
    assert f"`parameters.{field}`" in raised.value.message


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 2, "do_sample": True},
        {"num_return_sequences": 2, "do_sample": True},
        {"decoder_input_details": True},
    ],
)
def test_unstreamable_parameters_are_rejected_in_streams_only(parameters: dict[str, Any]) -> None:
    assert parse(parameters)
    with pytest.raises(InvalidField, match="when streaming"):
        parse(parameters, STREAM)


def test_parameters_without_effect_do_not_conflict() -> None:
    assert parse({"best_of": 1, "num_return_sequences": 1, "seed": 1, "watermark": False}, STREAM)


def test_unknown_parameters_have_the_message_huggingface_hub_parses() -> None:
    with pytest.raises(UnknownParameter) as raised:
        parse({"num_beams": 4, "top_k": 1, "max_lenght": 9})
    assert raised.value.message.startswith(
        "The following `model_kwargs` are not used by the model: ['num_beams', 'max_lenght'] ("
    )


@pytest.mark.parametrize(
    ("inputs", "defaults", "field"),
    [
        ("", HUB, "inputs"),
        (None, HUB, "inputs"),
        (7, HUB, "inputs"),
        ([], HUB, "inputs"),
        (["a", ""], HUB, "inputs[1]"),
        (["a", {"role": "user"}], HUB, "inputs[1]"),
        (["a"], STREAM, "inputs"),
        (["a"], RouteDefaults(full_text=True, many=True, streams=True), "inputs"),
        (["a"], RouteDefaults(), "inputs"),
    ],
)
def test_invalid_inputs_are_named(inputs: Any, defaults: RouteDefaults, field: str) -> None:
    with pytest.raises(ServeError) as raised:
        parse_generate_request({"inputs": inputs}, defaults)
    assert raised.value.field == field


def test_generate_rejects_several_sequences() -> None:
    with pytest.raises(InvalidField, match="num_return_sequences"):
        parse({"num_return_sequences": 2, "do_sample": True}, RouteDefaults())
