"""Story a, "10 and 100 times" in docs/stories.md: each step adds a technique to the previous step.

Embedding requests have one sentence each; some repeat. Generation requests have one prompt each.
All steps run in this process, one after the other in every round. A server over HTTP is measured
separately.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.common.agreement import CosineCheck, local_expectation, require_agreement
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import build_inference_body, model_path
from benchmarks.common.local_model import LocalModel
from benchmarks.common.plots import COLORS, create_figure, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number, log_progress
from benchmarks.common.serve_config import build_encoder_config
from benchmarks.common.source_checkpoint import SourceCheckpoint
from benchmarks.common.statistics import RoundSummary, summarize
from benchmarks.generation.in_process import InProcessGenerator
from benchmarks.generation.other_engines import TransformersSystem
from benchmarks.generation.results import AnswerAgreement
from benchmarks.generation.scenarios import PromptSampler
from benchmarks.generation.streams import StreamingSystem, StreamResult, System
from benchmarks.servers.own_server import start_server
from benchmarks.serving.load import LoadPlan, Workload, run_load
from benchmarks.stories.encoder_steps import EncoderStep
from build_artifacts.types import Tokens
from deployments.config import SchedulingSettings
from deployments.host.machine import usable_cores

REQUESTS = 150  # number of requests with one sentence each
ZIPF_EXPONENT = 1.0
STREAMS = 8  # number of concurrent prompts of the last generation step
PROMPT_TOKENS, NEW_TOKENS = 64, 24  # tokens per prompt and per answer
CONNECTIONS = 64  # connections to the server that is measured over HTTP
LOAD_S = 3.0  # seconds of load on that server in each round
_SINGLE_PROMPTS = 2  # prompts of each step that generates sequentially

Measurement = Callable[[], float]  # requests or tokens per second


@dataclass(frozen=True, slots=True)
class StepRate:
    """Throughput of one step of the story, in requests or tokens per second."""

    name: str
    what: str
    per_s: RoundSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueResults:
    """Results of story a. Every step adds a technique to the previous step."""

    embedder: str
    generator: str | None
    sentences: str
    requests: int
    distinct: int  # number of distinct texts among the requests
    note: str
    embedding: tuple[StepRate, ...]
    generation: tuple[StepRate, ...]
    served_per_s: RoundSummary | None  # requests/s over HTTP, without the response cache
    checks: tuple[CosineCheck, ...]  # embeddings of the steps and of the server
    agreements: tuple[AnswerAgreement, ...]  # generated answers of the steps


def sample_requests(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw texts from a Zipf distribution over a random ranking of the texts."""
    rng = np.random.default_rng(seed)
    distinct = list(dict.fromkeys(texts))
    weights = 1.0 / np.arange(1, len(distinct) + 1) ** ZIPF_EXPONENT
    drawn = rng.choice(len(distinct), size=count, p=weights / weights.sum())
    ranks = rng.permutation(len(distinct))
    return [distinct[int(ranks[i])] for i in drawn]


def build_measurements(
    steps: Sequence[EncoderStep], texts: Sequence[str]
) -> dict[str, Measurement]:
    return {step.name: partial(_measure_rate, step, texts) for step in steps}


def _measure_rate(step: EncoderStep, texts: Sequence[str]) -> float:
    return len(texts) / step.time_requests(texts)


