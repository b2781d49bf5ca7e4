"""Metadata of generation checkpoints, read from their JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.architectures import parse_task_class
from build_artifacts.checkpoints.decoders import (
    GRAPH_BUILDERS,
    find_decoder_settings,
    read_chat_templates,
)
from build_artifacts.checkpoints.encoder_decoders import SUPPORTED
from build_artifacts.decoders.graphs.export import DECODERS, ENCODER_DECODERS
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import decoder
from build_artifacts.families.base import BuildBudget, BuildContext
from build_artifacts.presets import QUICK
from deployments.artifacts.generation_config import GenerationDefaults
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME, TOOL_TEMPLATE_NAME
from deployments.artifacts.types import TaskName
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_artifacts import CHATML, END, TURN_END, write_byte_tokenizer
from tests.support.prepared_build import RecordingRunner
from tests.support.tiny_decoders import tokenizer_config
from tests.support.tiny_encoders import (
    tiny_tokenizer,
    write_json,
    write_pooling,
)

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path / "tokenizer.json")
    write_json(tmp_path / "tokenizer_config.json", {})
    write_json(tmp_path / "config.json", LLAMA)
    return tmp_path


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    generation_config = read_checkpoint_metadata(directory).generation_config
    assert generation_config is not None
    return generation_config.eos_token_ids


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    generation_config = read_checkpoint_metadata(directory).generation_config
    assert generation_config is not None
    return generation_config.defaults


def token_id(directory: Path, token: str) -> int:
    return int(write_byte_tokenizer(directory / "again.json").token_to_id(token))


def test_kv_cache_shape_comes_from_config(directory: Path) -> None:
    metadata = read_checkpoint_metadata(directory)
    assert metadata.tasks == (TaskName.TEXT_GENERATION,)
    assert (metadata.output_width, metadata.max_tokens) == (320, 512)
    assert metadata.generation_config is not None
    assert (
        metadata.generation_config.layers,
        metadata.generation_config.kv_heads,
        metadata.generation_config.head_dim,
    ) == (3, 2, 16)


def test_head_shape_defaults_are_derived(directory: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    write_json(directory / "config.json", config | {"head_dim": 32})
    generation_config = read_checkpoint_metadata(directory).generation_config
    assert generation_config is not None
    assert (generation_config.kv_heads, generation_config.head_dim) == (4, 32)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0} | {
    name: [1.0] * 8 for name in ("short_factor", "long_factor")
}


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}},
        {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 128}},
    ],
    ids=["beside the settings", "in the settings", "in settings of the older name"],
)
@pytest.mark.parametrize("embeds", [False, True])
def test_texts_stay_in_the_shorter_table_of_longrope(
    directory: Path, change: dict[str, object], embeds: bool
) -> None:
    if embeds:
        write_pooling(directory)
    write_json(directory / "config.json", LLAMA | change)
    assert read_checkpoint_metadata(directory).max_tokens == 128


@pytest.mark.parametrize("model_type", ["roberta", "lilt", "layoutlmv3"])
def test_positions_that_start_after_the_padding_id_shorten_texts(
    directory: Path, model_type: str
) -> None:
    config = {"max_position_embeddings": 514, "pad_token_id": 1}
    write_pooling(directory)
    write_json(directory / "config.json", {"model_type": model_type} | config)
    assert read_checkpoint_metadata(directory).max_tokens == 512


def test_eos_token_ids_merge_all_files(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"eos_token_id": [5, 7]})
    write_json(directory / "tokenizer_config.json", {"eos_token": {"content": END}})
    assert read_eos_token_ids(directory) == (5, 7, token_id(directory, END))


def test_eos_token_ids_include_turn_end(directory: Path) -> None:
    assert read_eos_token_ids(directory) == (7,)
    (directory / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert read_eos_token_ids(directory) == (7, token_id(directory, TURN_END))


def test_sampling_defaults_come_from_checkpoint(directory: Path) -> None:
    settings = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    write_json(directory / "generation_config.json", settings | {"do_sample": True})
    assert read_generation_defaults(directory) == GenerationDefaults(**settings)


def test_sampling_defaults_of_older_checkpoints_come_from_config(directory: Path) -> None:
    write_json(directory / "config.json", LLAMA | {"temperature": 0.6, "top_k": 20})
    assert read_generation_defaults(directory) == GenerationDefaults(temperature=0.6, top_k=20)
    write_json(directory / "generation_config.json", {})
    assert read_generation_defaults(directory) == GenerationDefaults()


def test_neutral_sampling_values_are_omitted(directory: Path) -> None:
    nothing = {"temperature": None, "top_k": 0, "top_p": 0.0, "typical_p": "much", "min_p": True}
    for settings in (nothing, {"top_k": 2.5, "temperature": float("inf")}, {"top_k": True}):
        write_json(directory / "generation_config.json", settings)
        assert read_generation_defaults(directory) == GenerationDefaults()


def test_suppressed_tokens_come_from_checkpoint(directory: Path) -> None:
    settings = {"suppress_tokens": [5, -1, 320], "bad_words_ids": [[9], [11, 12]]}
    write_json(directory / "generation_config.json", settings)
    config = read_checkpoint_metadata(directory).required_generation_config
    assert config.suppressed_token_ids == (5, 9), "an id beyond the vocabulary has no logit"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"bad_words_ids": [[5], [8, 9]], "num_beams": 2}, ["bad_words_ids", "num_beams"]),
        ({"no_repeat_ngram_size": 3, "min_new_tokens": 4}, ["min_new_tokens", "no_repeat_ngram_s"]),
        (
            {"do_sample": True, "top_k": 7, "num_beams": 1, "min_length": 0, "stop_strings": None},
            [],
        ),
    ],
)
def test_settings_of_a_decoder_without_effect_are_found(
    directory: Path, settings: dict[str, object], names: list[str]
) -> None:
    write_json(directory / "generation_config.json", settings)
    assert [name[:17] for name in find_decoder_settings(directory)] == names


def test_build_log_names_settings_of_a_decoder_without_effect(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(directory / "generation_config.json", {"no_repeat_ngram_size": 3})
    monkeypatch.setattr(decoder, "cached_reference", lambda context: None)
    runner = RecordingRunner(directory / "building")
    context = BuildContext(
        steps=runner.steps,
        weights=directory,
        metadata=read_checkpoint_metadata(directory),
        recipe=QUICK,
        budget=BuildBudget(),
    )
    decoder.DecoderFamily().start(context)
    expected = "settings of the checkpoint without effect: `no_repeat_ngram_size`\n"
    assert runner.output.getvalue() == expected


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("XLMWithLMHeadModel", TaskName.FILL_MASK),
        ("FlaubertWithLMHeadModel", TaskName.FILL_MASK),
        ("T5WithLMHeadModel", TaskName.TEXT2TEXT_GENERATION),
        ("GPT2LMHeadModel", TaskName.TEXT_GENERATION),
    ],
)
def test_language_models_of_old_names_have_their_tasks(architecture: str, task: TaskName) -> None:
    assert parse_task_class(architecture) is task


def test_model_without_eos_token_is_rejected(directory: Path) -> None:
    write_json(directory / "config.json", LLAMA | {"eos_token_id": None})
    with pytest.raises(UnsupportedModel, match="no end-of-sequence token") as caught:
        read_checkpoint_metadata(directory)
    assert "generation_config.json" in caught.value.hint


def test_special_tokens_have_template_names(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    generation_config = read_checkpoint_metadata(directory).generation_config
    assert generation_config is not None
    assert generation_config.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": TURN_END,
        "pad_token": END,
    }


@pytest.mark.parametrize(
    "settings",
    [
        "a template",
        [{"name": "rag", "template": "another"}, {"name": "default", "template": "a template"}],
    ],
    ids=["alone", "among others"],
)
def test_chat_template_in_tokenizer_config_is_read(directory: Path, settings: object) -> None:
    assert read_chat_templates(directory) == {}
    write_json(directory / "chat_template.json", {"chat_template": "for images"})
    assert read_chat_templates(directory) == {CHAT_TEMPLATE_NAME: "for images"}
    write_json(directory / "tokenizer_config.json", {"chat_template": settings})
    assert read_chat_templates(directory) == {CHAT_TEMPLATE_NAME: "a template"}
    (directory / CHAT_TEMPLATE_NAME).write_text("the file", encoding="utf-8")
    assert read_chat_templates(directory) == {CHAT_TEMPLATE_NAME: "the file"}


def test_template_for_tools_is_read_from_either_place(directory: Path) -> None:
    templates = {"default": "without tools", "tool_use": "with tools", "rag": "with documents"}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    write_json(directory / "tokenizer_config.json", {"chat_template": named})
    expected = {CHAT_TEMPLATE_NAME: "without tools", TOOL_TEMPLATE_NAME: "with tools"}
    assert read_chat_templates(directory) == expected
    for name in expected:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"the file {name}", encoding="utf-8")
    assert read_chat_templates(directory) == {name: f"the file {name}" for name in expected}


def test_end_of_turn_in_a_template_for_tools_ends_an_answer(directory: Path) -> None:
    named = [{"name": "tool_use", "template": CHATML}]
    write_json(directory / "tokenizer_config.json", {"chat_template": named})
    assert read_eos_token_ids(directory) == (7, token_id(directory, TURN_END))


def test_chat_templates_that_are_no_objects_are_refused(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"chat_template": ["a template"]})
    with pytest.raises(UnsupportedModel, match=r"`chat_template` is not a text or a list"):
        read_chat_templates(directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "jamba", "architectures": ["JambaForCausalLM"]},
            "`JambaForCausalLM` cannot be built for text generation",
        ),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "`MambaForCausalLM` cannot be built for text generation",
        ),
    ],
    ids=["some attention", "no attention"],
)
def test_unsupported_architecture_is_rejected_with_reason(
    directory: Path, change: dict[str, object], sentence: str
) -> None:
    write_json(directory / "config.json", LLAMA | change)
    with pytest.raises(UnsupportedModel, match=sentence):
        read_checkpoint_metadata(directory)


CLASSIFIER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
EMBEDDER = {"model_type": "bert", "architectures": ["BertModel"]}
MASK_FILLER = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "name", "field", "value"),
    [
        (CLASSIFIER, "config.json", "architectures", 5),
        (CLASSIFIER, "config.json", "architectures", "BertForSequenceClassification"),
        (CLASSIFIER, "config.json", "id2label", ["NO", "YES"]),
        (CLASSIFIER, "config.json", "id2label", "YES"),
        (CLASSIFIER, "config.json", "id2label", {"1": "YES"}),
        (CLASSIFIER, "config.json", "num_labels", "three"),
        (CLASSIFIER, "config.json", "sentence_transformers", 5),
        (EMBEDDER, "config_sentence_transformers.json", "prompts", [1]),
        (EMBEDDER, "config_sentence_transformers.json", "default_prompt_name", 5),
        (T5, "generation_config.json", "num_beams", "three"),
        (T5, "generation_config.json", "bad_words_ids", 5),
    ],
)
def test_wrong_value_is_rejected_by_file_and_field(
    tmp_path: Path, config: dict[str, object], name: str, field: str, value: object
) -> None:
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / name, (config if name == "config.json" else {}) | {field: value})
    with pytest.raises(UnsupportedModel, match=f"`{name}` is corrupt: `{field}` "):
        read_checkpoint_metadata(tmp_path)


def test_embedding_model_with_wrong_architectures_is_rejected(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", EMBEDDER | {"architectures": 5})
    write_pooling(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"`config\.json` is corrupt: `architectures` "):
        read_checkpoint_metadata(tmp_path)


def mask_filler(directory: Path, token: str = "[MASK]", *, special: bool = True) -> Path:
    """Write a fill-mask model as of 2018, whose files do not state which token is the mask."""
    write_json(directory / "config.json", MASK_FILLER)
    tiny_tokenizer(directory)
    write_json(directory / "tokenizer_config.json", {"do_lower_case": True})
    text = (directory / "tokenizer.json").read_text(encoding="utf-8").replace("[MASK]", token)
    tokenizer = json.loads(text)
    for added in tokenizer["added_tokens"]:
        added["special"] = special
    write_json(directory / "tokenizer.json", tokenizer)
    return directory


@pytest.mark.parametrize("token", ["[MASK]", "<mask>"])
def test_mask_token_that_no_config_states_is_a_special_token(tmp_path: Path, token: str) -> None:
    assert read_checkpoint_metadata(mask_filler(tmp_path, token)).mask_token == 4


def test_stated_mask_token_precedes_the_usual_one(tmp_path: Path) -> None:
    mask_filler(tmp_path)
    write_json(tmp_path / "special_tokens_map.json", {"mask_token": {"content": "[UNK]"}})
    assert read_checkpoint_metadata(tmp_path).mask_token == 1


@pytest.mark.parametrize(("token", "special"), [("[HIDE]", True), ("[MASK]", False)])
def test_model_without_mask_token_is_rejected(tmp_path: Path, token: str, special: bool) -> None:
    with pytest.raises(UnsupportedModel, match="define no mask token"):
        read_checkpoint_metadata(mask_filler(tmp_path, token, special=special))


def test_adapter_with_wrong_value_is_rejected_by_file_and_field(tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "auto_mapping": 5})
    match = r"`adapter_config\.json` is corrupt: `auto_mapping` "
    with pytest.raises(UnsupportedModel, match=match):
        read_adapter(tmp_path)


def test_generation_config_that_transformers_rejects_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", T5)
    write_json(tmp_path / "generation_config.json", {"early_stopping": "three"})
    with pytest.raises(UnsupportedModel, match=r"not support `generation_config\.json`"):
        read_checkpoint_metadata(tmp_path)


def test_unsupported_encoder_decoder_is_rejected_by_name(directory: Path) -> None:
    settings = {"model_type": "umt5", "architectures": ["UMT5ForConditionalGeneration"]}
    write_json(directory / "config.json", settings)
    with pytest.raises(
        UnsupportedModel, match=r"`UMT5ForConditionalGeneration` .* `umt5`"
    ) as caught:
        read_checkpoint_metadata(directory)
    assert "t5, mt5" in caught.value.hint


def test_supported_types_match_graph_builders() -> None:
    assert set(SUPPORTED) == set(ENCODER_DECODERS)
    classes = (getattr(transformers, name).config_class for name in GRAPH_BUILDERS)
    assert {kind.model_type for kind in classes} == set(DECODERS)
