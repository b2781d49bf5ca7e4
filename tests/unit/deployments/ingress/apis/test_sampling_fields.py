"""Every API with generation passes every field of SamplingParams on, or leaves it out by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.types import TruncationSide
from deployments.ingress.apis.openai.requests import build_sampling as build_openai_sampling
from deployments.ingress.apis.openai.schemas import GenerationBody
from deployments.ingress.apis.text2text.requests import adapt_sampling, parse_truncation
from deployments.ingress.apis.text2text.schemas import (
    TextToTextParameters,
    parse_text2text_parameters,
)
from deployments.ingress.apis.text_generation.requests import build_sampling as build_tgi_sampling
from deployments.ingress.apis.text_generation.schemas import (
    GenerateParameters,
    parse_generate_parameters,
)
from deployments.messages import SamplingParams, Truncation

NO_DEFAULTS = GenerationDefaults()
BuildSampling = Callable[[dict[str, Any]], SamplingParams]


def sample_openai(fields: dict[str, Any]) -> SamplingParams:
    return build_openai_sampling(GenerationBody.model_validate(fields), NO_DEFAULTS)


def sample_tgi(fields: dict[str, Any]) -> SamplingParams:
    return build_tgi_sampling(parse_generate_parameters(fields))


def sample_text2text(fields: dict[str, Any]) -> SamplingParams:
    parameters = parse_text2text_parameters(fields)
    return adapt_sampling(build_tgi_sampling(parameters), parameters, NO_DEFAULTS)


BUILDERS: Mapping[str, BuildSampling] = {
    "OpenAI": sample_openai,
    "TGI": sample_tgi,
    "text2text": sample_text2text,
}
SCHEMAS = {"OpenAI": GenerationBody, "TGI": GenerateParameters, "text2text": TextToTextParameters}
# A value of each field in a body, other than the default.
VALUES: Mapping[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.6,
    "min_p": 0.1,
    "typical_p": 0.7,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.4,
    "logit_bias": {"5": 1.5},
    "seed": 11,
}
PARSED: Mapping[str, Any] = {**VALUES, "logit_bias": ((5, 1.5),)}
# Fields that the original API does not have.
LEFT_OUT = {
    "OpenAI": (),
    "TGI": ("presence_penalty", "logit_bias"),
    "text2text": ("presence_penalty", "logit_bias"),
}
# Fields that also apply to greedy decoding. Each of the others switches sampling on.
GREEDY = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed")
# Fields that a checkpoint does not state.
NOT_OF_CHECKPOINTS = ("frequency_penalty", "presence_penalty", "logit_bias", "seed")


@pytest.mark.parametrize("api", BUILDERS)
@pytest.mark.parametrize("field", SamplingParams._fields)
def test_api_passes_the_field_on_or_leaves_it_out(field: str, api: str) -> None:
    if field in LEFT_OUT[api]:
        assert field not in SCHEMAS[api].model_fields
        return
    sampling = BUILDERS[api]({field: VALUES[field]})
    assert getattr(sampling, field) == PARSED[field]
    if field not in GREEDY:
        assert sampling.temperature > 0


@pytest.mark.parametrize("field", SamplingParams._fields)
def test_default_of_the_checkpoint_is_used_or_left_out(field: str) -> None:
    if field in NOT_OF_CHECKPOINTS:
        assert field not in GenerationDefaults.model_fields
        return
    defaults = GenerationDefaults.model_validate({field: VALUES[field]})
    assert getattr(build_openai_sampling(GenerationBody(), defaults), field) == VALUES[field]


@pytest.mark.parametrize(
    ("fields", "side", "truncation"),
    [
        ({"truncation": True}, "right", Truncation.KEEP_START),
        ({"truncation": "only_first"}, "left", Truncation.KEEP_END),
        ({}, "left", Truncation.REFUSE),
    ],
)
def test_long_source_loses_the_side_that_the_tokenizer_removes(
    fields: dict[str, Any], side: TruncationSide, truncation: Truncation
) -> None:
    assert parse_truncation(parse_text2text_parameters(fields), side) is truncation
