"""Prompts of the accuracy gate in the chat format of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.decoders import read_chat_templates
from build_artifacts.decoders.gate_inputs import PROMPTS, load_gate_inputs
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from tests.support.decoder_artifacts import CHATML, TURN, write_byte_tokenizer
from tests.support.tiny_encoders import write_json

MANY_STEPS = "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}x"


def write_template(directory: Path, template: str) -> None:
    write_byte_tokenizer(directory / "tokenizer.json")
    write_json(directory / "tokenizer_config.json", {"bos_token": "the start"})
    (directory / CHAT_TEMPLATE_NAME).write_text(template, encoding="utf-8")


def test_template_of_the_model_formats_the_prompts(tmp_path: Path) -> None:
    write_template(tmp_path, "{{ bos_token }}" + CHATML)
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer.json")
    prompt = load_gate_inputs(tmp_path, 512, has_encoder=False).prompts[0]
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    assert text.startswith(f"the start{TURN}user\n{PROMPTS[0]}")
    assert text.endswith(f"{TURN}assistant\n")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MANY_STEPS, "takes more than 500000 steps"),
        ("{% for _ in range(41) %}{{ 'x' * 100000 }}{% endfor %}", "more than 4000000 characters"),
        ("{% for %}", "the chat template rejects"),
        ("{{ raise_exception('no user') }}", "no user"),
        ("{% if false %}x{% endif %}", "the chat template renders no tokens"),
    ],
    ids=["steps", "length", "syntax", "refusal", "nothing"],
)
def test_template_that_the_server_refuses_is_refused(
    tmp_path: Path, template: str, reason: str
) -> None:
    write_template(tmp_path, template)
    with pytest.raises(UnsupportedModel, match=f"cannot format its prompts: .*{reason}"):
        load_gate_inputs(tmp_path, 512, has_encoder=False)


@pytest.mark.parametrize("template", ["", "\n"])
def test_empty_template_counts_as_none(tmp_path: Path, template: str) -> None:
    write_template(tmp_path, template)
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer.json")
    prompt = load_gate_inputs(tmp_path, 512, has_encoder=False).prompts[0]
    assert tokenizer.decode(list(prompt)) == PROMPTS[0]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": CHATML})
    assert read_chat_templates(tmp_path) == {CHAT_TEMPLATE_NAME: CHATML}
