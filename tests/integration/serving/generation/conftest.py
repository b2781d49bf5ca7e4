"""An artifact and a request preparer for tests of the preparation of generation requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from deployments.artifacts.generation_config import EncoderDecoderConfig
from deployments.artifacts.manifest import TOKENIZER_NAME, ArtifactManifest
from deployments.engines.decoder import DecoderInfo
from deployments.generation.preparation import RequestPreparer
from deployments.messages import GenerationCall, GenerationOptions, ModelRef, Prompt
from deployments.registry import RegisteredModel
from deployments.tokenization.encodings import open_tokenizer
from tests.support.decoder_artifacts import seal_tiny_decoder
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
        sealed_ns=0,
        tasks=manifest.tasks,
    )
    vocabulary = open_tokenizer(directory).get_vocab_size() - unknown
    info = DecoderInfo("cpu-fake", slots, CONTEXT, vocabulary, SOURCE if encoder else None)
    return RequestPreparer(model, info)
