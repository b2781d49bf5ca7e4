"""Story b, "From PyTorch to int8" in docs/stories.md: a question-answering model, stage by stage.

Every stage that passes the accuracy gate becomes a model of its own. One server serves all these
stages over HTTP. The stages take turns to answer the same requests. Each stage adds a technique to
the previous stage, except the last CPU stage, which is int8 without pruning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import Client
from benchmarks.common.plots import COLORS, create_figure, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number, log_progress
from benchmarks.common.sentences import COMMON_WORDS
from benchmarks.common.serve_config import build_encoder_config
from benchmarks.quality.command import ServedModelClient, score_answers
from benchmarks.servers.own_server import start_server
from benchmarks.stories.stages import GPU_STAGE, SealedStage
from build_artifacts.evaluation.squad import SquadQuestion
from deployments.artifacts.types import Device, TaskName
from deployments.host.machine import usable_cores
from deployments.tokenization.encodings import open_tokenizer

LENGTHS = (32, 64, 128, 256, 512)  # tokens per request
REQUESTS = 50  # sequential requests per stage and length
_BLOCK = 10  # consecutive requests to a stage before the next stage's turn
_FILLER = "a"  # one token in most vocabularies
_QUESTION = "Which river runs through the old town?"
TASK = TaskName.QUESTION_ANSWERING.value


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of sequential requests of one length."""

    requests: int
    mean_ms: float
    deviation_ms: float
    p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """Results of one stage. If `reason` is set, the stage was not measured."""

    name: str
    what: str
    parameters: int
    size_bytes: int
    f1: float | None = None
    exact_match: float | None = None
    latencies: Mapping[str, Latency] | None = None  # key: number of tokens
    reason: str | None = None  # why the stage is not measured


def describe_unmeasured(name: str, reason: str) -> MeasuredStage:
    return MeasuredStage(name=name, what="-", parameters=0, size_bytes=0, reason=reason)


FP16 = describe_unmeasured(GPU_STAGE.name, "needs a GPU: run this story on a host with one")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResults:
    """Results of story b, as written to the result file."""

    model_id: str
    pruned: float
    data: str  # data set on which F1 is computed
    calibration: str  # data set that pruning uses to choose heads and channels
    questions: int
    threads: int
    note: str
    stages: tuple[MeasuredStage, ...]


def measure_stages(
    stages: Sequence[SealedStage],
    store: Path,
    questions: Sequence[SquadQuestion],
    data: str,
    lengths: Sequence[int],
    out: Path,
) -> list[MeasuredStage]:
    """Serve all stages, measure their latencies alternately, and score their answers.

    Raises BenchmarkError if there is nothing to measure, or if the server or a request fails.
    """
    if not stages:
        raise BenchmarkError("no stage passed the accuracy gate", hint="raise --max-drop")
    if not lengths:
        raise BenchmarkError(
            f"the model accepts fewer than {min(LENGTHS)} tokens", hint="name one with --reader ID"
        )
    with serve(stages, store, out) as client:
        times = time_requests(client, stages, lengths)
        measured = []
        for stage in stages:
            use_gpu = stage.device is Device.GPU
            served = ServedModelClient(client, stage.model_id, use_gpu=use_gpu)
            scores = {s.metric: s.value for s in score_answers(served, data, questions)}
            measured.append(
                MeasuredStage(
                    name=stage.name,
                    what=stage.what,
                    parameters=stage.parameters,
                    size_bytes=stage.size_bytes,
                    f1=scores["F1"],
                    exact_match=scores["exact match"],
                    latencies={n: summarize_ms(ms) for n, ms in times[stage.name].items()},
                )
            )
    return measured


@contextmanager
def serve(stages: Sequence[SealedStage], store: Path, out: Path) -> Iterator[Client]:
    """Start a server with all stages. The encoder runs one pass at a time, on all cores."""
    encoder = {
        "intra_op_threads": usable_cores(),
        "concurrent_passes": 1,
        "lone_pass_bytes": 0,
    }
    models = [stage.model_id for stage in stages]
    with_gpu = any(stage.device is Device.GPU for stage in stages)
    config = build_encoder_config(store, models, encoder, with_gpu=with_gpu)
    with start_server(config.write(store.parent), out) as server, Client(server.address) as client:
        yield client


