"""Merge of LoRA adapters: tied embeddings, chat template and tokenizer, heads of other sizes.

Adapters that do not fit their base, and those with an invalid config, are refused with the reason.
"""

from __future__ import annotations

import io
import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.decoders import read_chat_templates
from build_artifacts.checkpoints.models import LOADERS, load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.progress import BuildProgress
from build_artifacts.steps.convert_weights import merge_adapter
from build_artifacts.steps.merge import merge
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import (
    CHAT_TEMPLATE_NAME,
    TOKENIZER_NAME,
    TOOL_TEMPLATE_NAME,
    ModelSource,
)
from deployments.artifacts.types import ModelHead
from tests.support.adapters import tiny_adapter
from tests.support.decoder_artifacts import END, TURN, TURN_END
from tests.support.tiny_decoders import tiny_gpt2, tiny_llama
from tests.support.tiny_encoders import tiny_checkpoint, write_json, write_pooling


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("merge") / "llama")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2, whose output layer is tied to its token embeddings."""
    return tiny_gpt2(tmp_path_factory.mktemp("merge") / "gpt2")


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    return decoder_adapter(tmp_path / "adapter", llama, {"target_modules": ["q_proj"]})


def decoder_adapter(directory: Path, base: Path, options: Mapping[str, Any]) -> Path:
    """Write a random adapter of a decoder with these options of LoraConfig."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(directory)
    return directory


def merged(base: Path, adapter: Path, into: Path) -> Checkpoint:
    checkpoint = Checkpoint(base, ModelSource(ref="here", revision="1"), "local/model")
    merge(checkpoint, read_adapter(adapter), into)
    return replace(checkpoint, directory=into)


@pytest.mark.parametrize(
    ("options", "is_tied"),
    [
        ({"target_modules": ["c_attn"]}, True),
        ({"target_modules": ["c_attn", "lm_head"]}, False),
        ({"target_modules": ["c_attn", "wte"]}, False),
        ({"target_modules": ["wte", "lm_head"]}, False),
        ({"target_modules": ["c_attn"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["c_attn"], "trainable_token_indices": [5, 6]}, True),
    ],
    ids=["layers", "head", "table", "both", "saved head", "tokens"],
)
def test_merge_into_tied_embeddings_matches_peft(
    tied: Path, tmp_path: Path, options: dict[str, Any], is_tied: bool
) -> None:
    directory = decoder_adapter(tmp_path / "adapter", tied, options)
    base = transformers.AutoModelForCausalLM.from_pretrained(tied)
    theirs = PeftModel.from_pretrained(base, str(directory)).eval()
    checkpoint = merged(tied, directory, tmp_path / "merged")
    ours = load_model(checkpoint.weights, head=ModelHead.NEXT_TOKEN, dtype="float32")
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-3, rtol=1e-4)
    assert ours.config.tie_word_embeddings is is_tied


def edit_adapter(adapter: Path, changes: Mapping[str, Any]) -> None:
    path = adapter / "adapter_config.json"
    write_json(path, json.loads(path.read_bytes()) | dict(changes))


