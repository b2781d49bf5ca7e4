from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.common.local_model import LocalModel
from benchmarks.common.sentences import STSB_NAME
from benchmarks.rivals.command import build_workloads
from benchmarks.rivals.programs.embedders import open_tokenizer
from deployments.artifacts.manifest import TOKENIZER_NAME, ArtifactManifest
from tests.support.artifacts import EMBEDDER, seal_tiny

SENTENCE = "the food was good"
TOKENS = 6  # of SENTENCE, special tokens included
FILE_LIMIT = 4  # tokens after truncation by the tokenizer file
PADDED = 64


@pytest.fixture
def model(tmp_path: Path) -> LocalModel:
    """Create a model of up to 24 tokens whose tokenizer file truncates and pads, like MiniLM's."""
    directory = seal_tiny(tmp_path / "store", EMBEDDER)
    manifest = ArtifactManifest.read(directory).model_copy(update={"max_tokens": 24})
    path = directory / TOKENIZER_NAME
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(FILE_LIMIT)
    tokenizer.enable_padding(length=PADDED)
    path.unlink()
    tokenizer.save(str(path))
    return LocalModel(manifest, directory, manifest.candidates[0])


def test_lengths_of_workloads_ignore_padding_and_truncation_of_the_tokenizer_file(
    model: LocalModel, tmp_path: Path
) -> None:
    rows = "\n".join(f"1.0\t{SENTENCE}\t{SENTENCE}" for _ in range(4))
    (tmp_path / STSB_NAME).write_text(f"score\tsentence1\tsentence2\n{rows}")
    arguments = argparse.Namespace(data=tmp_path, seed=0, workloads=["sentences", "paragraphs-75"])
    sentences, paragraphs = build_workloads(arguments, model)
    assert sentences.tokens == TOKENS
    assert paragraphs.tokens == 2 + 4 * 4  # [CLS], [SEP], and four sentences of four words
    assert {text for (text,) in paragraphs.requests} == {" ".join([SENTENCE] * 4)}


def test_tokenizer_of_a_rival_server_pads_to_the_longest_text_of_a_request(
    model: LocalModel,
) -> None:
    tokenize = open_tokenizer(model.directory / TOKENIZER_NAME, ["input_ids", "attention_mask"])
    assert tokenize([SENTENCE])["input_ids"].shape == (1, TOKENS)
    assert tokenize([SENTENCE, "good"])["attention_mask"].sum(axis=1).tolist() == [TOKENS, 3]