def time_requests(
    client: Client, stages: Sequence[SealedStage], lengths: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Return the ms of each request by stage and number of tokens. Bypass the cache."""
    times: dict[str, dict[str, list[float]]] = {stage.name: {} for stage in stages}
    for tokens in lengths:
        inputs = build_inputs(stages[0].directory, tokens)
        for stage in stages:  # warm up, and load models that load on demand
            infer(client, stage, inputs)
        for block in range(-(-REQUESTS // _BLOCK)):
            for stage in rotate(stages, block):
                found = times[stage.name].setdefault(str(tokens), [])
                found += time_block(client, stage, inputs)
        log_progress(f"{tokens} tokens")
    return times


def rotate(stages: Sequence[SealedStage], turn: int) -> list[SealedStage]:
    """Rotate the stages by `turn` places, so that another stage comes first in each turn."""
    first = turn % len(stages)
    return [*stages[first:], *stages[:first]]


def infer(client: Client, stage: SealedStage, inputs: Mapping[str, str]) -> None:
    client.infer(TASK, stage.model_id, inputs, use_gpu=stage.device is Device.GPU)


def time_block(client: Client, stage: SealedStage, inputs: Mapping[str, str]) -> list[float]:
    """Return the ms of each of _BLOCK sequential requests, after one untimed request."""
    infer(client, stage, inputs)
    times = []
    for _ in range(_BLOCK):
        started_s = time.perf_counter()
        infer(client, stage, inputs)
        times.append((time.perf_counter() - started_s) * 1e3)
    return times


def build_inputs(directory: Path, tokens: int) -> dict[str, str]:
    """Return a question and a context of exactly `tokens` tokens, including special tokens.

    Raise BenchmarkError if no text has this length.
    """
    tokenizer = open_tokenizer(directory)

    def count(words: Sequence[str]) -> int:
        return len(tokenizer.encode(_QUESTION, " ".join(words)).ids)

    context: list[str] = []
    for word in cycle(COMMON_WORDS.split()):
        if count([*context, word]) > tokens:
            break
        context.append(word)
    while count(context) < tokens:
        context.append(_FILLER)
    if not context or count(context) != tokens:
        raise BenchmarkError(
            f"no text with the question has {tokens} tokens", hint="name another model"
        )
    return {"question": _QUESTION, "context": " ".join(context)}


def summarize_ms(times: Sequence[float]) -> Latency:
    return Latency(len(times), float(np.mean(times)), float(np.std(times)), float(np.median(times)))


def build_tables(results: StageResults) -> list[Table]:
    lengths = list(next(stage.latencies for stage in results.stages if stage.latencies))
    size_rows, latency_rows = [], []
    first = results.stages[0]
    for stage in results.stages:
        size_rows.append(
            [
                stage.name,
                stage.what,
                f"{stage.parameters / 1e6:.1f}" if stage.parameters else "-",
                f"{stage.size_bytes / 1e6:.1f}" if stage.size_bytes else "-",
                "-" if stage.f1 is None else f"{100 * stage.f1:.1f}",
                "-" if stage.exact_match is None else f"{100 * stage.exact_match:.1f}",
            ]
        )
        latencies = stage.latencies
        if latencies is None or first.latencies is None:
            latency_rows.append([stage.name, *["-" for _ in lengths], stage.reason or "-"])
            continue
        gains = [first.latencies[n].mean_ms / latencies[n].mean_ms for n in lengths]
        latency_rows.append(
            [
                stage.name,
                *(f"{latencies[n].mean_ms:.1f} ± {latencies[n].deviation_ms:.1f}" for n in lengths),
                format_number(float(np.exp(np.mean(np.log(gains)))), 2),
            ]
        )
    return [
        Table("stages", ["stage", "graph", "M parameters", "MB", "F1", "exact match"], size_rows),
        Table(
            "latency",
            ["ms by tokens", *lengths, "times faster, all lengths"],
            latency_rows,
        ),
    ]


def plot_stages(out: Path, run: RunMetadata, results: StageResults) -> list[Path]:
    """Plot latency by length, and F1 by model size. Return the paths."""
    title = f"{results.model_id}: {REQUESTS} sequential requests over HTTP per stage and length"
    figure, (latencies, sizes) = create_figure(run, title)
    for color, stage in zip(COLORS, results.stages, strict=False):
        if stage.latencies is None or stage.f1 is None:
            continue
        lengths = [int(n) for n in stage.latencies]
        latencies.errorbar(
            lengths,
            [row.mean_ms for row in stage.latencies.values()],
            [row.deviation_ms for row in stage.latencies.values()],
            marker="o",
            capsize=3,
            color=color,
            label=stage.name,
        )
        sizes.scatter([stage.size_bytes / 1e6], [100 * stage.f1], color=color, label=stage.name)
    label_axes(latencies, "tokens", "ms, mean and deviation", logarithmic=True)
    label_axes(sizes, "MB", f"F1 on {results.data}", legend=False)
    sizes.set_xlim(left=0)
    sizes.set_ylim(0, 100)
    return save_figure(figure, out, run)
