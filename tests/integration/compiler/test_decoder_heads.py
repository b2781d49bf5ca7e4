"""Decoders with labels, and decoders whose logits rank texts, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_artifacts.checkpoints.adapter import Adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.encoders.reference_engine import TorchReferenceEngine
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.presets import CPU_INT8, GPU_FP16
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from deployments.artifacts.manifest import REFERENCE_NAME, ArtifactManifest, Gate, ModelSource
from deployments.artifacts.types import Device, TaskName
from deployments.messages import TokenizedItem
from deployments.tuning.parity import ReferenceOutputs, run_probes
from tests.support.decoder_artifacts import write_byte_tokenizer
from tests.support.prepared_build import LITTLE
from tests.support.tiny_decoders import tokenizer_config
from tests.support.tiny_encoders import write_json

HIDDEN, PADDING, YES, NO = 32, 0, 40, 50
TOKENS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, PADDING, 15], [16, 17, PADDING])
QUERY = "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}"
PAIR = f"Q: {QUERY} D: {QUERY.replace('query', 'document')}<|im_end|>"
LOGIT_SCORE = {"true_token_id": YES, "false_token_id": NO}


def write_decoder(
    directory: Path, architecture: str, model_type: str = "qwen3", **settings: Any
) -> Path:
    """Write a random decoder of two layers and its tokenizer. Return `directory`."""
    import torch
    import transformers

    vocabulary = write_byte_tokenizer(directory / "tokenizer.json").get_vocab_size()
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        **{"pad_token_id": PADDING, **settings},
    )
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    model.save_pretrained(directory)
    return directory


def write_reranker(directory: Path, model_type: str = "qwen3", **score: Any) -> Path:
    """Write a decoder with the modules of sentence-transformers that rank texts."""
    architecture = {"qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM"}[model_type]
    write_decoder(directory, architecture, model_type)
    (directory / "chat_template.jinja").write_text(PAIR, encoding="utf-8")
    kinds = [("", "base.modules.transformer.Transformer")]
    if score:
        kinds.append(("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore"))
        write_json(directory / "1_LogitScore" / "config.json", score)
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds]
    write_json(directory / "modules.json", modules)
    messages = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    write_json(directory / "sentence_bert_config.json", {"modality_config": {"message": messages}})
    return directory


def read(directory: Path, task: str | None = None) -> CheckpointMetadata:
    checkpoint = Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")
    return read_metadata(checkpoint, select_tasks(checkpoint, None, task))


def run(directory: Path, metadata: CheckpointMetadata, max_items: int) -> np.ndarray:
    model = load_model(directory, head=metadata.loaded_head, dtype="float32")
    items = [TokenizedItem(np.array(ids, np.int32), len(ids)) for ids in TOKENS]
    return np.array(run_probes(TorchReferenceEngine(model, metadata), items, max_items))


@pytest.mark.parametrize("padding", [PADDING, None])
def test_labels_are_those_of_transformers_alone_and_in_a_batch(
    padding: int | None, tmp_path: Path
) -> None:
    """transformers ignores tokens with the id of the padding, also at the end of a text."""
    import torch
    import transformers

    directory = write_decoder(tmp_path, "Qwen3ForSequenceClassification", pad_token_id=padding)
    metadata = read(directory)
    assert metadata.tasks == (TaskName.TEXT_CLASSIFICATION,)
    own = transformers.AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = [own(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in TOKENS]
    for max_items in (1, len(TOKENS)):
        np.testing.assert_allclose(run(directory, metadata, max_items), expected, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])  # gemma2 caps its logits
@pytest.mark.parametrize("false_token", [NO, None])
def test_score_is_the_difference_of_two_logits(
    model_type: str, false_token: int | None, tmp_path: Path
) -> None:
    import torch
    import transformers

    directory = write_reranker(tmp_path, model_type, true_token_id=YES, false_token_id=false_token)
    metadata = read(directory)
    assert metadata.tasks == (TaskName.TEXT_RANKING, TaskName.TEXT_CLASSIFICATION)
    assert (metadata.labels, metadata.output_width) == (("LABEL_0",), 1)
    own = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        logits = [own(input_ids=torch.tensor([ids])).logits[0, -1] for ids in TOKENS]
    expected = [[one[YES] - (0 if false_token is None else one[false_token])] for one in logits]
    for max_items in (1, len(TOKENS)):
        np.testing.assert_allclose(run(directory, metadata, max_items), expected, atol=1e-4)


def test_reranker_is_built_for_both_devices(tmp_path: Path, progress: BuildProgress) -> None:
    write_reranker(tmp_path / "model", **LOGIT_SCORE)
    data = tmp_path / "queries.jsonl"
    data.write_text('{"query": "a", "documents": ["b", "c d"], "relevant": [1]}\n')
    request = BuildRequest(
        ref=str(tmp_path / "model"),
        store=tmp_path / "store",
        recipe=BuildRecipe(candidates=(CPU_INT8, GPU_FP16), gate=Gate(metric_drop=200)),
        budget=replace(LITTLE, evaluation=data),
    )
    result = build(request, progress)
    manifest = ArtifactManifest.read(result.directory)
    assert {candidate.device for candidate in manifest.candidates} == set(Device)
    assert set(manifest.scores) == {"mrr", "ndcg@10"}
    assert manifest.pair_template is not None
    assert manifest.pair_template.join("a", "b") == "Q: a D: b<|im_end|>"
    reference = ReferenceOutputs.read(result.directory / REFERENCE_NAME)
    end = reference.items[0].ids[-1]
    assert all(item.ids[-1] == end for item in reference.items), "truncated texts keep the end"
    assert max(len(item.ids) for item in reference.items) == manifest.max_tokens


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ({"false_token_id": NO}, "no `true_token_id`"),
        ({"true_token_id": -1}, "`true_token_id` is -1"),
        ({"true_token_id": YES, "false_token_id": True}, "`false_token_id` is True"),
        ({"true_token_id": YES, "module_input_name": "logits"}, "reads `logits`"),
        ({}, "the tokenizer has no tokens `yes` and `no`"),
    ],
)
def test_unusable_score_is_refused(score: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_reranker(tmp_path, **score)
    with pytest.raises(UnsupportedModel, match=reason):
        read(tmp_path, TaskName.TEXT_RANKING)


def test_score_of_an_unknown_token_is_refused(tmp_path: Path) -> None:
    write_reranker(tmp_path, true_token_id=1_000_000)
    with pytest.raises(UnsupportedModel, match="reads the logit of token 1000000"):
        run(tmp_path, read(tmp_path), 1)


def test_end_of_the_text_must_fit(tmp_path: Path) -> None:
    write_reranker(tmp_path, **LOGIT_SCORE)
    settings = json.loads((tmp_path / "sentence_bert_config.json").read_bytes())
    write_json(tmp_path / "sentence_bert_config.json", {**settings, "max_seq_length": 1})
    with pytest.raises(UnsupportedModel, match="ends with 1 fixed tokens; the model reads 1"):
        read(tmp_path)


@pytest.mark.parametrize("task", [None, TaskName.TEXT_RANKING])
def test_label_decoder_reads_its_template_if_it_is_to_rank(
    task: TaskName | None, tmp_path: Path
) -> None:
    """A reward model has one label, and its chat template is for conversations."""
    write_decoder(tmp_path, "Qwen3ForSequenceClassification", num_labels=1)
    (tmp_path / "chat_template.jinja").write_text(PAIR, encoding="utf-8")
    metadata = read(tmp_path, task)
    assert TaskName.TEXT_RANKING in metadata.tasks
    assert (metadata.pair_template is not None) == (task is TaskName.TEXT_RANKING)
    assert metadata.logit_score is None


def test_labels_of_an_adapter_replace_the_logits(tmp_path: Path) -> None:
    directory = write_decoder(tmp_path / "base", "Qwen3ForCausalLM")
    adapter = Adapter(tmp_path, "0" * 64, TaskName.TEXT_CLASSIFICATION, ("a", "b", "c"))
    checkpoint = Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")
    with pytest.raises(UnsupportedModel, match="ranking requires a model with 1 score"):
        select_tasks(checkpoint, adapter, TaskName.TEXT_RANKING)


def test_decoder_ranks_only_by_request(tmp_path: Path) -> None:
    write_decoder(tmp_path, "Qwen3ForCausalLM")
    write_byte_tokenizer(tmp_path / "tokenizer.json", ["yes", "no"])
    assert read(tmp_path).tasks == (TaskName.TEXT_GENERATION,)
    metadata = read(tmp_path, TaskName.TEXT_RANKING)
    assert metadata.logit_score is not None
    assert metadata.pair_template is not None
    assert metadata.pair_template.instruction, "the text of Qwen3's rerankers"
