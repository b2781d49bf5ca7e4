"""Checkpoints with remote code. A decoder that transformers includes is built without the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_artifacts.checkpoints.models import load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.decoders.gate_inputs import load_gate_inputs
from build_artifacts.errors import UnsafeSource
from build_artifacts.families import read_metadata
from build_artifacts.sources.hub import HuggingFaceHub
from build_artifacts.steps.resolve import resolve
from deployments.artifacts.types import ModelHead
from tests.support.tiny_decoders import tiny_llama
from tests.support.tiny_encoders import tiny_checkpoint, write_json, write_pooling

AUTO_CLASSES = {
    "AutoConfig": "theirs.LlamaConfig",
    "AutoModel": "theirs.LlamaModel",
    "AutoModelForCausalLM": "theirs.LlamaForCausalLM",
    "AutoTokenizer": ["theirs.Tokenizer", None],
}


def add_remote_code(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_json(directory / "config.json", config | {"auto_map": AUTO_CLASSES})
    program = f"from pathlib import Path\nPath({str(directory)!r}, 'executed').touch()\n"
    (directory / "theirs.py").write_text(program, encoding="utf-8")


def test_decoder_of_transformers_is_built_without_its_remote_code(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    add_remote_code(directory)
    checkpoint = resolve(str(directory), tmp_path / "scratch", HuggingFaceHub())
    metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
    model = load_model(checkpoint.weights, head=metadata.head, dtype="float32")
    assert type(model).__module__.startswith("transformers.")
    assert load_gate_inputs(checkpoint.weights, metadata.max_tokens, has_encoder=False).prompts
    assert not (directory / "executed").exists()


OTHER_OUTPUTS = "may compute other outputs than `{}` of transformers"


def refuse(directory: Path, tmp_path: Path, reason: str) -> None:
    add_remote_code(directory)
    with pytest.raises(UnsafeSource, match=rf"`config\.json` requires remote code .*; {reason}"):
        resolve(str(directory), tmp_path / "scratch", HuggingFaceHub())
    assert not (directory / "executed").exists()


def test_embedding_model_of_a_native_decoder_with_remote_code_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    write_pooling(directory)
    refuse(directory, tmp_path, f"the code {OTHER_OUTPUTS.format('llama')}")


@pytest.mark.parametrize("head", [ModelHead.VECTOR, ModelHead.MASKS])
def test_native_encoder_with_remote_code_is_refused(tmp_path: Path, head: ModelHead) -> None:
    directory = tiny_checkpoint(tmp_path / "model", head=head)
    refuse(directory, tmp_path, f"the code {OTHER_OUTPUTS.format('bert')}")


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_other_class_of_a_native_type_with_remote_code_is_refused(
    tmp_path: Path, model_type: str
) -> None:
    directory = tiny_llama(tmp_path / "model")
    config = {"model_type": model_type, "architectures": ["BertLMHeadModel"]}
    write_json(directory / "config.json", config)
    refuse(directory, tmp_path, f"the code {OTHER_OUTPUTS.format(model_type)}")


def test_unknown_type_with_remote_code_is_refused(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    write_json(directory / "config.json", {"model_type": "theirs", "architectures": [None]})
    refuse(directory, tmp_path, "transformers does not include `theirs`")
