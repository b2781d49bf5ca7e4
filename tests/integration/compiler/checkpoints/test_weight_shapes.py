"""Weights that do not fit config.json, and configs whose values no model can have."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from build_artifacts.checkpoints import models
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.checks import check_checkpoint
from build_artifacts.checkpoints.models import find_unused_layers, load_model
from build_artifacts.compaction.plan import Compaction
from build_artifacts.decoders.reference import write_reference
from build_artifacts.encoders.preparation import COMPACTION_NAME, PreparedModel
from build_artifacts.errors import UnsupportedModel
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from build_artifacts.steps.unused_layers import report_unused_layers
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.decoder_families import EXPERTS, write_decoder
from tests.support.prepared_build import RecordingRunner
from tests.support.tiny_decoders import tiny_llama
from tests.support.tiny_encoders import tiny_checkpoint, write_json

MISFIT = "config.json and the weights do not fit"


def edit(path: Path, **values: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | values)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "llama")


def refuse(weights: Path, head: ModelHead = ModelHead.NEXT_TOKEN) -> UnsupportedModel:
    """Return the refusal of the loader."""
    with pytest.raises(UnsupportedModel) as caught:
        load_model(weights, head=head, dtype="float32")
    return caught.value


def test_weight_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    known = json.loads((llama / "config.json").read_bytes())["vocab_size"]
    edit(llama / "config.json", vocab_size=100)
    refusal = refuse(llama)
    reason = f"`lm_head.weight` has the shape [{known}, 64]; config.json requires [100, 64]"
    assert refusal.message == reason
    assert refusal.hint.startswith(MISFIT)


def test_head_with_another_number_of_labels_is_named(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, labels=("NO", "YES"))
    edit(source / "config.json", id2label={"0": "A", "1": "B", "2": "C"})
    message = refuse(source, ModelHead.LABELS).message
    assert message == "`classifier.bias` has the shape [2]; config.json requires [3]"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"intermediate_size": 2**40}, r"requires \[64, 1099511627776\]"),
        # Weights without a counterpart in the files get memory when they are initialized.
        ({"model_type": "gpt2", "n_inner": 2**40}, r"no weights for `transformer\."),
    ],
)
def test_config_of_a_model_beyond_any_memory_is_compared_with_the_weights(
    llama: Path, settings: dict[str, Any], reason: str
) -> None:
    edit(llama / "config.json", **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(llama, head=ModelHead.NEXT_TOKEN, dtype="float32")


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"attention_bias": True}, "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_hint_for_missing_weights_of_layers_names_the_config(
    llama: Path, settings: dict[str, Any], weight: str
) -> None:
    edit(llama / "config.json", **settings)
    refusal = refuse(llama)
    assert refusal.message == f"the checkpoint has no weights for `{weight}`"
    assert refusal.hint.startswith(MISFIT)


def test_hint_for_a_missing_head_and_pooler_names_the_task(tmp_path: Path) -> None:
    masks = tiny_checkpoint(tmp_path / "masks", head=ModelHead.MASKS)
    refusal = refuse(masks, ModelHead.LABELS)
    assert refusal.message.startswith("the checkpoint has no weights for `bert.pooler.")
    assert "--adapter" in refusal.hint


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pad_token_id": 100_000}, "Padding_idx must be within num_embeddings"),
        ({"num_key_value_heads": 0}, "integer"),
        ({"head_dim": 0}, "negative power"),
    ],
    ids=str,
)
def test_impossible_config_value_is_refused(
    llama: Path, settings: dict[str, Any], reason: str
) -> None:
    edit(llama / "config.json", **settings)
    with pytest.raises(UnsupportedModel, match=f"cannot load the checkpoint: .*{reason}"):
        load_model(llama, head=ModelHead.NEXT_TOKEN, dtype="float32")


def test_encoder_without_attention_heads_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, labels=("NO", "YES"))
    edit(source / "config.json", num_attention_heads=0)
    assert "cannot load the checkpoint: " in refuse(source, ModelHead.LABELS).message


def test_failed_load_leaves_no_workspace_to_resume(llama: Path, tmp_path: Path) -> None:
    edit(llama / "config.json", pad_token_id=100_000)
    with pytest.raises(UnsupportedModel, match="Padding_idx"):
        build(BuildRequest(ref=str(llama), store=tmp_path / "s"), BuildProgress(io.StringIO()))
    assert not [path for path in (tmp_path / "s" / ".building").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers"])
def test_number_beyond_any_model_is_refused_before_lists_of_it_are_created(
    llama: Path, name: str
) -> None:
    edit(llama / "config.json", **{name: 10**9})
    checkpoint = Checkpoint(llama, ModelSource(ref="here", revision="1"), "local/model")
    with pytest.raises(UnsupportedModel, match=f"corrupt: `{name}` is 1000000000; the limit is"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("file", "name"),
    [("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")],
)
def test_model_of_one_token_is_refused(llama: Path, file: str, name: str) -> None:
    edit(llama / file, **{name: 1})
    with pytest.raises(UnsupportedModel, match="a maximum of one token"):
        read_checkpoint_metadata(llama)
    edit(llama / file, **{name: 2})
    assert read_checkpoint_metadata(llama).max_tokens == 2


def test_sizes_that_torch_does_not_support_are_refused(tmp_path: Path) -> None:
    sizes = EXPERTS | {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}
    write_decoder("Qwen3MoeForCausalLM", tmp_path / "moe", sizes | {"moe_intermediate_size": 50})
    metadata = read_checkpoint_metadata(tmp_path / "moe")
    reason = "`Qwen3MoeForCausalLM` does not run in fp32 torch: strides"
    with pytest.raises(UnsupportedModel, match=reason):
        write_reference(tmp_path / "moe", metadata, tmp_path)


@pytest.mark.parametrize("is_encoder", [False, True])
def test_weights_of_layers_without_effect_are_noted(tmp_path: Path, is_encoder: bool) -> None:
    labels = ("NO", "YES")
    source = tiny_checkpoint(tmp_path, labels=labels) if is_encoder else tiny_llama(tmp_path)
    head = ModelHead.LABELS if is_encoder else ModelHead.NEXT_TOKEN
    assert find_unused_layers(source, head=head) == []
    edit(source / "config.json", num_hidden_layers=1)
    unused = find_unused_layers(source, head=head)
    assert unused
    assert all("layer" in name and ".1." in name for name in unused)

    runner = RecordingRunner(tmp_path / "building")
    report_unused_layers(runner.steps, source, read_checkpoint_metadata(source))
    expected = f"that its model does not have: `{unused[0]}` and {len(unused) - 1} others\n"
    assert runner.output.getvalue().endswith(expected)


def test_layers_of_a_checkpoint_that_cannot_be_loaded_are_not_compared(llama: Path) -> None:
    edit(llama / "config.json", hidden_act="geglu")
    assert find_unused_layers(llama, head=ModelHead.NEXT_TOKEN) == []


def test_prepared_model_is_not_compared_with_its_config_again(
    embedding_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compared again")

    monkeypatch.setattr(models, "_load_shapes", fail)
    compaction = Compaction(
        architecture="bert",
        reductions=(),
        heads_before=4,
        ffn_channels_before=128,
        parameters_before=1,
        parameters_after=1,
    )
    (tmp_path / COMPACTION_NAME).write_text(compaction.model_dump_json(), encoding="utf-8")
    metadata = read_checkpoint_metadata(embedding_source)
    prepared = PreparedModel(embedding_source, metadata, tmp_path, None)
    assert prepared.model("float32").config.model_type == "bert"
