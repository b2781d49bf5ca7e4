"""Story c, "Bound memory and KV cache" in docs/stories.md: variants of decoding with a GPT-2.

A system is one variant: numpy arrays or IO binding (inputs and outputs in fixed memory), with or
without a KV cache. All systems run the same fp32 graph. Its weights are random, because times do
not depend on them. The logits of each system are compared with the logits of the first system.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.plots import COLORS, create_figure, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number, log_progress
from benchmarks.common.statistics import RoundSummary, summarize
from deployments.artifacts.generation_config import GenerationConfig
from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings
from deployments.engines.decoder import LOGITS_FROM, DecoderSpec, Logits
from deployments.engines.onnx.decoder import OnnxDecoder

NUMPY, BOUND = "numpy", "IO binding"
STEPS = 6  # decode steps per system, context and round; the first is not timed
MAX_LOGITS_DIFFERENCE = 1e-3  # maximum difference relative to the largest absolute logit


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Sizes of the model. The defaults are the sizes of the smallest GPT-2."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50_257
    positions: int = 1_024


GPT2 = GptShape()
CONTEXTS = (32, 64, 128, 256, 512, 960)  # tokens before the timed steps


@dataclass(frozen=True, slots=True)
class DecodingTimes:
    """Results of one system: ms per token by context length."""

    io: str
    kv_cache: bool
    ms_per_token: Mapping[str, RoundSummary]
    # Maximum difference from the first system's logits, divided by the largest absolute logit.
    logits_difference: float

    @property
    def name(self) -> str:
        return f"{self.io}, {'with' if self.kv_cache else 'without'} KV cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingResults:
    """Results of story c, as written to the result file."""

    shape: GptShape
    threads: int
    steps: int
    note: str
    systems: tuple[DecodingTimes, ...]


class DecodingSystem(Protocol):
    """One way to compute the next token of one sequence."""

    io: str
    kv_cache: bool

    def start(self, ids: Sequence[int]) -> None:
        """Replace the sequence by the tokens `ids`."""
        ...

    def step(self, token: int) -> Logits:
        """Append a token. Return the logits of the next token, [vocabulary]."""
        ...


class NumpySystem:
    """System that calls `session.run` with numpy arrays. Every step returns a new KV cache."""

    io = NUMPY

    def __init__(self, decoder: OnnxDecoder, *, kv_cache: bool) -> None:
        self.kv_cache = kv_cache
        self._session = decoder.session
        layout = decoder.layout
        slot = (1, layout.shape[1], 0, layout.shape[3])
        self._inputs = [f"past_key_values.{name}" for name in layout.names]
        self._outputs = ["logits", *(f"present.{name}" for name in layout.names)]
        self._empty = [np.zeros(slot, layout.dtype) for _ in layout.names]
        self._ids: list[int] = []
        self._past: Sequence[NDArray[Any]] = self._empty

    def start(self, ids: Sequence[int]) -> None:
        self._ids, self._past = list(ids), self._empty
        if self.kv_cache:
            self._run(self._ids)

    def step(self, token: int) -> Logits:
        self._ids.append(token)
        return self._run([token] if self.kv_cache else self._ids)

    def _run(self, new: Sequence[int]) -> Logits:
        feeds = dict(zip(self._inputs, self._past, strict=True))
        feeds["input_ids"] = np.array([new], np.int64)
        feeds["attention_mask"] = np.ones((1, len(self._ids)), np.int64)
        feeds[LOGITS_FROM] = np.array([len(new) - 1], np.int64)
        logits, *present = self._session.run(self._outputs, feeds)
        if self.kv_cache:
            self._past = present
        values: Logits = logits[0, -1]
        return values


class BoundSystem:
    """System that calls the server's engine, with IO binding of inputs, outputs and KV cache."""

    io = BOUND

    def __init__(self, decoder: OnnxDecoder, *, kv_cache: bool) -> None:
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._ids: list[int] = []

    def start(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        if self.kv_cache:
            self._decoder.prefill(0, self._ids, 0)

    def step(self, token: int) -> Logits:
        length = len(self._ids)
        self._ids.append(token)
        if not self.kv_cache:
            return self._decoder.prefill(0, self._ids, 0)
        logits: Logits = self._decoder.decode(np.array([token]), np.array([length]))[0]
        return logits


@contextmanager
def open_decoder(shape: GptShape, threads: int, seed: int) -> Iterator[OnnxDecoder]:
    """Write and open the graph of a random GPT-2 with one KV slot."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from build_artifacts.decoders.graphs.export import export_model

    config = GPT2Config(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory(prefix="stories-") as directory:
        checkpoint, graphs = Path(directory, "checkpoint"), Path(directory, "graphs")
        graphs.mkdir()
        torch.manual_seed(seed)
        GPT2LMHeadModel(config).save_pretrained(checkpoint)
        exported = export_model(checkpoint, graphs)
        spec = DecoderSpec(
            path=exported.decoder,
            device=Device.CPU,
            precision="fp32",
            options=EngineOptions(),
            generation_config=GenerationConfig(
                layers=exported.layers,
                kv_heads=exported.kv_heads,
                head_dim=exported.head_dim,
                eos_token_ids=exported.eos_token_ids,
            ),
            vocabulary=exported.vocabulary,
            max_tokens=shape.positions,
        )
        settings = GeneratorSettings(kv_slots=1, intra_op_threads=threads)
        decoder = OnnxDecoder(spec, settings, slots=1, context=shape.positions)
        try:
            yield decoder
        finally:
            decoder.close()


def measure_decoding(
    shape: GptShape, contexts: Sequence[int], *, threads: int, rounds: int, seed: int, note: str
) -> DecodingResults:
    """Measure all systems at all contexts in every round. Raise BenchmarkError for wrong logits."""
    with open_decoder(shape, threads, seed) as decoder:
        systems: list[DecodingSystem] = [
            kind(decoder, kv_cache=kv_cache)
            for kv_cache in (False, True)
            for kind in (NumpySystem, BoundSystem)
        ]
        rng = np.random.default_rng(seed)
        ids = rng.integers(shape.vocabulary, size=max(contexts) + STEPS).tolist()
        differences = compare_logits(systems, ids[: min(contexts)], ids[-1])
        times: list[dict[str, list[float]]] = [{} for _ in systems]
        for number in range(rounds):
            for context in contexts:
                for system, found in zip(systems, times, strict=True):
                    ms = time_steps(system, ids[:context], ids[-STEPS:])
                    found.setdefault(str(context), []).append(ms)
            log_progress(f"round {number + 1}/{rounds}")
    return DecodingResults(
        shape=shape,
        threads=threads,
        steps=STEPS,
        note=note,
        systems=tuple(
            DecodingTimes(
                io=system.io,
                kv_cache=system.kv_cache,
                ms_per_token={context: summarize(values) for context, values in found.items()},
                logits_difference=difference,
            )
            for system, found, difference in zip(systems, times, differences, strict=True)
        ),
    )


def compare_logits(
    systems: Sequence[DecodingSystem], ids: Sequence[int], token: int
) -> list[float]:
    """Return the largest relative difference of each system's logits from the first system's.

    Raises BenchmarkError if a difference exceeds MAX_LOGITS_DIFFERENCE.
    """
    logits = []
    for system in systems:
        system.start(ids)
        logits.append(system.step(token).copy())
    scale = float(np.abs(logits[0]).max())
    differences = [float(np.abs(values - logits[0]).max()) / scale for values in logits]
    if not max(differences) <= MAX_LOGITS_DIFFERENCE:
        raise BenchmarkError(
            f"the systems compute other logits, so the timings are invalid: {differences}",
            hint="this is a bug of an engine",
        )
    return differences


def time_steps(system: DecodingSystem, ids: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the median ms per step after `ids`. Leave out the first step."""
    system.start(ids)
    seconds = []
    for token in tokens:
        started_s = time.perf_counter()
        system.step(token)
        seconds.append(time.perf_counter() - started_s)
    return float(np.median(seconds[1:])) * 1e3


def build_tables(results: DecodingResults) -> list[Table]:
    contexts = list(results.systems[0].ms_per_token)
    first = results.systems[0].ms_per_token
    rows, ratios = [], []
    for system in results.systems:
        medians = [system.ms_per_token[context].median for context in contexts]
        rows.append([system.name, *(format_number(ms, 2) for ms in medians)])
        ratios.append(
            [
                system.name,
                *(
                    f"{first[context].median / ms:.1f}"
                    for context, ms in zip(contexts, medians, strict=True)
                ),
            ]
        )
    header = ["", *(f"{context} tokens" for context in contexts)]
    return [
        Table("ms per token", ["ms per token", *header[1:]], rows),
        Table("times faster", ["times faster", *header[1:]], ratios),
    ]


def plot_decoding(out: Path, run: RunMetadata, results: DecodingResults) -> list[Path]:
    """Plot ms per token by context, and the gain over the first system. Return the paths."""
    shape = asdict(results.shape)
    title = f"GPT-2 of {shape['layers']} layers, {shape['width']} wide, fp32, one sequence"
    figure, (times, gains) = create_figure(run, title)
    first = results.systems[0].ms_per_token
    for color, system in zip(COLORS, results.systems, strict=False):
        contexts = [int(context) for context in system.ms_per_token]
        medians = [summary.median for summary in system.ms_per_token.values()]
        ratios = [a.median / ms for a, ms in zip(first.values(), medians, strict=True)]
        times.plot(contexts, medians, marker="o", color=color, label=system.name)
        gains.plot(contexts, ratios, marker="o", color=color, label=system.name)
    label_axes(times, "tokens before", "ms per token", logarithmic=True)
    label_axes(gains, "tokens before", "times faster", logarithmic=True, legend=False)
    return save_figure(figure, out, run)
