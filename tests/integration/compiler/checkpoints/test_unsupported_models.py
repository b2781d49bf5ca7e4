"""Refusals of models that cannot be built: the reason, and hints that lead to a build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.models import load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.decoders.reference import write_reference
from build_artifacts.encoders.preparation import prepare
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.tiny_decoders import tiny_gpt2
from tests.support.tiny_encoders import tiny_checkpoint, write_json, write_pooling

USE_ENCODER = "use an encoder of text, such as BERT, XLM-RoBERTa or ModernBERT"
GENERATE = "pass `--task text-generation`"
ADD_POOLING = "add a sentence-transformers pooling"
SEVERAL_MODALITIES = "has no `hidden_size`, so it is not an encoder of text alone"
DECODERS = "cannot be built as an encoder: `{}` models are decoders"
ENCODER_DECODERS = "cannot be built as an encoder: `{}` models are encoder-decoders"


def refuse(
    directory: Path, model_type: str, architecture: str, **settings: Any
) -> UnsupportedModel:
    """Return the refusal of a checkpoint; `task` is the `--task` of the build."""
    task = settings.pop("task", None)
    config = {"model_type": model_type, "architectures": [architecture], **settings}
    write_json(directory / "config.json", config)
    checkpoint = Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")
    with pytest.raises(UnsupportedModel) as caught:
        read_metadata(checkpoint, select_tasks(checkpoint, None, task))
    return caught.value


@pytest.mark.parametrize(
    ("model_type", "architecture", "task", "reason", "hint"),
    [
        ("bart", "BartForSequenceClassification", None, ENCODER_DECODERS, USE_ENCODER),
        ("gpt2", "GPT2ForSequenceClassification", None, DECODERS, USE_ENCODER),
        ("llama", "LlamaModel", None, DECODERS, ADD_POOLING),
        ("llama", "LlamaForCausalLM", "text-classification", DECODERS, GENERATE),
        (
            "llama",
            "LlamaForCausalLM",
            "feature-extraction",
            DECODERS,
            f"{ADD_POOLING}, or {GENERATE}",
        ),
        (
            "t5",
            "T5ForConditionalGeneration",
            "feature-extraction",
            ENCODER_DECODERS,
            "pass `--task text2text-generation`",
        ),
        ("umt5", "UMT5ForConditionalGeneration", "fill-mask", ENCODER_DECODERS, USE_ENCODER),
        ("clip", "CLIPModel", None, SEVERAL_MODALITIES, USE_ENCODER),
        ("siglip", "SiglipModel", None, SEVERAL_MODALITIES, USE_ENCODER),
    ],
)
def test_hint_of_a_refused_encoder_offers_only_what_is_supported(
    tmp_path: Path, model_type: str, architecture: str, task: str | None, reason: str, hint: str
) -> None:
    refusal = refuse(tmp_path, model_type, architecture, task=task)
    assert refusal.message.startswith(f"`{architecture}` cannot be built")
    assert reason.format(model_type) in refusal.message
    assert refusal.hint == hint


@pytest.mark.parametrize(
    ("model_type", "architecture", "task"),
    [
        ("llama", "LlamaForSequenceClassification", "token-classification"),
        ("bert", "BertForTokenClassification", "question-answering"),
        ("bert", "BertForQuestionAnswering", "text-ranking"),
    ],
)
def test_head_of_another_task_is_refused(
    tmp_path: Path, model_type: str, architecture: str, task: str
) -> None:
    """The weights of such heads have equal names, so they would be loaded."""
    refusal = refuse(tmp_path, model_type, architecture, task=task)
    assert refusal.message.startswith(f"`{architecture}` was trained for ")
    assert refusal.message.endswith(f", not for {task}")
    assert refusal.hint == "omit `--task`"


@pytest.mark.parametrize(
    ("model_type", "architecture", "hint"),
    [
        ("llama", "LlamaForCausalLM", GENERATE),
        ("gemma3", "Gemma3ForConditionalGeneration", "supported: bart, "),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "supported: bart, "),
    ],
)
def test_hint_of_a_refused_encoder_decoder_offers_only_what_is_supported(
    tmp_path: Path, model_type: str, architecture: str, hint: str
) -> None:
    refusal = refuse(tmp_path, model_type, architecture, task="text2text-generation")
    assert f"requires an encoder-decoder model; `{architecture}` is not one" in refusal.message
    assert refusal.hint.startswith(hint)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama4", "Llama4ForConditionalGeneration"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
    ],
)
def test_model_with_other_inputs_than_text_is_named_as_such(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    refusal = refuse(tmp_path, model_type, architecture)
    assert refusal.message.startswith(f"`{architecture}` reads more than text")
    assert "gemma3, " in refusal.hint


@pytest.mark.parametrize("is_encoder_decoder", [True, False])  # False: saved by transformers 5
def test_embedding_model_of_an_encoder_decoder_is_refused_although_it_has_a_pooling(
    tmp_path: Path, is_encoder_decoder: bool
) -> None:
    write_pooling(tmp_path)
    refusal = refuse(tmp_path, "t5", "T5EncoderModel", is_encoder_decoder=is_encoder_decoder)
    assert "`t5` models are encoder-decoders" in refusal.message
    assert refusal.hint == USE_ENCODER


def test_tagger_with_the_encoder_of_an_encoder_decoder_is_accepted(tmp_path: Path) -> None:
    architecture = "T5ForTokenClassification"
    config = {"model_type": "t5", "architectures": [architecture], "is_encoder_decoder": False}
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 512})
    assert read_checkpoint_metadata(tmp_path).architecture == architecture


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("bert", "BertModel"), ("llama", "LlamaForCausalLM"), ("t5", "T5ForConditionalGeneration")],
)
def test_quantized_checkpoint_is_refused(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    refusal = refuse(tmp_path, model_type, architecture, quantization_config=quantization)
    assert "the checkpoint is quantized" in refusal.message


def test_positions_after_an_unknown_padding_id_are_refused(tmp_path: Path) -> None:
    architecture = "RobertaForSequenceClassification"
    refusal = refuse(tmp_path, "roberta", architecture, pad_token_id=None)
    assert "`config.json` states no `pad_token_id`" in refusal.message


def test_unknown_activation_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "bert", labels=("NO", "YES"))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    write_json(checkpoint / "config.json", config | {"hidden_act": "geglu"})
    with pytest.raises(UnsupportedModel, match="cannot load the checkpoint: unknown key 'geglu'"):
        load_model(checkpoint, head=ModelHead.LABELS, dtype="float32")


def test_model_that_requires_other_inputs_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "xmod", model_type="xmod", labels=("NO", "YES"))
    metadata = read_checkpoint_metadata(checkpoint)
    with pytest.raises(UnsupportedModel, match=r"not run on token ids alone: .* language"):
        prepare(checkpoint, metadata, None, tmp_path)


def test_model_without_a_position_for_every_token_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "mpnet", model_type="mpnet")
    metadata = replace(read_checkpoint_metadata(checkpoint), max_tokens=512)
    with pytest.raises(UnsupportedModel, match="not run on token ids alone: index out of range"):
        prepare(checkpoint, metadata, None, tmp_path)


def test_model_for_texts_of_one_length_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(
        tmp_path / "nystromformer", model_type="nystromformer", labels=("NO", "YES")
    )
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    lengths = {"num_landmarks": 8, "segment_means_seq_len": 128}
    write_json(checkpoint / "config.json", config | lengths)
    metadata = read_checkpoint_metadata(checkpoint)
    with pytest.raises(UnsupportedModel, match="not run on token ids alone: shape"):
        prepare(checkpoint, metadata, None, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("funnel", "FunnelForMaskedLM"), ("xlnet", "XLNetForSequenceClassification")],
)
def test_model_with_further_segment_types_is_refused(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    refusal = refuse(tmp_path, model_type, architecture)
    assert refusal.message.startswith(f"`{model_type}` cannot be exported: its token [CLS]")
    assert refusal.hint == USE_ENCODER


def test_end_token_without_a_vector_is_left_out_if_others_remain(tmp_path: Path) -> None:
    checkpoint = tiny_gpt2(tmp_path / "gpt2")
    write_json(checkpoint / "generation_config.json", {"eos_token_id": 70_000})
    config = read_checkpoint_metadata(checkpoint).required_generation_config
    assert config.eos_token_ids
    assert 70_000 not in config.eos_token_ids


def test_end_token_without_a_vector_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_gpt2(tmp_path / "gpt2")
    metadata = read_checkpoint_metadata(checkpoint)
    config = metadata.required_generation_config.model_copy(update={"eos_token_ids": (70_000,)})
    metadata = replace(metadata, generation_config=config)
    with pytest.raises(UnsupportedModel, match="token id 70000, such as `eos_token_id`; the model"):
        write_reference(checkpoint, metadata, tmp_path)


def test_token_without_a_vector_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "bert")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    known = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|user|>"])  # in none of the probes
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    metadata = read_checkpoint_metadata(checkpoint)
    reason = rf"returns the id {known} for `<\|user\|>`; the model has vectors for {known} tokens"
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        prepare(checkpoint, metadata, None, tmp_path)
    assert "remove it there" in raised.value.hint


def test_checkpoint_that_requires_a_missing_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_args: Any, **_settings: Any) -> None:
        raise ImportError("this checkpoint requires `optimum`")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", load)
    with pytest.raises(UnsupportedModel, match=r"cannot load the checkpoint: .* `optimum`"):
        load_model(tmp_path, head=ModelHead.VECTOR, dtype="float32")
