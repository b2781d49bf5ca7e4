"""Generation settings and language codes of encoder-decoder checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, processors

from build_artifacts.checkpoints.encoder_decoders import read_languages
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import encoder_decoder
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.presets import QUICK
from deployments.artifacts.generation_config import GenerationConfig, GenerationDefaults
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.prepared_build import RecordingRunner
from tests.support.tiny_encoders import write_json

MARIAN = {"model_type": "marian", "architectures": ["MarianMTModel"]}
SETTINGS = {
    "num_beams": 6,
    "length_penalty": 0.6,
    "repetition_penalty": 1.2,
    "early_stopping": True,
    "no_repeat_ngram_size": 3,
    "min_length": 30,
    "max_length": 512,
    "bad_words_ids": [[58100]],
    "forced_bos_token_id": 5,
}
FAMILIES = {
    "mbart": (("en_XX", "fr_XX"), {"en_XX": 2, "fr_XX": 3}),
    "nllb": (("eng_Latn", "fra_Latn"), {"eng_Latn": 2, "fra_Latn": 3}),
    "m2m_100": (("__en__", "__fr__"), {"en": 2, "fr": 3}),
}


def read_generation_config(weights: Path) -> GenerationConfig:
    generation_config = read_checkpoint_metadata(weights).generation_config
    assert generation_config is not None
    return generation_config


@pytest.mark.parametrize(
    "is_separate", [True, False], ids=["generation_config.json", "config.json"]
)
def test_generation_settings_are_read_from_either_file(tmp_path: Path, is_separate: bool) -> None:
    """Older versions of transformers saved generation settings in config.json."""
    tokens = {"eos_token_id": 0, "decoder_start_token_id": 58100}
    write_json(tmp_path / "config.json", MARIAN | ({} if is_separate else SETTINGS))
    if is_separate:
        write_json(tmp_path / "generation_config.json", SETTINGS | tokens)
    generation_config = read_generation_config(tmp_path)
    assert generation_config.defaults == GenerationDefaults(
        num_beams=6,
        length_penalty=0.6,
        repetition_penalty=1.2,
        early_stopping=True,
        no_repeat_ngram_size=3,
        min_new_tokens=29,
        max_new_tokens=511,
    )
    assert generation_config.suppressed_token_ids == (58100,)
    assert generation_config.eos_token_ids == (0,)
    assert generation_config.encoder_decoder is not None
    assert generation_config.encoder_decoder.decoder_start_token_id == 58100
    assert generation_config.encoder_decoder.forced_bos_token_id == 5


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "setting", [{"num_beams": "six"}, {"num_beams": -6}, {"repetition_penalty": "high"}], ids=str
)
def test_wrong_generation_setting_is_rejected_by_file(
    tmp_path: Path, name: str, setting: dict[str, object]
) -> None:
    tokens = {"eos_token_id": 0, "decoder_start_token_id": 58100}
    write_json(tmp_path / "config.json", MARIAN)
    write_json(tmp_path / name, MARIAN | tokens | setting)
    with pytest.raises(UnsupportedModel, match=f"`{name}` is corrupt: `{next(iter(setting))}`"):
        read_checkpoint_metadata(tmp_path)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"encoder_no_repeat_ngram_size": 3}, ["encoder_no_repeat_ngram_size"]),
        ({"do_sample": True, "diversity_penalty": 0.5}, ["diversity_penalty", "do_sample"]),
        ({"bad_words_ids": [[7], [8, 9]]}, ["bad_words_ids"]),
        ({"task_specific_params": {"summarization": {"num_beams": 4}}}, ["task_specific_params"]),
        ({"task_specific_params": {"summarization": {"prefix": "sum: "}, "x": 5}}, []),
        ({"do_sample": False, "num_beam_groups": 1, "encoder_repetition_penalty": 1.0}, []),
        (SETTINGS, []),
    ],
)
def test_build_log_names_settings_without_effect(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    names: list[str],
) -> None:
    write_json(tmp_path / "config.json", MARIAN | settings)
    monkeypatch.setattr(encoder_decoder, "cached_reference", lambda context: None)
    runner = RecordingRunner(tmp_path / "building")
    context = BuildContext(
        steps=runner.steps,
        weights=tmp_path,
        metadata=read_checkpoint_metadata(tmp_path),
        recipe=QUICK,
        budget=BuildBudget(),
    )
    encoder_decoder.EncoderDecoderFamily().start(context)
    found = ", ".join(f"`{name}`" for name in names)
    expected = f"settings of the checkpoint without effect: {found}\n" if names else ""
    assert runner.output.getvalue() == expected


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
