"""Preparation of generation requests: rejected or truncated long prompts, and further checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import TOKENIZER_NAME, ArtifactManifest
from deployments.engines.decoder import DecoderInfo
from deployments.errors import InputTooLong, InvalidField, UnknownToken
from deployments.generation.grammar_trials import QUICK
from deployments.generation.job import Job
from deployments.generation.preparation import RequestPreparer
from deployments.messages import (
    BeamSearchParams,
    Chat,
    GenerationCall,
    GenerationOptions,
    Grammar,
    ModelRef,
    Prompt,
    Truncation,
)
from deployments.registry import RegisteredModel
from deployments.tokenization.encodings import open_tokenizer
from tests.support.decoder_artifacts import seal_tiny_decoder
from tests.support.encoder_decoder_artifacts import word_tokenizer
from tests.support.fakes import far_deadline
from tests.support.small_tokenizers import END, byte_level

CONTEXT, SOURCE = 12, 8
TOKENIZER = byte_level()
END_ID = TOKENIZER.token_to_id(END)
LONG = "bcdfghjklmnpqrstvwxz"  # nearly every letter is one token
LONG_IDS = TOKENIZER.encode(LONG).ids


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An artifact whose tokenizer appends END to every text."""
    directory = seal_tiny_decoder(tmp_path)
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, END_ID)]
    )
    tokenizer.save(str(directory / TOKENIZER_NAME))
    return directory


def prepared(directory: Path, prompt: Prompt, *, encoder: bool = False, **said: Any) -> list[int]:
    """Return the prompt tokens of the job that the preparer builds."""
    call = GenerationCall(
        ModelRef("tiny/model", "1"),
        prompt,
        GenerationOptions(**said),
        far_deadline(),
    )
    return preparation(directory, encoder=encoder).build_job(call, None).prompt


def preparation(
    directory: Path, *, encoder: bool = False, slots: int = 4, unknown: int = 0
) -> RequestPreparer:
    """Return the preparer of a decoder with a context of CONTEXT tokens.

    With `encoder`, the model also has an encoder that reads up to SOURCE tokens. The model's
    vocabulary lacks the last `unknown` tokens of its tokenizer.
    """
    manifest = ArtifactManifest.model_validate_json((directory / "manifest.json").read_bytes())
    assert manifest.generation_config is not None
    source = (
        EncoderDecoderConfig(max_source_tokens=SOURCE, decoder_start_token_id=0)
        if encoder
        else None
    )
    generation_config = manifest.generation_config.model_copy(update={"encoder_decoder": source})
    model = RegisteredModel(
        ref=ModelRef(manifest.id, manifest.version),
        manifest=manifest.model_copy(update={"generation_config": generation_config}),
        directory=directory,
        sealed_s=0.0,
        tasks=manifest.tasks,
    )
    vocabulary = open_tokenizer(directory).get_vocab_size() - unknown
    info = DecoderInfo("cpu-fake", slots, CONTEXT, vocabulary, SOURCE if encoder else None)
    return RequestPreparer(model, info)


@pytest.mark.parametrize(
    ("encoder", "most"), [(True, SOURCE), (False, CONTEXT - 1)], ids=["encoder", "decoder"]
)
def test_truncated_text_keeps_special_tokens(encoder: bool, most: int, directory: Path) -> None:
    start = prepared(directory, LONG, encoder=encoder, truncation=Truncation.KEEP_START)
    assert start == [*LONG_IDS[: most - 1], END_ID]
    end = prepared(directory, LONG, encoder=encoder, truncation=Truncation.KEEP_END)
    assert end == [*LONG_IDS[1 - most :], END_ID]


@pytest.mark.parametrize("truncation", Truncation)
def test_fitting_text_is_not_truncated(truncation: Truncation, directory: Path) -> None:
    fitting = LONG[: SOURCE - 1]
    ids = prepared(directory, fitting, encoder=True, truncation=truncation)
    assert ids == [*LONG_IDS[: SOURCE - 1], END_ID]


def test_token_ids_are_truncated_without_special_tokens(directory: Path) -> None:
    tokens = tuple(range(20))
    for keep, kept in ((Truncation.KEEP_START, range(8)), (Truncation.KEEP_END, range(12, 20))):
        assert prepared(directory, tokens, encoder=True, truncation=keep) == list(kept)


def test_chat_is_truncated(directory: Path) -> None:
    chat = Chat(({"role": "user", "content": LONG},))
    kept = prepared(directory, chat, truncation=Truncation.KEEP_END)
    assert len(kept) == CONTEXT - 1
    assert TOKENIZER.decode(kept).endswith("assistant\n")


def test_too_long_prompt_without_truncation_is_rejected(directory: Path) -> None:
    with pytest.raises(
        InputTooLong, match=f"has {len(LONG_IDS) + 1} tokens; the maximum is 8"
    ) as refused:
        prepared(directory, LONG, encoder=True)
    assert refused.value.field == "prompt"


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(directory: Path) -> None:
    assert prepared(directory, LONG, encoder=True, truncate_prompt_tokens=3) == [
        *LONG_IDS[-2:],
        END_ID,
    ]


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


@pytest.mark.parametrize(("rows", "width"), [(4, 3), (2, 2), (1, 1)])
def test_default_beams_are_limited_to_slots(rows: int, width: int, directory: Path) -> None:
    preparer = preparation(directory, encoder=True, slots=rows)

    def job(*, is_explicit: bool) -> Job:
        options = GenerationOptions(beam_search=BeamSearchParams(3, is_explicit=is_explicit))
        return preparer.build_job(
            GenerationCall(ModelRef("tiny/model", "1"), "bcd", options, far_deadline()), None
        )

    assert job(is_explicit=False).slot_count == width
    if rows < 3:
        with pytest.raises(InvalidField, match="`num_beams` is 3"):
            job(is_explicit=True)
