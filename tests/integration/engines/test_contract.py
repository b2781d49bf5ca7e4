"""Contract of encoder engines, checked with the tiny model against hand-computed outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from deployments.artifacts.types import ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines import ENGINES, EncoderEngine, open_engine
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from tests.integration.engines.conftest import (
    KINDS,
    SETTINGS,
    ContractEngine,
    Written,
    spec_of,
)
from tests.support.artifacts import WIDTH
from tests.support.engine_programs import (
    MASK_TOKEN,
    NAN_WORD,
    WORDS,
    expected,
    write_model,
    write_onnx,
)
from tests.support.fakes import build_item, item
from tests.support.tiny_encoders import ENCODER_HEADS
from tests.support.toy_engine import TOY

# For fp32 sums of at most 20 values of size 1.
TOLERANCE = 1e-5
OpenTiny = Callable[[ModelHead], EncoderEngine]

ITEMS = (
    build_item([1, 2, MASK_TOKEN], second_segment_start=2),
    build_item([3]),
    build_item([5, MASK_TOKEN, 6, MASK_TOKEN, 7], second_segment_start=1),
    build_item(range(4, 12)),
    build_item([2, 2, 9, 8, 1]),
)


def test_engine_needs_its_packages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "toy", TOY)
    monkeypatch.setitem(ENGINES, "lost", replace(TOY, packages=("no_such",)))
    assert ContractEngine("toy", write_onnx).missing_package is None
    assert ContractEngine("lost", write_onnx).missing_package == "no_such"


def test_every_encoder_engine_is_checked() -> None:
    encoders = {name for name, kind in ENGINES.items() if kind.open_encoder is not None}
    assert {kind.engine for kind in KINDS.values()} == encoders


def check(engine: EncoderEngine, head: ModelHead, items: Sequence[TokenizedItem]) -> None:
    """Run the items in one pass and compare with the expected output of each item."""
    answers = engine.run(collate(items)).items
    assert len(answers) == len(items)
    for answer, (ids, second_segment_start) in zip(answers, items, strict=True):
        assert answer.dtype == np.float32
        np.testing.assert_allclose(
            answer, expected(head, ids, second_segment_start), atol=TOLERANCE
        )


@pytest.mark.parametrize("head", ENCODER_HEADS)
def test_answer_is_batch_invariant(open_tiny: OpenTiny, head: ModelHead) -> None:
    engine = open_tiny(head)
    for one in ITEMS:
        check(engine, head, [one])
    check(engine, head, ITEMS[:3])
    check(engine, head, ITEMS)


def test_batch_of_any_size_is_computed(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.TOKENS)
    for size in (1, 4, 5, 9):
        for length in (1, 4, 8, 16, 20):
            check(engine, ModelHead.TOKENS, [build_item(np.arange(length) % 10)] * size)


def test_item_without_mask_tokens_gets_empty_output(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.MASKS)
    (nothing,) = engine.run(collate([build_item([1, 2])])).items
    assert nothing.shape == (0, WIDTH)
    check(engine, ModelHead.MASKS, [build_item([1, 2]), item(MASK_TOKEN, 3)])


def test_more_masks_than_items_are_computed(open_tiny: OpenTiny) -> None:
    check(open_tiny(ModelHead.MASKS), ModelHead.MASKS, [item(MASK_TOKEN, 5), item(MASK_TOKEN, 4)])


def test_outputs_survive_the_next_pass(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.VECTOR)
    first = engine.run(collate([item(1)])).items[0]
    before = first.copy()
    engine.run(collate([item(2)]))
    np.testing.assert_array_equal(first, before)


def check_every_token(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> None:
    """Run a pooling model unpooled and compare the output of each token."""
    answers = engine.run(collate(items, unpooled=True)).items
    for answer, (ids, second_segment_start) in zip(answers, items, strict=True):
        assert answer.dtype == np.float32
        due = expected(ModelHead.TOKENS, ids, second_segment_start)
        np.testing.assert_allclose(answer, due, atol=TOLERANCE)


def test_pooling_model_supports_unpooled_batches(kind: ContractEngine, open_tiny: OpenTiny) -> None:
    if not kind.supports_unpooled:
        pytest.skip(f"{kind.engine} does not support unpooled batches")
    engine = open_tiny(ModelHead.VECTOR)
    assert engine.info.supports_unpooled
    check_every_token(engine, ITEMS[:1])
    check(engine, ModelHead.VECTOR, ITEMS)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda size: check_every_token(engine, ITEMS[:size]), [1, 2, 3, 5] * 4))
    check_every_token(engine, [build_item(np.arange(20) % 10)] * 9)
    check(engine, ModelHead.VECTOR, ITEMS[1:])


def test_unpooled_batch_without_support_fails(open_tiny: OpenTiny) -> None:
    # Embedding models of older builds do not support unpooled batches either.
    engine = open_tiny(ModelHead.LABELS)
    assert not engine.info.supports_unpooled
    with pytest.raises(EngineFailed):
        engine.run(collate(ITEMS, unpooled=True))


def test_closed_engine_rejects_unpooled_batches(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.VECTOR)
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(collate(ITEMS, unpooled=True))


@pytest.mark.parametrize("head", [ModelHead.VECTOR, ModelHead.TOKENS])
def test_nan_output_does_not_reach_other_items(open_tiny: OpenTiny, head: ModelHead) -> None:
    engine = open_tiny(head)
    bad = item(NAN_WORD, 2)
    answers = engine.run(collate([bad, ITEMS[0], bad])).items
    assert np.isnan(answers[0]).all()
    np.testing.assert_allclose(answers[1], expected(head, *ITEMS[0]), atol=TOLERANCE)


def test_run_is_thread_safe(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.TOKENS)

    def passes(word: int) -> None:
        for length in range(1, 16):
            check(engine, ModelHead.TOKENS, [item(word, length), item(word + 1)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(passes, range(8)))


def test_closed_engine_fails(open_tiny: OpenTiny) -> None:
    engine = open_tiny(ModelHead.VECTOR)
    engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        engine.run(collate([item(1)]))


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
def test_unreadable_file_is_named(
    kind: ContractEngine, content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "broken.graph"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineFailed, match=r"broken\.graph"):
        open_engine(spec_of(kind, path), SETTINGS)


def test_truncated_file_fails(kind: ContractEngine, written: Written, tmp_path: Path) -> None:
    path = tmp_path / "half.graph"
    content = written(kind, ModelHead.VECTOR).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(EngineFailed, match=r"half\.graph"):
        open_engine(spec_of(kind, path), SETTINGS)


def test_failed_pass_does_not_affect_the_next(kind: ContractEngine, open_tiny: OpenTiny) -> None:
    if not kind.rejects_unknown_tokens:
        pytest.skip(f"{kind.engine} computes unknown token ids")
    engine = open_tiny(ModelHead.VECTOR)
    with pytest.raises(EngineFailed, match="cpu-fp32") as failure:
        engine.run(collate([item(WORDS + 1)]))
    assert failure.value.__cause__ is not None
    check(engine, ModelHead.VECTOR, ITEMS[:1])


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        (("input_ids", "pixel_values"), "unknown input `pixel_values`"),
        (("attention_mask",), "no input `input_ids`"),
    ],
)
@pytest.mark.parametrize("kind", ["onnxruntime", "openvino"], indirect=True)
def test_graph_with_other_inputs_is_rejected(
    kind: ContractEngine, inputs: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "strange.graph"
    floats = [f"{name}_float" for name in inputs]
    nodes = [helper.make_node("Cast", [i], [f], to=1) for i, f in zip(inputs, floats, strict=True)]
    write_model(path, [*nodes, helper.make_node("Sum", floats, ["output"])], {}, inputs)
    with pytest.raises(EngineFailed, match=complaint):
        open_engine(spec_of(kind, path), SETTINGS)


def test_graph_with_another_output_shape_fails(kind: ContractEngine, written: Written) -> None:
    vector = written(kind, ModelHead.VECTOR)
    with (
        closing(open_engine(spec_of(kind, vector, ModelHead.TOKENS), SETTINGS)) as engine,
        pytest.raises(EngineFailed, match=r"expected at least \[2, 1, width\]"),
    ):
        engine.run(collate([item(1), item(2)]))
