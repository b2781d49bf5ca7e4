"""One heat of the contest of graphs: all contenders on the same cores, shared out in one way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from benchmarks.common.engine_timing import (
    CoreSplit,
    Forward,
    Shape,
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
from deployments.tuning.parity import ReferenceOutputs, compare_outputs, run_probes

# The first pass of a shape allocates, packs weights or makes kernels.
WARM_PASSES = 2
PROBES = 32


def encoder_settings_for(placement: CoreSplit) -> EncoderSettings:
    """The encoder whose engines run as the placement says."""
    return EncoderSettings(intra_op_threads=placement.threads, concurrent_passes=placement.runs)


@dataclass(frozen=True, slots=True)
class PlacementRun:
    """Open engines by name and their cells; `failed` says why others are not among them."""

    placement: CoreSplit
    engines: Mapping[str, EncoderEngine]
    cells: Sequence[ShapeTiming]
    failed: Mapping[str, str]

    def run_round(self, number: int, label: str) -> None:
        """Every cell once; in the next round another contender goes first at each shape."""
        for cell in rotate_order(self.cells, number):
            cell.run_round()
        slowest = max(cell.medians_ms[-1] for cell in self.cells)
        log_progress(f"{label}: {self.placement.name}, slowest pass {slowest:.1f} ms")


def rotate_order(cells: Sequence[ShapeTiming], number: int) -> Iterator[ShapeTiming]:
    """The cells by shape, those of one shape turned by `number`."""
    for _, same in groupby(cells, key=lambda cell: cell.shape):
        group = list(same)
        first = number % len(group)
        yield from group[first:] + group[:first]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What is the same in every heat."""

    manifest: ArtifactManifest
    reference: ReferenceOutputs
    shapes: Sequence[Shape]
    seed: int

    @property
    def items(self) -> Sequence[TokenizedItem]:
        """Whose tokens fill the batches."""
        return self.reference.items


@contextmanager
def open_run(
    contenders: Sequence[GraphCandidate], placement: CoreSplit, ground: RunInputs
) -> Iterator[PlacementRun]:
    """The contenders opened and warm, closed on the way out. Rivals that fail are left out.

    Raises EngineFailed for ours.
    """
    opening = _EngineOpener(placement, ground)
    try:
        for contender in contenders:
            opening.add(contender)
        forwards = {name: opening.forward(engine) for name, engine in opening.engines.items()}
        cells = build_timings(forwards, ground.shapes, ground.items, ground.seed)
        yield PlacementRun(placement, opening.engines, cells, opening.failed)
    finally:
        opening.close()


@dataclass(slots=True)
class _EngineOpener:
    placement: CoreSplit
    ground: RunInputs
    engines: dict[str, EncoderEngine] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(self.placement.runs)

    def add(self, contender: GraphCandidate) -> None:
        log_progress(f"opening {contender.name}, {self.placement.name}")
        try:
            engine = contender.open(encoder_settings_for(self.placement))
            self.engines[contender.name] = engine
            ground, warm = self.ground, {contender.name: self.forward(engine)}
            for cell in build_timings(warm, ground.shapes, ground.items, ground.seed):
                for _ in range(WARM_PASSES):
                    cell.forward(cell.batch)
        except EngineFailed as exc:
            if contender.must_pass_gate:
                raise
            self.failed[contender.name] = exc.message
            if (opened := self.engines.pop(contender.name, None)) is not None:
                opened.close()

    def forward(self, engine: EncoderEngine) -> Forward:
        """One pass on all cores, or the batch shared out over passes at once, as an encoder would."""
        if self.placement.runs == 1:
            return engine.run
        return partial(run_split, engine, self.pool, self.placement.runs)

    def close(self) -> None:
        self.pool.shutdown()
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()


def compare_with_reference(
    engine: EncoderEngine, contender: GraphCandidate, ground: RunInputs
) -> ParityRow:
    """How near the engine comes to fp32 torch on PROBES probes, each alone. Asked after timing."""
    step = max(1, len(ground.items) // PROBES)
    chosen = slice(0, step * PROBES, step)
    part = ReferenceOutputs(ground.reference.items[chosen], ground.reference.outputs[chosen])
    alone = run_probes(engine, part.items, 1)
    verdict = compare_outputs(part, alone, alone, ground.manifest.gate, ground.manifest.head)
    parity = verdict.parity
    return ParityRow(
        contender=contender.name,
        probes=len(part.items),
        cosine_mean=parity.cosine_mean if parity else None,
        cosine_worst=parity.cosine_worst if parity else None,
        top1_agreement=parity.top1_agreement if parity else None,
        must_pass_gate=contender.must_pass_gate,
        misses=verdict.reasons,
    )
