"""Removal of constant heads and feed-forward channels from pruned encoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from build_artifacts.compaction.apply import CompactionMismatch, compact
from build_artifacts.compaction.find import find_compaction
from build_artifacts.compaction.layouts import LAYOUTS
from build_artifacts.compaction.plan import Compaction, LayerReduction
from tests.support import pruned_checkpoints
from tests.support.pruned_checkpoints import (
    ATTENTION_HEADS,
    ROWS,
    answers,
    encoder,
    layer,
    pruned_encoder,
    size,
)
from tests.support.tiny_encoders import tiny_checkpoint

# For outputs of magnitude 1. The summation order changes their last digits.
TOLERANCE = 1e-5
HALF_TOLERANCE = 1e-2  # float16 has three digits

BOTH = ("bert", "distilbert")
PRUNED = tuple(
    LayerReduction(layer=i, heads=heads, ffn_channels=ffn_channels)
    for i, (heads, ffn_channels) in enumerate(pruned_checkpoints.PRUNED)
)

CASES: list[tuple[pruned_checkpoints.Prune, tuple[int, ...], tuple[int, ...]]] = [
    (pruned_checkpoints.ignored_heads, (1, 3), ()),
    (pruned_checkpoints.blind_heads, (0, 2), ()),
    (pruned_checkpoints.half_blind_half_ignored_head, (1,), ()),
    (pruned_checkpoints.blind_rows, (), tuple(range(8, 40))),
    (pruned_checkpoints.ignored_rows, (), (0, 1, 2, 3, 63)),
    # One head and one channel remain: an empty matrix cannot be exported.
    (pruned_checkpoints.everything, tuple(range(1, ATTENTION_HEADS)), tuple(range(1, ROWS))),
]


@pytest.mark.parametrize("model_type", BOTH)
@pytest.mark.parametrize(
    ("prune", "heads", "ffn_channels"), CASES, ids=[c[0].__name__ for c in CASES]
)
def test_compaction_preserves_outputs(
    model_type: str,
    prune: pruned_checkpoints.Prune,
    heads: tuple[int, ...],
    ffn_channels: tuple[int, ...],
) -> None:
    model = encoder(model_type)
    prune(layer(model, 1))
    before, parameters = answers(model), size(model)
    compaction = find_compaction(model)
    assert compaction.reductions == (
        LayerReduction(layer=1, heads=heads, ffn_channels=ffn_channels),
    )
    assert compact(model, compaction) is model
    assert (
        layer(model, 1).value.weight.shape[0]
        == (ATTENTION_HEADS - len(heads)) * pruned_checkpoints.WIDTH
    )
    assert layer(model, 1).ffn_down.weight.shape[1] == ROWS - len(ffn_channels)
    assert compaction.parameters_before == parameters
    assert compaction.parameters_after == size(model) < parameters
    np.testing.assert_allclose(answers(model), before, rtol=0, atol=TOLERANCE)
    assert find_compaction(model).is_empty


@pytest.mark.parametrize("model_type", sorted(LAYOUTS))
def test_every_layout_compacts(model_type: str) -> None:
    assert find_compaction(encoder(model_type)).is_empty
    model = pruned_encoder(model_type)
    before = answers(model)
    compaction = find_compaction(model)
    assert compaction.reductions == PRUNED
    assert (compaction.heads_before, compaction.heads_after) == (
        pruned_checkpoints.LAYERS * ATTENTION_HEADS,
        5,
    )
    assert (compaction.ffn_channels_before, compaction.ffn_channels_after) == (
        pruned_checkpoints.LAYERS * ROWS,
        91,
    )
    compact(model, compaction)
    assert size(model) == compaction.parameters_after
    np.testing.assert_allclose(answers(model), before, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["AutoModelForSequenceClassification", "AutoModelForMaskedLM"])
@pytest.mark.parametrize("model_type", BOTH)
def test_every_model_head_compacts(model_type: str, kind: str) -> None:
    model = pruned_encoder(model_type, kind)
    before = answers(model)
    compaction = find_compaction(model)
    assert compaction.reductions == PRUNED
    compact(model, compaction)
    # The absolute tolerance is ten times higher, because logits have magnitude 10.
    np.testing.assert_allclose(answers(model), before, rtol=TOLERANCE, atol=10 * TOLERANCE)


def test_eager_attention_compacts() -> None:
    model = pruned_encoder("bert", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    before = answers(model)
    np.testing.assert_allclose(
        answers(compact(model, find_compaction(model))), before, rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("model_type", BOTH)
def test_constants_move_into_biases(model_type: str) -> None:
    model = encoder(model_type)
    first = layer(model, 0)
    pruned_checkpoints.blind_heads(first)
    pruned_checkpoints.blind_rows(first)
    before = answers(model)
    biases = [linear.bias.detach().clone() for linear in (first.attention_output, first.ffn_down)]
    compact(model, find_compaction(model))
    for linear, bias in zip((first.attention_output, first.ffn_down), biases, strict=True):
        folded, linear.bias.data = linear.bias.data, bias
        assert np.abs(answers(model) - before).max() > 1000 * TOLERANCE
        linear.bias.data = folded


@pytest.mark.parametrize("model_type", BOTH)
@pytest.mark.parametrize("projections", [("query",), ("key",), ("query", "key")])
def test_heads_with_zero_queries_or_keys_remain(
    model_type: str, projections: tuple[str, ...]
) -> None:
    model = encoder(model_type)
    for name in projections:
        pruned_checkpoints.zero_rows(getattr(layer(model, 0), name), pruned_checkpoints.channels(1))
    assert find_compaction(model).is_empty


def test_nearly_constant_channels_remain() -> None:
    model = encoder("bert")
    first = layer(model, 0)
    pruned_checkpoints.zero_rows(first.value, pruned_checkpoints.channels(1)[:-1])
    pruned_checkpoints.zero_columns(first.attention_output, pruned_checkpoints.channels(2)[1:])
    pruned_checkpoints.zero_rows(first.ffn_up, [5])
    first.ffn_up.weight.data[5, 0] = 1e-30
    assert find_compaction(model).is_empty


@pytest.mark.parametrize("model_type", ["albert", "modernbert"])
def test_unknown_architecture_has_empty_compaction(model_type: str) -> None:
    model = encoder(model_type)
    for name, parameter in model.named_parameters():
        if not name.startswith("embeddings"):
            parameter.data.zero_()
    compaction = find_compaction(model)
    assert compaction.is_empty
    assert compaction.heads_before == compaction.ffn_channels_before == 0
    assert compaction.parameters_before == compaction.parameters_after == size(model)
    assert compaction.describe() == "nothing to remove"
    assert size(compact(model, compaction)) == compaction.parameters_after


def test_unexpected_layer_is_unchanged() -> None:
    import torch

    model = pruned_encoder("bert")
    layer(model, 1).ffn_up.__class__ = type("Quantized", (torch.nn.Linear,), {})
    assert find_compaction(model).is_empty


def test_compaction_applies_after_reload(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    source = tiny_checkpoint(tmp_path / "dense", model_type="distilbert")
    dense = AutoModel.from_pretrained(source)
    assert find_compaction(dense).is_empty
    heads = dense.config.n_heads
    pruned_checkpoints.zero_rows(layer(dense, 0).value, range(dense.config.dim // heads))
    pruned_checkpoints.blind_rows(layer(dense, 1))
    dense.save_pretrained(tmp_path / "pruned")

    def loaded(dtype: torch.dtype) -> pruned_checkpoints.TorchModel:
        return AutoModel.from_pretrained(tmp_path / "pruned", dtype=dtype).eval()

    expected = answers(loaded(torch.float32))
    found = Compaction.model_validate_json(find_compaction(dense).model_dump_json())
    assert [(reduction.heads, len(reduction.ffn_channels)) for reduction in found.reductions] == [
        ((0,), 0),
        ((), 32),
    ]
    first, second = (answers(compact(loaded(torch.float32), found)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected, rtol=0, atol=TOLERANCE)
    half = compact(loaded(torch.float16), found)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    np.testing.assert_allclose(answers(half), expected, rtol=0, atol=HALF_TOLERANCE)


def test_compaction_round_trips_json() -> None:
    compaction = find_compaction(pruned_encoder("bert"))
    assert Compaction.model_validate_json(compaction.model_dump_json()) == compaction
    with pytest.raises(ValidationError, match="frozen"):
        compaction.architecture = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "reduction",
    [
        {"layer": 0},
        {"layer": 0, "heads": [1, 1]},
        {"layer": 0, "ffn_channels": [3, 2]},
        {"layer": 0, "heads": [-1]},
        {"layer": -1, "heads": [1]},
        {"layer": 0, "heads": [1], "columns": [1]},
    ],
)
def test_invalid_reduction_is_rejected(reduction: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LayerReduction.model_validate(reduction)


def test_reductions_must_ascend() -> None:
    found = find_compaction(pruned_encoder("bert")).model_dump()
    for reductions in (found["reductions"][::-1], found["reductions"][:1] * 2):
        with pytest.raises(ValidationError, match="ascend"):
            Compaction.model_validate({**found, "reductions": reductions})


def test_describe_has_one_line() -> None:
    large = Compaction(
        architecture="bert",
        reductions=(
            LayerReduction(layer=0, heads=tuple(range(31)), ffn_channels=tuple(range(5_120))),
        ),
        heads_before=72,
        ffn_channels_before=9_216,
        parameters_before=22_713_216,
        parameters_after=14_081_664,
    )
    assert large.describe() == (
        "removed 31 of 72 heads and 5,120 of 9,216 feed-forward channels: "
        "22.7 M -> 14.1 M parameters"
    )
    small = large.model_copy(update={"parameters_before": 30_752, "parameters_after": 9_001})
    assert small.describe().endswith(": 30,752 -> 9,001 parameters")


MISFITS: list[tuple[str, str, Callable[[Compaction], dict[str, Any]]]] = [
    ("another architecture", "is for `bert`, the model is `distilbert`", lambda c: {}),
    ("another size", "is for 7 parameters", lambda c: {"parameters_before": 7}),
    ("no such layer", "names layer 2, the model has 2",
     lambda c: {"reductions": (*c.reductions, LayerReduction(layer=2, heads=(0,)))}),
    ("a head in use", r"removes heads of layer 0 that the model needs: \[2\]",
     lambda c: {"reductions": (LayerReduction(layer=0, heads=(1, 2)),)}),
    ("no such head", r"needs: \[4\]",
     lambda c: {"reductions": (LayerReduction(layer=0, heads=(4,)),)}),
    ("a channel in use", r"removes feed-forward channels of layer 1 that the model needs: \[7\]",
     lambda c: {"reductions": (*c.reductions[:1], LayerReduction(layer=1, ffn_channels=(0, 7)))}),
]  # fmt: skip


@pytest.mark.parametrize(("why", "sentence", "change"), MISFITS, ids=[case[0] for case in MISFITS])
def test_mismatched_compaction_changes_nothing(
    why: str, sentence: str, change: Callable[[Compaction], dict[str, Any]]
) -> None:
    compaction = find_compaction(pruned_encoder("bert"))
    model = pruned_encoder("distilbert" if why == "another architecture" else "bert")
    before, parameters = answers(model), size(model)
    with pytest.raises(CompactionMismatch, match=sentence) as caught:
        compact(model, compaction.model_copy(update=change(compaction)))
    assert caught.value.code == "compaction_mismatch"
    assert caught.value.hint
    assert size(model) == parameters
    np.testing.assert_array_equal(answers(model), before)


def test_compaction_of_all_heads_is_rejected() -> None:
    model = encoder("bert")
    pruned_checkpoints.everything(layer(model, 0))
    whole = find_compaction(model).model_copy(
        update={"reductions": (LayerReduction(layer=0, heads=(0, 1, 2, 3)),)}
    )
    with pytest.raises(CompactionMismatch, match="removes all 4 heads of layer 0"):
        compact(model, whole)


def test_second_compaction_is_rejected() -> None:
    model = pruned_encoder("bert")
    compaction = find_compaction(model)
    compact(model, compaction)
    with pytest.raises(CompactionMismatch, match="parameters"):
        compact(model, compaction)


@pytest.mark.parametrize("model_type", BOTH)
def test_compacted_graph_is_smaller(tmp_path: Path, model_type: str) -> None:
    model = pruned_encoder(model_type)
    whole = pruned_checkpoints.exported(model, tmp_path / "whole.onnx", opset_version=23)
    expected = pruned_checkpoints.graph_answers(whole)
    compaction = find_compaction(model)
    graph = pruned_checkpoints.exported(
        compact(model, compaction), tmp_path / "compact.onnx", opset_version=23
    )
    np.testing.assert_allclose(
        pruned_checkpoints.graph_answers(graph), expected, rtol=0, atol=TOLERANCE
    )
    weights = 4 * (compaction.parameters_before - compaction.parameters_after)
    assert whole.stat().st_size - graph.stat().st_size == pytest.approx(weights, rel=0.1)


# mpnet adds a bias per head to attention scores; deberta-v2 projects positions per head.
@pytest.mark.parametrize("model_type", ["mpnet", "deberta-v2"])
def test_heads_with_relative_positions_export(tmp_path: Path, model_type: str) -> None:
    model = pruned_encoder(model_type)
    expected = answers(model)
    graph = pruned_checkpoints.exported(
        compact(model, find_compaction(model)), tmp_path / "g.onnx", opset_version=23
    )
    np.testing.assert_allclose(
        pruned_checkpoints.graph_answers(graph), expected, rtol=0, atol=TOLERANCE
    )


def test_compacted_model_exports_fused_attention_in_half_precision(tmp_path: Path) -> None:
    import onnx
    import torch

    model = pruned_encoder("bert")
    expected = answers(model)
    compaction = find_compaction(model)
    half = compact(model.to(torch.float16), compaction)
    graph = pruned_checkpoints.exported(half, tmp_path / "fused.onnx", ort_fusions="cuda")
    fused = [n for n in onnx.load(graph).graph.node if n.op_type == "MultiHeadAttention"]
    assert [a.i for n in fused for a in n.attribute if a.name == "num_heads"] == [2, 3]
    np.testing.assert_allclose(
        pruned_checkpoints.graph_answers(graph), expected, rtol=0, atol=HALF_TOLERANCE
    )
