"""Words and offsets equal the pipeline of transformers for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from deployments.artifacts.manifest import ArtifactManifest
from deployments.tasks.base import DecodeContext
from deployments.tasks.token_classification import TokenClassification
from deployments.tokenization.vocabulary import TokenVocabulary
from deployments.tokenization.windows import WindowTokenizer
from tests.integration.parity.test_token_classification import (
    LABELS,
    READS,
    STRATEGIES,
    assert_same,
)
from tests.support.artifacts import tiny_manifest
from tests.support.parity_texts import varied_texts
from tests.support.tiny_encoders import tiny_tokenizer

# The pipeline warns about tokenizers that do not mark the tokens inside words.
pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")

TEXTS = 45
SIZE = 600  # approximate size of a vocabulary in tokens
START, END, PAD, UNKNOWN = SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


def cased_wordpiece(texts: list[str]) -> Tokenizer:
    tokenizer = _wordpiece(normalizers.BertNormalizer(lowercase=False))
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=[*SPECIAL]), texts)
    return tokenizer


def lowercasing_wordpiece(texts: list[str]) -> Tokenizer:
    """Train a WordPiece tokenizer with 40 characters that lowercases texts and removes accents.

    A token may therefore differ from the characters of the text that it stands for.
    """
    tokenizer = _wordpiece(normalizers.BertNormalizer(lowercase=True))
    trainer = trainers.WordPieceTrainer(
        vocab_size=SIZE, special_tokens=[*SPECIAL], limit_alphabet=40
    )
    _train(tokenizer, trainer, texts)
    return tokenizer


def _wordpiece(normalizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def bytes_bpe(texts: list[str]) -> Tokenizer:
    """Train a tokenizer like those of RoBERTa and GPT.

    A character may take several tokens, and no character is unknown.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    _train(tokenizer, trainer, texts)
    return tokenizer


def unigram(texts: list[str]) -> Tokenizer:
    """Train a tokenizer like that of XLM-R.

    It normalizes text to NFKC. A token includes the space before it.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=[*SPECIAL], unk_token=UNKNOWN, show_progress=False
    )
    _train(tokenizer, trainer, texts)
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any, texts: list[str]) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (START, END)],
    )


KINDS = (cased_wordpiece, lowercasing_wordpiece, bytes_bpe, unigram)


@dataclass(frozen=True)
class ParityPair:
    """The pipeline of transformers and this package's code, with the same model and tokenizer."""

    pipeline: Any
    directory: Path
    manifest: ArtifactManifest

    def ours(self, text: str, parameters: Mapping[str, Any]) -> Any:
        """Return this package's answer, computed from the logits of the pipeline's model."""
        parsed = TokenClassification().parse(text, parameters, self.manifest)
        assert parsed.windowing is not None
        windows, _ = WindowTokenizer(self.directory, READS).windows(
            text, 0, parsed.windowing, parsed.truncation
        )
        items, token_offsets = zip(*windows, strict=True)
        computed = DecodeContext(
            rows=[self._logits(item.ids) for item in items],
            items=items,
            token_offsets=token_offsets,
            manifest=self.manifest,
            vocabulary=TokenVocabulary(self.directory),
        )
        return TokenClassification().decode(computed, parsed.options)

    def _logits(self, ids: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.pipeline.model(torch.tensor(ids[None], dtype=torch.long)).logits[0].numpy()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("letters")
    tiny_tokenizer(directory)
    return varied_texts(directory, TEXTS, max_tokens=READS)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def pair(
    request: pytest.FixtureRequest, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> ParityPair:
    train: Callable[[list[str]], Tokenizer] = request.param
    directory = tmp_path_factory.mktemp(train.__name__)
    train(texts[::2]).save(str(directory / "tokenizer.json"))
    manifest = tiny_manifest(labels=LABELS).model_copy(update={"max_tokens": READS})
    return ParityPair(_pipeline(directory / "tokenizer.json"), directory, manifest)


def _pipeline(tokenizer_file: Path) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file),
        unk_token=UNKNOWN,
        pad_token=PAD,
        model_max_length=READS,
    )
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.5,
        id2label=dict(enumerate(LABELS)),
        attn_implementation="eager",
    )
    model = transformers.BertForTokenClassification(config).eval()
    return transformers.pipeline(
        "token-classification", model=model, tokenizer=tokenizer, device="cpu"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_words_and_offsets_equal_the_pipeline(
    strategy: str, pair: ParityPair, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy}
    theirs = [pair.pipeline(text, **parameters) for text in texts]
    assert_same([pair.ours(text, {**parameters, "truncate": True}) for text in texts], theirs)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_merged_windows_equal_the_pipeline(
    strategy: str, pair: ParityPair, texts: list[str]
) -> None:
    parameters = {"aggregation_strategy": strategy, "stride": 12}
    joined = [" ".join(texts[i : i + 3]) for i in range(0, TEXTS, 3)]
    theirs = [pair.pipeline(text, **parameters) for text in joined]
    assert_same([pair.ours(text, parameters) for text in joined], theirs)
