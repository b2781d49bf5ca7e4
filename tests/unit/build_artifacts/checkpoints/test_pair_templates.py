"""The text of a pair, read from the chat template of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.pair_templates import read_pair_template
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.pair_template import PairTemplate
from tests.support.decoder_artifacts import CHATML, END, TURN, write_byte_tokenizer
from tests.support.tiny_encoders import write_json

QUERY = "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
DOCUMENT = "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
INSTRUCTION = (
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('find answers') }}"
)
FULL = f"Task: {INSTRUCTION}\nQ: {QUERY}\nD: {DOCUMENT}<|im_end|>\nRelevant:"
PARTS = PairTemplate(
    start="Task: ",
    instruction="find answers",
    before_first="\nQ: ",
    before_second="\nD: ",
    end="<|im_end|>\nRelevant:",
    end_tokens=10,  # <|im_end|>, eight bytes and a merged pair
)
MESSAGES = {"modality_config": {"message": {"method": "forward"}}}


PAIR = "<|im_start|>query\nwhat?<|im_end|>\n<|im_start|>document\nthis<|im_end|>\n"


def write_checkpoint(
    directory: Path,
    template: str | None,
    *,
    settings: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
) -> Checkpoint:
    """Write a tokenizer and its template. `settings` are those of the module Transformer."""
    write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", {"bos_token": TURN})
    write_json(directory / "sentence_bert_config.json", settings or {})
    write_json(directory / "config_sentence_transformers.json", prompts or {})
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")


def read(checkpoint: Checkpoint, *, required: bool = True) -> PairTemplate | None:
    return read_pair_template(checkpoint, SimpleNamespace(model_type="llama"), required=required)


def test_fixed_parts_are_found_by_rendering(tmp_path: Path) -> None:
    assert read(write_checkpoint(tmp_path, FULL)) == PARTS


def test_default_prompt_is_the_default_instruction(tmp_path: Path) -> None:
    prompts = {"prompts": {"laws": "find laws"}, "default_prompt_name": "laws"}
    template = read(write_checkpoint(tmp_path, FULL, prompts=prompts))
    assert template == PARTS.model_copy(update={"instruction": "find laws"})


def test_messages_in_turn_have_no_place_for_an_instruction(tmp_path: Path) -> None:
    template = read(write_checkpoint(tmp_path, CHATML))
    assert template is not None
    assert (template.start, template.instruction, template.end_tokens) == ("", None, 2)
    assert template.join("what?", "this") == PAIR


def test_default_prompt_makes_a_place_for_an_instruction(tmp_path: Path) -> None:
    prompts = {"prompts": {"p": "be fair"}, "default_prompt_name": "p"}
    template = read(write_checkpoint(tmp_path, CHATML, prompts=prompts))
    assert template is not None
    system = "<|im_start|>system\nbe {}<|im_end|>\n"
    assert template.join("what?", "this") == system.format("fair") + PAIR
    assert template.join("what?", "this", "be kind") == system.format("kind") + PAIR


def test_template_may_refuse_system_messages(tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + CHATML
    )
    template = read(write_checkpoint(tmp_path, refusing))
    assert template is not None
    assert template.instruction is None
    assert template.join("what?", "this") == PAIR


def test_variables_of_the_template_come_from_the_module(tmp_path: Path) -> None:
    variables = {
        "add_generation_prompt": True, "style": "short", "padding": "max_length", "tools": None,
        "truncation": "longest_first",
    }  # fmt: skip
    settings = {"processing_kwargs": {"chat_template": variables}}
    template = read(write_checkpoint(tmp_path, "{{ style }} " + CHATML, settings=settings))
    assert template is not None
    assert template.join("a", "b").startswith("short <|im_start|>query\na<|im_end|>")
    assert template.end.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_length", 8), ("truncation", False), ("restore_suffix", None), ("tools", [])],
)
def test_settings_of_the_tokenizer_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    settings = {"processing_kwargs": {"chat_template": {name: value}}}
    with pytest.raises(UnsupportedModel, match=f"sets `{name}`"):
        read(write_checkpoint(tmp_path, FULL, settings=settings))


@pytest.mark.parametrize("stated", [{}, {"modality_config": {"message": {"format": "structured"}}}])
def test_contents_may_be_lists(stated: dict[str, Any], tmp_path: Path) -> None:
    listed = FULL.replace(QUERY, "{{ messages[-2]['content'][0]['text'] }}").replace(
        DOCUMENT, "{{ messages[-1]['content'][0]['text'] }}"
    )
    listed = listed.replace("| first |", "| map(attribute=0) | map(attribute='text') | first |")
    assert read(write_checkpoint(tmp_path, listed, settings=stated)) == PARTS


@pytest.mark.parametrize(
    ("trimmed", "strips"),
    [
        ((INSTRUCTION, QUERY, DOCUMENT), {"strips": True, "strips_instruction": True}),
        ((QUERY, DOCUMENT), {"strips": True}),
        ((INSTRUCTION,), {"strips_instruction": True}),
    ],
    ids=["all", "pair", "instruction"],
)
def test_template_that_strips_contents_is_recognized(
    trimmed: tuple[str, ...], strips: dict[str, bool], tmp_path: Path
) -> None:
    template = FULL
    for part in trimmed:
        template = template.replace(part, part.replace(" }}", " | trim }}"))
    assert read(write_checkpoint(tmp_path, template)) == PARTS.model_copy(update=strips)


def test_special_tokens_that_the_tokenizer_adds_are_left_out_of_the_text(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "{{ bos_token }}" + FULL)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    plain = tokenizer.encode("<|im_start|>Task: find answers\nQ: a\nD: b<|im_end|>\nRelevant:").ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TURN} $A", special_tokens=[(TURN, tokenizer.token_to_id(TURN))]
    )
    tokenizer.save(str(path))
    template = read(checkpoint)
    assert template == PARTS
    assert tokenizer.encode(template.join("a", "b")).ids == plain


def test_tokenizer_that_adds_other_tokens_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, FULL)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(str(path))
    with pytest.raises(UnsupportedModel, match="adds special tokens"):
        read(checkpoint)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}",
        "{{ messages[0].content }}",
        "{{ raise_exception('roles must be user or assistant') }}",
        "{% broken",
    ],
)
def test_template_without_both_roles_is_refused_only_if_it_is_required(
    template: str | None, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, template)
    assert read(checkpoint, required=False) is None
    with pytest.raises(UnsupportedModel, match="does not render the roles"):
        read(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        ("Q: ", f"{QUERY} Q: "),
        (DOCUMENT, DOCUMENT.replace(".content", ".content[:9999]")),
        (DOCUMENT, DOCUMENT.replace(".content", ".content | replace('<|im_end|>', '')")),
        (DOCUMENT, DOCUMENT.replace(".content", ".content.split('</think>')[-1]")),
    ],
    ids=["repeated", "cut", "without an end of turn", "without reasoning"],
)
def test_template_that_changes_the_contents_is_refused(
    change: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match="changes the query or the document"):
        read(write_checkpoint(tmp_path, FULL.replace(*change)), required=False)


@pytest.mark.parametrize("settings", [{}, {"modality_config": {"text": {"method": "forward"}}}])
def test_modules_without_messages_let_the_tokenizer_join_pairs(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, FULL, settings=settings)
    modules = [{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
    write_json(tmp_path / "modules.json", modules)
    assert read(checkpoint) is None
    write_json(tmp_path / "sentence_bert_config.json", MESSAGES)
    assert read(checkpoint) == PARTS


def test_module_with_messages_needs_a_template(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, None, settings=MESSAGES)
    with pytest.raises(UnsupportedModel, match="does not render the roles"):
        read(checkpoint, required=False)


def test_template_that_writes_the_date_is_refused(tmp_path: Path) -> None:
    clock = "{{ date if date is defined else strftime_now('%d %b %Y') }} "
    with pytest.raises(UnsupportedModel, match="writes the date"):
        read(write_checkpoint(tmp_path, clock + FULL))
    settings = {"processing_kwargs": {"chat_template": {"date": "26 Jul 2024"}}}
    template = read(write_checkpoint(tmp_path, clock + FULL, settings=settings))
    assert template is not None
    assert template.start == "26 Jul 2024 Task: "


def test_qwen3_has_the_text_of_its_model_card(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, None)
    template = read_pair_template(checkpoint, SimpleNamespace(model_type="qwen3"), required=True)
    assert template is not None
    text = template.join("What purrs?", "A cat.", "Find animals")
    assert text.endswith(
        "<Instruct>: Find animals\n<Query>: What purrs?\n<Document>: A cat.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert template.end_tokens > 0
