"""Checks of generation requests that need the model: logprobs, grammars, token ids and beams."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.artifacts.manifest import TOKENIZER_NAME
from deployments.errors import InvalidField, UnknownToken
from deployments.generation.grammar_trials import QUICK
from deployments.generation.job import Job
from deployments.messages import (
    BeamSearchParams,
    GenerationCall,
    GenerationOptions,
    Grammar,
    ModelRef,
)
from deployments.tokenization.encodings import open_tokenizer
from tests.integration.serving.generation.conftest import LONG, preparation, prepared
from tests.support.encoder_decoder_artifacts import word_tokenizer
from tests.support.fakes import far_deadline


def test_prompt_logprobs_of_encoder_decoder_are_rejected(directory: Path) -> None:
    with pytest.raises(InvalidField, match="not supported by encoder-decoder") as refused:
        prepared(directory, LONG[:3], encoder=True, prompt_logprobs=True)
    assert refused.value.field == "prompt_logprobs"
    assert prepared(directory, LONG[:3], prompt_logprobs=True)


def test_tokenizer_without_grammar_support_serves_other_requests(directory: Path) -> None:
    words = word_tokenizer()  # llguidance does not support the decoder of this tokenizer
    words.save(str(directory / TOKENIZER_NAME))
    assert prepared(directory, "the river") == words.encode("the river").ids
    with pytest.raises(InvalidField, match="does not support grammars") as refused:
        preparation(directory).compile_grammar(Grammar("regex", "[a-z]+"), QUICK)
    assert refused.value.field == "grammar"


def test_token_beyond_the_model_vocabulary_is_rejected(directory: Path) -> None:
    last = open_tokenizer(directory).get_vocab_size() - 1
    call = GenerationCall(
        ModelRef("tiny/model", "1"), (3, last), GenerationOptions(), far_deadline()
    )
    with pytest.raises(UnknownToken, match=f"token id {last}") as caught:
        preparation(directory, unknown=1).build_job(call, None)
    assert caught.value.field == "prompt"
    assert preparation(directory).build_job(call, None).prompt == [3, last]


@pytest.mark.parametrize(("slots", "width"), [(4, 3), (2, 2), (1, 1)])
def test_default_beams_are_limited_to_slots(slots: int, width: int, directory: Path) -> None:
    preparer = preparation(directory, encoder=True, slots=slots)

    def job(*, is_explicit: bool) -> Job:
        options = GenerationOptions(beam_search=BeamSearchParams(3, is_explicit=is_explicit))
        return preparer.build_job(
            GenerationCall(ModelRef("tiny/model", "1"), "bcd", options, far_deadline()), None
        )

    assert job(is_explicit=False).slot_count == width
    if slots < 3:
        with pytest.raises(InvalidField, match="`num_beams` is 3"):
            job(is_explicit=True)
