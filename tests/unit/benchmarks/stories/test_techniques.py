"""Steps of story a that generate text, with a tiny decoder and with scripted systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.common.agreement import CosineCheck
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.generation.results import AnswerAgreement
from benchmarks.generation.scenarios import PromptSampler
from benchmarks.generation.streams import StreamGroup
from benchmarks.stories import techniques
from benchmarks.stories.techniques import (
    STREAMS,
    GenerationStep,
    TechniqueResults,
    compare_answers,
    open_generation_steps,
    require_correct,
)
from build_artifacts.types import Tokens
from tests.support.benchmark_generation import answer
from tests.support.decoder_artifacts import DECODER, seal_tiny_decoder

PROMPTS = tuple((n, n + 1) for n in range(STREAMS))


@dataclass(frozen=True)
class ShiftedSystem:
    """System that counts up from the last token of a prompt. Answers of other shifts differ."""

    shift: int = 0
    name, max_streams = "shifted", None

    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        times = [float(n) for n in range(1, new_tokens + 1)]
        ids = [range(p[-1] + self.shift, p[-1] + self.shift + new_tokens) for p in prompts]
        return StreamGroup(tuple(answer(times, ids=tuple(each)) for each in ids))


class BatchDependentSystem(ShiftedSystem):
    def run(self, prompts: Sequence[Tokens], new_tokens: int) -> StreamGroup:
        return ShiftedSystem(len(prompts) - 1).run(prompts, new_tokens)


RESULTS = TechniqueResults(
    embedder="org/embedder",
    generator="org/decoder",
    sentences="words",
    requests=1,
    distinct=1,
    note="",
    embedding=(),
    generation=(),
    served_per_s=None,
    checks=(CosineCheck("served", 4, 0.999, 0.99),),
    agreements=(AnswerAgreement("other weights", 8, 2, 12.5),),
)


def step(name: str, system: ShiftedSystem, streams: int = 1) -> GenerationStep:
    return GenerationStep(name, "what", system, streams)


def test_repeated_prompts_are_not_taken_from_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(techniques, "SourceCheckpoint", lambda *_: SimpleNamespace(weights=None))
    monkeypatch.setattr(techniques, "TransformersSystem", lambda *_, **__: ShiftedSystem())
    seal_tiny_decoder(tmp_path)
    model = LocalModel.open(tmp_path, DECODER)
    prompts = PromptSampler.open(model, 0).sample_prompts([40] * STREAMS)
    with open_generation_steps(model, tmp_path) as steps:
        ours = [each for each in steps if not isinstance(each.system, ShiftedSystem)]
        answers = [a for each in (*ours, *ours) for a in each.answer(prompts)]
        alone, together = (each.answer(prompts) for each in ours)
    assert [each.streams for each in ours] == [1, STREAMS]
    assert {each.cached_tokens for each in answers} == {0}
    assert [each.ids for each in alone] == [each.ids for each in together]


def test_answers_are_compared_with_the_first_step_and_within_a_system() -> None:
    ours = ShiftedSystem()
    steps = [step("naive", ShiftedSystem()), step("graph", ours), step("slots", ours, STREAMS)]
    compared = compare_answers(steps, PROMPTS)
    assert [(each.what, each.same, each.must_be_equal) for each in compared] == [
        ("graph and naive", STREAMS, False),
        ("slots and naive", STREAMS, False),
        ("slots and graph", STREAMS, True),
    ]
    require_correct(replace(RESULTS, agreements=compared))


def test_other_answers_are_rejected() -> None:
    compared = compare_answers(
        [step("naive", ShiftedSystem()), step("w", ShiftedSystem(1))], PROMPTS
    )
    with pytest.raises(BenchmarkError, match="w and naive: 0 of 8 answers are equal"):
        require_correct(replace(RESULTS, agreements=compared))


def test_answers_that_depend_on_the_batch_are_rejected() -> None:
    ours = BatchDependentSystem()
    compared = compare_answers([step("graph", ours), step("slots", ours, STREAMS)], PROMPTS)
    assert compared[-1].is_wrong


def test_other_embeddings_are_rejected() -> None:
    require_correct(RESULTS)
    with pytest.raises(BenchmarkError, match=r"served: worst cosine 0\.9000"):
        require_correct(replace(RESULTS, checks=(CosineCheck("served", 4, 0.9, 0.99),)))
