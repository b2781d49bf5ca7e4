"""One run of the graph benchmark, with the same core split for all systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from benchmarks.common.engine_timing import (
    CoreSplit,
    Forward,
    ShapeTiming,
    build_timings,
    run_split,
)
from benchmarks.common.report import log_progress
from benchmarks.graphs.candidates import GraphCandidate
from benchmarks.graphs.results import ParityRow
from deployments.artifacts.manifest import ArtifactManifest
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from deployments.tuning.costs import Shape
from deployments.tuning.parity import ReferenceOutputs, compare_outputs, run_probes

# The first pass of a shape allocates memory, packs weights or compiles kernels.
WARM_UP_PASSES = 2
PROBES = 32  # number of probe texts to compare with fp32 torch


def encoder_settings_for(split: CoreSplit) -> EncoderSettings:
    return EncoderSettings(intra_op_threads=split.threads, concurrent_passes=split.passes)


@dataclass(frozen=True, slots=True)
class CoreSplitRun:
    """Open engines by name, and their timings. `failed` maps each missing system to its reason."""

    split: CoreSplit
    engines: Mapping[str, EncoderEngine]
    timings: Sequence[ShapeTiming]
    failed: Mapping[str, str]

    def run_round(self, number: int, label: str) -> None:
        """Run every timing once. `number` decides which system comes first at each shape."""
        for timing in rotate_order(self.timings, number):
            timing.run_round()
        slowest = max(timing.medians_ms[-1] for timing in self.timings)
        log_progress(f"{label}: {self.split.name}, slowest median {slowest:.1f} ms")


def rotate_order(timings: Sequence[ShapeTiming], number: int) -> Iterator[ShapeTiming]:
    """Yield the timings shape by shape. Rotate the systems of each shape by `number`."""
    for _, same_shape in groupby(timings, key=lambda timing: timing.shape):
        group = list(same_shape)
        first = number % len(group)
        yield from group[first:] + group[:first]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Inputs of a run. All runs have the same inputs, except that `shapes` may differ."""

    manifest: ArtifactManifest
    reference: ReferenceOutputs
    shapes: Sequence[Shape]
    seed: int

    @property
    def items(self) -> Sequence[TokenizedItem]:
        """Tokenized probe texts, whose tokens fill the timed batches."""
        return self.reference.items


@contextmanager
def open_run(
    candidates: Sequence[GraphCandidate], split: CoreSplit, inputs: RunInputs
) -> Iterator[CoreSplitRun]:
    """Open and warm up the candidates, and close them on exit.

    Raises EngineFailed if a candidate that must pass the accuracy gate fails. Other candidates that
    fail are skipped.
    """
    opener = _EngineOpener(split, inputs)
    try:
        for candidate in candidates:
            opener.open(candidate)
        forwards = {name: opener.forward(engine) for name, engine in opener.engines.items()}
        timings = build_timings(forwards, inputs.shapes, inputs.items, inputs.seed)
        yield CoreSplitRun(split, opener.engines, timings, opener.failed)
    finally:
        opener.close()


@dataclass(slots=True)
class _EngineOpener:
    split: CoreSplit
    inputs: RunInputs
    engines: dict[str, EncoderEngine] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(self.split.passes)

    def open(self, candidate: GraphCandidate) -> None:
        log_progress(f"opening {candidate.name}, {self.split.name}")
        try:
            engine = candidate.open(encoder_settings_for(self.split))
            self.engines[candidate.name] = engine
            inputs, forward = self.inputs, {candidate.name: self.forward(engine)}
            for timing in build_timings(forward, inputs.shapes, inputs.items, inputs.seed):
                for _ in range(WARM_UP_PASSES):
                    timing.forward(timing.batch)
        except EngineFailed as exc:
            if candidate.must_pass_gate:
                raise
            self.failed[candidate.name] = exc.message
            if (failed := self.engines.pop(candidate.name, None)) is not None:
                failed.close()

    def forward(self, engine: EncoderEngine) -> Forward:
        """Return a function that runs a batch in one pass, or split over concurrent passes."""
        if self.split.passes == 1:
            return engine.run
        return partial(run_split, engine, self.pool, self.split.passes)

    def close(self) -> None:
        self.pool.shutdown()
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()


def compare_with_reference(
    engine: EncoderEngine, candidate: GraphCandidate, inputs: RunInputs
) -> ParityRow:
    """Compare up to PROBES unbatched probes with fp32 torch."""
    step = max(1, len(inputs.items) // PROBES)
    sample = slice(0, step * PROBES, step)
    reference = inputs.reference
    expected = replace(reference, items=reference.items[sample], outputs=reference.outputs[sample])
    actual = run_probes(engine, expected.items, 1)
    gate, head = inputs.manifest.gate, inputs.manifest.head
    result = compare_outputs(expected, actual, actual, gate, head)
    parity = result.parity
    return ParityRow(
        system=candidate.name,
        probes=len(expected.items),
        cosine_mean=parity.cosine_mean if parity else None,
        cosine_worst=parity.cosine_worst if parity else None,
        top1_agreement=parity.top1_agreement if parity else None,
        must_pass_gate=candidate.must_pass_gate,
        violations=result.reasons,
    )