@pytest.mark.parametrize("is_local", [True, False], ids=["directory", "hub id"])
def test_base_of_the_training_is_not_read(
    llama: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """peft would require token vectors if that base has another number of tokens."""
    trained = tmp_path / "trained"
    trained.mkdir()
    config = json.loads((llama / "config.json").read_bytes())
    write_json(trained / "config.json", config | {"vocab_size": config["vocab_size"] + 8})
    requests: list[object] = []

    def record(*arguments: object, **_: object) -> None:
        requests.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", record)
    monkeypatch.setattr(socket, "getaddrinfo", record)
    edit_adapter(adapter, {"base_model_name_or_path": str(trained) if is_local else "some/model"})
    merged(llama, adapter, tmp_path / "merged")
    assert not requests


@pytest.mark.parametrize("form", ["file", "config", "list"])
def test_chat_template_of_adapter_replaces_that_of_base(
    llama: Path, adapter: Path, tmp_path: Path, form: str
) -> None:
    base = shutil.copytree(llama, tmp_path / "base")
    (base / TOOL_TEMPLATE_NAME).parent.mkdir()
    (base / TOOL_TEMPLATE_NAME).write_text("tools of the base")
    (base / CHAT_TEMPLATE_NAME).write_text("{{ messages }}")  # without a turn end
    write_json(base / "config.json", json.loads((base / "config.json").read_text()) | {
        "eos_token_id": None})  # fmt: skip
    (base / "generation_config.json").unlink(missing_ok=True)
    write_json(base / "tokenizer_config.json", {"eos_token": END, "bos_token": TURN})
    ours = "{{ bos_token }}{{ messages[0]['content'] }}<|im_end|>"
    config: dict[str, object] = {"eos_token": TURN_END}
    if form == "file":
        (adapter / CHAT_TEMPLATE_NAME).write_text(ours)
    else:
        named = [{"name": "default", "template": ours}]
        config["chat_template"] = ours if form == "config" else named
    write_json(adapter / "tokenizer_config.json", config)
    shutil.copyfile(llama / TOKENIZER_NAME, adapter / TOKENIZER_NAME)

    checkpoint = merged(base, adapter, tmp_path / "merged")
    assert read_chat_templates(checkpoint.weights) == {CHAT_TEMPLATE_NAME: ours}
    metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
    generation_config = metadata.required_generation_config
    tokenizer = Tokenizer.from_file(str(llama / TOKENIZER_NAME))
    assert generation_config.eos_token_ids == (tokenizer.token_to_id(TURN_END),)
    assert generation_config.special_tokens == {"eos_token": TURN_END, "bos_token": TURN}


def test_chat_template_of_base_stays_without_one_of_adapter(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    checkpoint = merged(llama, adapter, tmp_path / "merged")
    assert read_chat_templates(checkpoint.weights) == read_chat_templates(llama)


@pytest.mark.parametrize("pooled", [False, True], ids=["plain base", "base with a pooling"])
def test_sentence_config_of_adapter_replaces_that_of_base(tmp_path: Path, pooled: bool) -> None:
    base = tiny_checkpoint(tmp_path / "base")
    if not pooled:
        (base / "modules.json").unlink()
        shutil.rmtree(base / "1_Pooling")
    model = transformers.AutoModel.from_pretrained(base)
    lora = LoraConfig(task_type="FEATURE_EXTRACTION", r=2, target_modules=["query"])
    adapter = tmp_path / "adapter"
    get_peft_model(model, lora).save_pretrained(adapter)
    write_pooling(adapter, pooling="cls", normalize=False)
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
    write_json(adapter / "config_sentence_transformers.json", prompts)
    write_json(adapter / "sentence_bert_config.json", {"max_seq_length": 32})
    checkpoint = merged(base, adapter, tmp_path / "merged")
    metadata = read_metadata(checkpoint, select_tasks(checkpoint, None, None))
    assert (metadata.pooling, metadata.normalize, metadata.max_tokens) == ("cls", False, 32)
    assert (dict(metadata.prompts)["query"], metadata.default_prompt) == ("Q: ", "query")


def test_adapter_with_other_vocabulary_is_rejected(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(llama / TOKENIZER_NAME))
    tokenizer.save(str(adapter / TOKENIZER_NAME))
    merged(llama, adapter, tmp_path / "equal")
    tokenizer.add_special_tokens(["<think>"])
    tokenizer.save(str(adapter / TOKENIZER_NAME))
    with pytest.raises(UnsupportedModel, match=r"`tokenizer.json` .* `<think>`") as caught:
        merged(llama, adapter, tmp_path / "other")
    assert "tokenizer.json" in caught.value.hint


def test_corrupt_tokenizer_of_adapter_is_rejected(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    (adapter / TOKENIZER_NAME).write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"`tokenizer.json` is corrupt"):
        merged(llama, adapter, tmp_path / "merged")


@pytest.mark.parametrize("head", [ModelHead.LABELS, ModelHead.TOKENS])
def test_adapter_replaces_head_of_another_size(head: ModelHead, tmp_path: Path) -> None:
    wide = ("A", "B", "C", "D", "E")
    base = tiny_checkpoint(tmp_path / "base", head=head, labels=wide, layers=1)
    torch.manual_seed(0)
    loader = getattr(transformers, LOADERS[head])
    small = loader.from_pretrained(base, num_labels=2, ignore_mismatched_sizes=True)
    shutil.copytree(base, tmp_path / "small")
    small.save_pretrained(tmp_path / "small")
    labels = ("NO", "YES")
    adapter = tiny_adapter(tmp_path / "adapter", tmp_path / "small", head=head, labels=labels)

    checkpoint = merged(base, adapter, tmp_path / "merged")
    assert read_metadata(checkpoint, select_tasks(checkpoint, None, None)).labels == labels
    theirs = PeftModel.from_pretrained(
        loader.from_pretrained(tmp_path / "small"), str(adapter)
    ).eval()
    ours = load_model(checkpoint.weights, head=head, dtype="float32")
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_random_weights_beside_the_adapter_are_rejected(tmp_path: Path) -> None:
    """Neither the base nor the adapter has weights of the head, so they would be random."""
    base = tiny_checkpoint(tmp_path / "base", layers=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    get_peft_model(model, LoraConfig(target_modules=["query"])).save_pretrained(
        tmp_path / "adapter"
    )
    write_json(tmp_path / "adapter" / "labels.json", ["NO", "YES"])
    with pytest.raises(UnsupportedModel, match=r"has no weights for `.*classifier"):
        merged(base, tmp_path / "adapter", tmp_path / "merged")


def test_base_with_wrong_sizes_is_rejected(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", head=ModelHead.SPAN, layers=1)
    adapter = tiny_adapter(tmp_path / "adapter", base, head=ModelHead.SPAN)
    config = json.loads((base / "config.json").read_text())
    write_json(base / "config.json", config | {"intermediate_size": 16})
    with pytest.raises(UnsupportedModel, match="transformers cannot load the base model"):
        merged(base, adapter, tmp_path / "merged")


def test_only_the_head_may_have_another_size(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", labels=("NO", "YES"), layers=1)
    adapter = tiny_adapter(tmp_path / "adapter", base, labels=("NO", "YES"))
    config = json.loads((base / "config.json").read_text())
    write_json(base / "config.json", config | {"max_position_embeddings": 16})
    with pytest.raises(UnsupportedModel, match=r"has no weights for `.*position_embeddings"):
        merged(base, adapter, tmp_path / "merged")


def test_adapter_of_other_sizes_is_rejected_with_both_shapes(
    llama: Path, adapter: Path, tmp_path: Path
) -> None:
    edit_adapter(adapter, {"r": 2})
    with pytest.raises(
        UnsupportedModel,
        match=r"`base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight` has the "
        r"shape \[4, \d+\], and the model needs \[2, \d+\]",
    ):
        merged(llama, adapter, tmp_path / "merged")


def test_adapter_that_peft_cannot_merge_is_rejected(llama: Path, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "lora_bias": True}
    adapter = decoder_adapter(tmp_path / "adapter", llama, options)
    with pytest.raises(UnsupportedModel, match=r"cannot be merged: .*lora_bias=True"):
        merged(llama, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": "x"}, "`r` is not a number"),
        ({"lora_alpha": [8]}, "`lora_alpha` is not a number"),
        ({"alpha_pattern": {".*": "x"}}, r"`alpha_pattern\.\.\*` is not a number"),
        ({"rank_pattern": [4]}, "`rank_pattern` is not an object"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "repeats layers of its base model"),
        ({"rank_pattern": {"(": 4}}, r"`\(` in `rank_pattern` is no pattern"),
        ({"target_modules": "("}, r"`adapter_config\.json` of the adapter `adapter` is invalid"),
        ({"target_parameters": "x"}, r"invalid: `target_parameters` must be a list"),
        ({"init_lora_weights": "x"}, "does not fit the model: Unknown initialization"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_config_of_adapter_is_rejected(
    llama: Path, adapter: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    edit_adapter(adapter, changes)
    with pytest.raises(UnsupportedModel, match=reason):
        merged(llama, adapter, tmp_path / "merged")


@pytest.mark.parametrize(("free", "warns"), [(10**5, True), (10**9, False)])
def test_merge_tells_first_if_memory_is_short(
    llama: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    warns: bool,
) -> None:
    monkeypatch.setattr("build_artifacts.workspaces.step_runner.free_bytes", lambda _: free)
    log = io.StringIO()
    (tmp_path / "work").mkdir()
    steps = StepRunner(Workspace(tmp_path / "work"), BuildProgress(log))
    source = Checkpoint(llama, ModelSource(ref="here", revision="1"), "local/model")
    merge_adapter(steps, source, read_adapter(adapter))
    steps.warn_of_memory(10**6)  # a build tells it once
    lines = [line for line in log.getvalue().splitlines() if "GB are free" in line]
    assert len(lines) == warns
    assert log.getvalue().splitlines()[0].startswith("  merge") != warns
