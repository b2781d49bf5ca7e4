"""Who may be sealed: candidates held against the original, and mended where that can be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from build_artifacts.errors import UnsupportedModel
from build_artifacts.evaluation import score_engine
from build_artifacts.recipes import CandidateRecipe, DynamicInt8, StaticInt8, digest_of
from build_artifacts.search.graphs import CandidateGraphs, with_other_calibrations
from build_artifacts.search.preparation import PreparedModel
from build_artifacts.search.screening_settings import engine_settings, has_device
from build_artifacts.storage.workspace import StepRunner
from deployments.artifacts.manifest import EngineOptions, Gate, Parity
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import EngineFailed
from deployments.machine import usable_cores
from deployments.tuning.parity import check_engine

_JUDGEMENT_NAME = "judgement.json"
# Products kept from int8 in the attempts to mend a candidate, up to this share of all.
_EXCLUDED_COUNTS = (2, 4, 8, 16, 32)
_MAX_EXCLUDED_SHARE = 0.25


# A recipe, and the nodes that are kept from its quantisation.
_Attempt = tuple[CandidateRecipe, tuple[str, ...]]


class GateResult(BaseModel):
    """What the gate found; kept, so that an interrupted build need not look again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: Parity | None  # None when there were no usable numbers at all
    scores: dict[str, float]  # by metric; empty where no data was given
    reasons: tuple[str, ...]  # empty: it passed


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedGraph:
    """A graph that passed the gate, still in the workspace."""

    recipe: CandidateRecipe
    spec: GraphSpec
    parity: Parity
    scores: Mapping[str, float]
    kept: tuple[str, ...] = ()  # nodes left out of quantisation

    @property
    def graph(self) -> Path:
        """The file."""
        return self.spec.path


class AccuracyGate:
    """Holds graphs of one build against its original."""

    def __init__(
        self, steps: StepRunner, prepared: PreparedModel, graphs: CandidateGraphs, gate: Gate
    ) -> None:
        self._steps = steps
        self._prepared = prepared
        self._graphs = graphs
        self._gate = gate

    def admit(self, recipe: CandidateRecipe, *, mend: bool = True) -> AcceptedGraph | None:
        """The candidate as it is, else mended where `mend` says so; None when it does not pass."""
        attempts: Iterable[_Attempt] = self._attempts(recipe) if mend else [(recipe, ())]
        for attempt, kept in attempts:
            try:
                graph = self._graphs.graph(attempt, kept)
            except UnsupportedModel as exc:
                with self._steps.run_uncached("skip", _named(attempt, kept)) as step:
                    step.set_outcome(exc.message)
                continue
            spec = spec_of(attempt, graph, self._prepared)
            judgement = self._judgement(attempt, spec, kept)
            if not judgement.reasons:
                assert judgement.parity is not None, "no numbers and no reasons; this is a bug"
                return AcceptedGraph(
                    recipe=attempt,
                    spec=spec,
                    parity=judgement.parity,
                    scores=judgement.scores,
                    kept=kept,
                )
        return None

    def _attempts(self, recipe: CandidateRecipe) -> Iterator[_Attempt]:
        """What to try in turn: as it is, calibrated otherwise, then with more and more kept."""
        yield recipe, ()
        for other in with_other_calibrations(recipe):
            yield other, ()
        if isinstance(recipe.quantization, DynamicInt8 | StaticInt8):
            order = self._graphs.sensitive_nodes(recipe)
            for count in _EXCLUDED_COUNTS:
                if count <= len(order) * _MAX_EXCLUDED_SHARE:
                    yield recipe, tuple(order[:count])

    def _judgement(
        self, recipe: CandidateRecipe, spec: GraphSpec, kept: tuple[str, ...]
    ) -> GateResult:
        def work(into: Path) -> str:
            judgement = self._judge(spec)
            (into / _JUDGEMENT_NAME).write_text(judgement.model_dump_json(), encoding="utf-8")
            return told(judgement)

        key = f"verify-{digest_of((recipe, kept))[:12]}"
        detail = f"{_named(recipe, kept)} against fp32 torch"
        found = self._steps.run_cached(key, "verify", detail, work) / _JUDGEMENT_NAME
        return GateResult.model_validate_json(found.read_bytes())

    def _judge(self, spec: GraphSpec) -> GateResult:
        # Nothing else runs while accuracy is looked at, so all cores may help.
        settings = engine_settings(spec.device, usable_cores())
        try:
            engine = open_engine(spec, settings)
        except EngineFailed as exc:
            return GateResult(parity=None, scores={}, reasons=(exc.message,))
        try:
            verdict = check_engine(engine, self._prepared.reference, self._gate, spec.head)
            # Half precision on a CPU takes minutes to say what parity says to four digits.
            is_scored = verdict.passed and has_device(spec.device)
            scores, reasons = self._scores(engine) if is_scored else ({}, verdict.reasons)
        except EngineFailed as exc:
            return GateResult(parity=None, scores={}, reasons=(exc.message,))
        finally:
            engine.close()
        return GateResult(parity=verdict.parity, scores=scores, reasons=reasons)

    def _scores(self, engine: EncoderEngine) -> tuple[dict[str, float], tuple[str, ...]]:
        """The task's metrics, and why they miss the gate; nothing where no data was given."""
        evaluation = self._prepared.evaluation
        if evaluation is None:
            return {}, ()
        scores = score_engine(engine, evaluation)
        drop = evaluation.metric_drop(self._prepared.scores, scores)
        if drop <= self._gate.metric_drop:
            return scores, ()
        metric = evaluation.metric
        return scores, (f"{metric} {scores[metric]:.4f}, {drop:.2f} points below the original",)


def _named(recipe: CandidateRecipe, kept: tuple[str, ...]) -> str:
    return f"{recipe.name}, {len(kept)} products kept" if kept else recipe.name


def spec_of(recipe: CandidateRecipe, graph: Path, prepared: PreparedModel) -> GraphSpec:
    """How to open the graph of a candidate that is not sealed yet."""
    return GraphSpec(
        path=graph,
        device=recipe.device,
        precision=recipe.precision,
        engine=recipe.engine,
        options=_readable(recipe.options, prepared.metadata.max_tokens),
        head=prepared.metadata.head,
        mask_token=prepared.metadata.mask_token,
    )


def _readable(options: EngineOptions, max_tokens: int) -> EngineOptions:
    """The options without shapes that the model has no positions for."""
    buckets = {(items, min(tokens, max_tokens)): None for items, tokens in options.buckets}
    return options.model_copy(update={"buckets": tuple(buckets)})


def told(judgement: GateResult) -> str:
    """A judgement in one line."""
    if judgement.reasons:
        return f"left out, {'; '.join(judgement.reasons)}"
    parity = judgement.parity
    assert parity is not None, "a judgement without numbers has reasons; this is a bug"
    choices = "" if parity.top1_agreement is None else f", choices {parity.top1_agreement:.1%}"
    scores = "".join(f", {name} {score:.4f}" for name, score in judgement.scores.items())
    return (
        f"passed, cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst"
        f"{choices}{scores}"
    )