def run_rounds(measurements: Mapping[str, Measurement], rounds: int) -> dict[str, RoundSummary]:
    """Run every measurement once per round, after a warm-up run of each."""
    for measure in measurements.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(1, rounds + 1):
        for name, measure in measurements.items():
            values[name].append(measure())
            log_progress(f"round {number}/{rounds}: {name}, {values[name][-1]:.1f} per s")
    return {name: summarize(found) for name, found in values.items()}


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One way to generate answers: a system and its number of concurrent prompts."""

    name: str
    what: str
    system: System
    streams: int  # number of concurrent prompts

    def tokens_per_s(self, prompts: Sequence[Tokens]) -> float:
        if self.streams > 1:
            return self.system.run(prompts[: self.streams], NEW_TOKENS).tokens_per_s
        groups = [self.system.run([p], NEW_TOKENS) for p in prompts[:_SINGLE_PROMPTS]]
        return float(np.median([group.tokens_per_s for group in groups]))

    def answer(self, prompts: Sequence[Tokens]) -> list[StreamResult]:
        """Answer all prompts, `streams` at a time."""
        starts = range(0, len(prompts), self.streams)
        groups = [self.system.run(prompts[s : s + self.streams], NEW_TOKENS) for s in starts]
        return [answer for group in groups for answer in group.answers]


@contextmanager
def open_generation_steps(model: LocalModel, scratch: Path) -> Iterator[list[GenerationStep]]:
    """Open every step of a generative model. Raises ServeError if a step cannot open."""
    threads = usable_cores()
    config = model.manifest.generation_config
    if config is None:
        raise BenchmarkError(
            f"`{model.manifest.id}` does not generate text", hint="name one with --generator ID"
        )
    weights = SourceCheckpoint(model, None, scratch).weights
    ends = config.eos_token_ids
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        generator = InProcessGenerator(
            model,
            kv_slots=STREAMS,
            threads=threads,
            events=runner.get_loop(),
            scheduling=SchedulingSettings(max_draft_tokens=0),
        )
        stack.callback(generator.close)
        # All rounds and steps have the same prompts, and transformers prefills them in every run.
        # With a new scope of the prefix cache for each run, our engine does too.
        ours = StreamingSystem("ours", generator, runner, scopes=map(str, count()))
        without = TransformersSystem(weights, ends, threads, use_kv_cache=False)
        precision = model.candidate.precision
        yield [
            GenerationStep(
                "naive", "transformers, bf16, no KV cache, one answer at a time", without, 1
            ),
            GenerationStep(
                "KV cache", "transformers, bf16", TransformersSystem(weights, ends, threads), 1
            ),
            GenerationStep("graph, fusion, quantization", f"the served {precision} graph", ours, 1),
            GenerationStep("slots", f"{STREAMS} answers at the same time", ours, STREAMS),
        ]


def measure_generation(
    model: LocalModel, scratch: Path, rounds: int, seed: int
) -> tuple[tuple[StepRate, ...], tuple[AnswerAgreement, ...]]:
    """Measure tokens per second of every step, then compare answers.

    Raises ServeError if a step fails.
    """
    prompts = PromptSampler.open(model, seed).sample_prompts([PROMPT_TOKENS] * STREAMS)
    with open_generation_steps(model, scratch) as steps:
        rates = run_rounds({s.name: partial(s.tokens_per_s, prompts) for s in steps}, rounds)
        measured = tuple(StepRate(step.name, step.what, rates[step.name]) for step in steps)
        return measured, compare_answers(steps, prompts)


def compare_answers(
    steps: Sequence[GenerationStep], prompts: Sequence[Tokens]
) -> tuple[AnswerAgreement, ...]:
    """Compare the answers of each step with those of the first step.

    If a step has the system of the step before, only the number of streams differs: then the
    answers of the two must be equal.
    """
    agreements: list[AnswerAgreement] = []
    first = previous = steps[0].answer(prompts)
    for earlier, step in pairwise(steps):
        answers = step.answer(prompts)
        pairs = list(zip(answers, first, strict=True))
        agreements.append(AnswerAgreement.compare(f"{step.name} and {steps[0].name}", pairs))
        if step.system is earlier.system:
            pairs = list(zip(answers, previous, strict=True))
            what = f"{step.name} and {earlier.name}"
            agreements.append(AnswerAgreement.compare(what, pairs, must_be_equal=True))
        previous = answers
    return tuple(agreements)


def measure_served(
    model: LocalModel, texts: Sequence[str], arguments: argparse.Namespace, root: Path
) -> tuple[RoundSummary, CosineCheck]:
    """Measure requests/s of a server with one model and CONNECTIONS connections.

    Also compare the first response to each request with the engine in this process. The config of
    the server goes to `root`. Raises BenchmarkError if a request fails.
    """
    config = build_encoder_config(arguments.store, [model.manifest.id], {}).write(root)
    shuffled = random.Random(arguments.seed).sample(texts, len(texts))
    with start_server(config, arguments.out) as server:
        path = model_path(model.manifest.id)
        bodies = [build_inference_body(text) for text in shuffled]
        requests = [server.address.build_post(path, body) for body in bodies]
        workload = Workload(requests, sample=range(len(requests)))
        plan = LoadPlan(connections=CONNECTIONS, seconds=LOAD_S)
        rounds = range(arguments.rounds)
        results = [uvloop.run(run_load(server.address, workload, plan)) for _ in rounds]
    if failures := [dict(r.failures) for r in results if r.failures]:
        raise BenchmarkError(f"requests failed: {failures}", hint="see the server's log")
    expected = local_expectation(model, usable_cores())
    check = expected.compare(shuffled, [workload.responses])
    return summarize([result.requests_per_s for result in results]), check


def require_correct(results: TechniqueResults) -> None:
    """Raise BenchmarkError if embeddings or generated answers differ more than they may."""
    require_agreement(results.checks)
    for agreement in results.agreements:
        if not agreement.is_comparable:
            raise BenchmarkError(
                f"the answers are wrong, so the timings are invalid: {agreement.sentence}",
                hint="see the tests of the generation scheduler"
                if agreement.must_be_equal
                else "build the model again",
            )


def build_tables(results: TechniqueResults) -> list[Table]:
    tables = [Table("sentences", *_build_rows(results.embedding, "requests/s"))]
    if results.served_per_s is not None:
        first = results.embedding[0].per_s.median
        served = results.served_per_s.median
        tables.append(
            Table(
                "served",
                ["", "requests/s", "naive, times"],
                [[f"over HTTP, {CONNECTIONS} connections, without the cache",
                  format_number(served), f"{served / first:.0f}"]],
            )
        )  # fmt: skip
    if results.generation:
        tables.append(Table("generation", *_build_rows(results.generation, "tokens/s")))
    compared = [check.sentence for check in results.checks]
    compared += [agreement.sentence for agreement in results.agreements]
    return [*tables, Table("answers", ["compared answers"], [[sentence] for sentence in compared])]


def _build_rows(steps: Sequence[StepRate], unit: str) -> tuple[list[str], list[list[str]]]:
    header = ["technique", "what", unit, "this step, times", "all steps, times"]
    first, previous = steps[0].per_s.median, steps[0].per_s.median
    rows = []
    for step in steps:
        rate = step.per_s.median
        factors = [f"{rate / previous:.2f}", f"{rate / first:.1f}"]
        rows.append([step.name, step.what, format_number(rate, 1), *factors])
        previous = rate
    return header, rows


def plot_techniques(out: Path, run: RunMetadata, results: TechniqueResults) -> list[Path]:
    """Plot embedding and generation steps as waterfall charts. Return the paths."""
    title = "A naive deployment and ours, technique by technique"
    figure, (sentences, tokens) = create_figure(run, title, (11, 4.6))
    _draw_waterfall(sentences, results.embedding, "requests per second")
    if results.generation:
        _draw_waterfall(tokens, results.generation, "tokens per second")
    return save_figure(figure, out, run)


def _draw_waterfall(axes: Any, steps: Sequence[StepRate], unit: str) -> None:
    """Draw the gain of each step on a logarithmic axis, where equal factors have equal heights."""
    rates = [step.per_s.median for step in steps]
    floor = rates[0] / 2
    for position, rate in enumerate(rates):
        bottom = rates[position - 1] if position else floor
        low, high = min(bottom, rate), max(bottom, rate)
        color = COLORS[0] if rate >= bottom else COLORS[5]
        axes.bar(position, high - low, bottom=low, color=color if position else COLORS[6])
        axes.annotate(f"{rate / rates[0]:.1f}", (position, high), ha="center", va="bottom")
    names = [step.name.replace(", ", ",\n") for step in steps]
    axes.set_xticks(range(len(steps)), names, rotation=30, ha="right", fontsize="small")
    label_axes(axes, "", f"{unit}, times naive above", logarithmic=True, legend=False)
