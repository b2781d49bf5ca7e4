"""Parity and throughput of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.decoders.measurement import (
    LIMITS,
    compare_decoder,
    decode_texts,
    generate_answers,
    measure_throughput,
)
from build_artifacts.decoders.reference import DecoderReference, perplexity, summarize_logits
from deployments.artifacts.manifest import Gate
from deployments.engines.decoder import DecoderInfo, Logits, TokenColumn
from deployments.engines.onnx.decoder import OnnxDecoder
from tests.support.decoder_graphs import (
    ENDS,
    add_noise,
    build_reference,
    open_graph,
    tiny_graph,
)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_graph(tmp_path_factory.mktemp("measured") / "tiny.onnx")


@pytest.fixture(scope="module")
def reference(graph: Path) -> DecoderReference:
    return build_reference(graph)


def test_same_graph_has_perfect_parity(graph: Path, reference: DecoderReference) -> None:
    result = compare_decoder(open_graph(graph), reference, Gate())
    assert result.reasons == ()
    assert result.parity is not None
    assert result.parity.top1_agreement == 1.0
    assert result.parity.cosine_worst > 0.999999
    assert result.parity.batched_cosine_worst > 0.999999
    assert result.perplexity == pytest.approx(reference.perplexity(), rel=1e-4)


def test_corrupted_graph_violates_limits(
    tmp_path: Path, graph: Path, reference: DecoderReference
) -> None:
    other = add_noise(graph, tmp_path / "other.onnx", table="head", noise=0.5)
    result = compare_decoder(open_graph(other), reference, Gate())
    assert result.parity is not None
    assert result.parity.top1_agreement is not None
    assert result.parity.top1_agreement < 0.9
    assert any("next-token agreement" in reason for reason in result.reasons)


def test_corrupted_graph_is_rejected_if_no_position_of_the_reference_is_clear(
    tmp_path: Path, graph: Path, reference: DecoderReference
) -> None:
    never_clear = Gate(near_tie_margin=2.0)
    assert compare_decoder(open_graph(graph), reference, never_clear).reasons == ()
    other = add_noise(graph, tmp_path / "other.onnx", table="head", noise=0.5)
    result = compare_decoder(open_graph(other), reference, never_clear)
    assert any("next-token agreement" in reason for reason in result.reasons)


def test_nonfinite_logits_are_rejected(
    tmp_path: Path, graph: Path, reference: DecoderReference
) -> None:
    other = add_noise(graph, tmp_path / "other.onnx", table="down1", noise=float("nan"))
    anything = Gate(next_token_agreement=-1, perplexity_increase=1e9, batched_cosine_worst=-2)
    result = compare_decoder(open_graph(other), reference, anything)
    assert result.parity is None
    assert result.reasons == ("an output is not a finite number",)


@pytest.mark.parametrize("limit", Gate.model_fields)
def test_limits_match_effective_gate_fields(
    tmp_path: Path, graph: Path, reference: DecoderReference, limit: str
) -> None:
    other = add_noise(graph, tmp_path / "other.onnx", table="head", noise=0.5)
    usual = compare_decoder(open_graph(other), reference, Gate())
    extreme = Gate(**{limit: -0.9 if limit == "perplexity_increase" else 2.0})
    result = compare_decoder(open_graph(other), reference, extreme)
    assert (result != usual) == (limit in LIMITS)


class SlotSwappingDecoder:
    """Engine whose prefill is correct, but whose decode steps return logits of another slot."""

    def __init__(self, inner: OnnxDecoder) -> None:
        self._inner = inner
        self.info: DecoderInfo = inner.info

    def prefill(
        self, row: int, ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Logits:
        return self._inner.prefill(row, ids, start, all_logits=all_logits)

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        return np.roll(self._inner.decode(ids, lengths), 1, axis=0)

    def copy(self, source: int, target: int, tokens: int) -> None:
        self._inner.copy(source, target, tokens)

    def swap(self, first: int, second: int, tokens: int) -> None:
        self._inner.swap(first, second, tokens)

    def close(self) -> None:
        self._inner.close()


def test_batch_dependent_engine_is_rejected(graph: Path, reference: DecoderReference) -> None:
    result = compare_decoder(SlotSwappingDecoder(open_graph(graph)), reference, Gate())
    assert any("worst batched cosine" in reason for reason in result.reasons)
    assert any("next-token agreement" in reason for reason in result.reasons)


class NonfiniteSingleDecoder(SlotSwappingDecoder):
    """Engine with the logit `wrong` after the first token of a text, if it decodes one slot.

    Decode steps with several slots are correct.
    """

    def __init__(self, inner: OnnxDecoder, wrong: float) -> None:
        super().__init__(inner)
        self._wrong = wrong

    def decode(self, ids: TokenColumn, lengths: TokenColumn) -> Logits:
        logits = self._inner.decode(ids, lengths)
        if len(ids) == 1 and lengths[0] == 0:
            logits[0, 0] = self._wrong
        return logits


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nonfinite_single_logits_are_rejected(
    graph: Path, reference: DecoderReference, wrong: float
) -> None:
    result = compare_decoder(NonfiniteSingleDecoder(open_graph(graph), wrong), reference, Gate())
    assert result.parity is None
    assert result.reasons == ("an output is not a finite number",)


def test_decode_texts_covers_all_tokens(graph: Path, reference: DecoderReference) -> None:
    read = [(text, place) for left, place, _ in decode_texts(open_graph(graph), reference.texts)
            for text in left]  # fmt: skip
    expected = [
        (text, place) for text, ids in enumerate(reference.texts) for place in range(len(ids))
    ]
    assert sorted(read) == expected


def test_generate_answers_is_batch_invariant(graph: Path, reference: DecoderReference) -> None:
    prompts = reference.gate_inputs.prompts
    together = generate_answers(open_graph(graph), prompts, ENDS, 12)
    engine = open_graph(graph)
    for prompt, answer in zip(prompts, together, strict=True):
        ids = list(prompt)
        for token in answer:
            assert int(engine.prefill(0, ids, 0).argmax()) == token
            ids.append(token)
        assert len(answer) == 12 or answer[-1] in ENDS


def test_generate_answers_stops_at_eos(tmp_path: Path) -> None:
    graph = tiny_graph(tmp_path / "sure.onnx", saying=(1, 2, 3, ENDS[0]))
    assert generate_answers(open_graph(graph), [(9, 1), (2,)], ENDS, 12) == ((2, 3, 95), (3, 95))


def test_summarize_logits_matches_softmax() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], np.float32)) + 3
    result = summarize_logits(logits.astype(np.float32))
    assert result.choices.tolist() == [0, 2]
    np.testing.assert_allclose(result.gaps, [0.2, 0.7], atol=1e-6)
    np.testing.assert_allclose(result.log_totals, [3, 3], atol=1e-6)
    assert perplexity(-np.log([0.5, 0.125])) == pytest.approx(4.0)


def test_measure_throughput_fits_any_context(graph: Path) -> None:
    pace = measure_throughput(open_graph(graph), 0.05)
    assert min(pace.single, pace.batched, pace.prefill) > 0
    assert "tokens/s" in str(pace)
