"""Language codes of multilingual encoder-decoder checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, processors

from build_artifacts.checkpoints.encoder_decoders import read_languages

FAMILIES = {
    "mbart": (("en_XX", "fr_XX"), {"en_XX": 2, "fr_XX": 3}),
    "nllb": (("eng_Latn", "fra_Latn"), {"eng_Latn": 2, "fra_Latn": 3}),
    "m2m_100": (("__en__", "__fr__"), {"en": 2, "fr": 3}),
}


def save_tokenizer(weights: Path, tokens: tuple[str, ...], template: str) -> None:
    vocabulary = {token: i for i, token in enumerate(("<unk>", "</s>", *tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>", *tokens])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[(token, vocabulary[token]) for token in ("</s>", tokens[0])],
    )
    tokenizer.save(str(weights / "tokenizer.json"))


@pytest.mark.parametrize("template", ["{} $A </s>", "$A </s> {}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_languages_are_read_from_tokenizer(family: str, template: str, tmp_path: Path) -> None:
    tokens, expected = FAMILIES[family]
    save_tokenizer(tmp_path, tokens, template.format(tokens[0]))
    config = SimpleNamespace(model_type="mbart" if family == "mbart" else "m2m_100")
    assert read_languages(tmp_path, config) == expected


def test_languages_without_template_token_are_empty(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ("en_XX", "fr_XX"), "$A </s>")
    assert read_languages(tmp_path, SimpleNamespace(model_type="mbart")) == {}


def test_languages_are_empty_for_monolingual_families(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, ("en_XX", "fr_XX"), "en_XX $A </s>")
    assert read_languages(tmp_path, SimpleNamespace(model_type="bart")) == {}
