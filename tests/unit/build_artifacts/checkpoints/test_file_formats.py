"""Hints for weights that no build reads: the conversion keeps the head of the model."""

from __future__ import annotations

import pytest

from build_artifacts.checkpoints.file_formats import unread_weights_error


def find_hint(*names: str, model_class: str = "") -> str:
    error = unread_weights_error("`dir`", names, model_class)
    assert error is not None
    assert error.message.startswith("`dir` has pickled weights only")
    return error.hint


def test_hint_names_the_class_of_the_model_and_its_tokenizer() -> None:
    hint = find_hint("pytorch_model.bin", model_class="BertForSequenceClassification")
    program = "transformers.BertForSequenceClassification.from_pretrained(DIR).save_pretrained(OUT)"
    assert f"`{program}`" in hint
    assert "files of the tokenizer" in hint
    assert "AutoModel" not in hint
    assert "SentenceTransformer" not in hint


@pytest.mark.parametrize("model_class", ["", "x); import os; ("])
def test_hint_shows_no_class_that_config_json_does_not_name(model_class: str) -> None:
    hint = find_hint("pytorch_model.bin", model_class=model_class)
    assert "`transformers.CLASS_OF_THE_MODEL.from_pretrained(DIR)" in hint


def test_hint_for_modules_is_sentence_transformers() -> None:
    hint = find_hint("pytorch_model.bin", "modules.json", model_class="BertModel")
    assert hint.endswith("`SentenceTransformer(DIR).save_pretrained(OUT)`")


def test_hint_for_an_adapter_is_peft() -> None:
    hint = find_hint("adapter_config.json", "adapter_model.bin")
    assert hint.endswith(
        "`PeftModel.from_pretrained(BASE_MODEL, DIR).save_pretrained(OUT)` of peft"
    )


@pytest.mark.parametrize("names", [("a.bin", "model.safetensors"), ("training_args.bin",), ()])
def test_other_files_give_no_error(names: tuple[str, ...]) -> None:
    assert unread_weights_error("`dir`", names) is None
