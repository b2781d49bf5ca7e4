"""Selection of an artifact's graphs: evaluate ranked candidates until enough are accurate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from build_artifacts.build_devices import has_device
from build_artifacts.errors import BuildError, GateFailed, UnsupportedModel
from build_artifacts.families.base import (
    Attempt,
    EvaluatedCandidate,
    GateResult,
    ModelBuild,
    R,
    Ranking,
    S,
    describe_search_timeout,
)
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import repeat_when_resumed
from deployments.artifacts.types import Device

_RESULT_NAME = "gate.json"


class AccuracyGate(Generic[R, S]):
    """Accuracy gate of one build: exports candidates and compares them with the reference model."""

    def __init__(self, steps: StepRunner, build: ModelBuild[R, S]) -> None:
        self._steps = steps
        self._build = build
        self._tried: list[EvaluatedCandidate[R, S] | UnsupportedModel] = []

    def first_accepted(
        self, recipe: R, *, allow_fallbacks: bool = True
    ) -> EvaluatedCandidate[R, S] | None:
        """Return the first graph of the recipe that passes the gate, or None if no graph passes.

        Try the recipe, then its accuracy fallbacks, as `ModelBuild.attempts` yields them. Without
        `allow_fallbacks`, try only the recipe itself.
        """
        for attempt in self._build.attempts(recipe):
            candidate = self._evaluate(attempt)
            if candidate is not None and candidate.is_accepted:
                return candidate
            if not allow_fallbacks:
                return None
        return None

    def failure(self) -> BuildError:
        """Return the error for a build without an accepted CPU graph.

        Return UnsupportedModel if no attempt could export a graph, otherwise GateFailed. The
        message describes the latest attempt, which is the most accurate attempt: the search tries
        the fallback recipe last.
        """
        if not self._tried:
            raise AssertionError("bug: the gate failed without a candidate")
        latest = self._tried[-1]
        if isinstance(latest, UnsupportedModel) and all(
            isinstance(tried, UnsupportedModel) for tried in self._tried
        ):
            return latest
        architecture = self._build.context.metadata.architecture
        message = f"no graph of `{architecture}` for the CPU passed the accuracy gate"
        if isinstance(latest, UnsupportedModel):
            return GateFailed(
                message, hint=f"a more accurate graph cannot be built: {latest.message}"
            )
        reasons = "; ".join(latest.result.reasons)
        hint = self._build.gate_failed_hint
        if latest.result.parity is None:
            hint = "the build log has the details; ONNX Runtime may not support this architecture"
        return GateFailed(f"{message} ({latest.recipe.precision}: {reasons})", hint=hint)

    def find_failures(self, device: Device) -> dict[str, str]:
        """Return the graphs for `device` that failed or returned invalid numbers, with reasons."""
        return {
            tried.recipe.name: "; ".join(tried.result.reasons)
            for tried in self._tried
            if not isinstance(tried, UnsupportedModel)
            and tried.recipe.device is device
            and tried.result.parity is None
        }

    def _evaluate(self, attempt: Attempt[R]) -> EvaluatedCandidate[R, S] | None:
        try:
            spec = self._build.export(attempt)
        except UnsupportedModel as exc:
            self._steps.report_skipped(attempt.label, exc.message)
            self._tried.append(exc)
            return None
        candidate = EvaluatedCandidate(
            recipe=attempt.recipe,
            spec=spec,
            result=self._cached_result(attempt, spec),
            excluded_nodes=attempt.excluded_nodes,
        )
        self._tried.append(candidate)
        return candidate

    def _cached_result(self, attempt: Attempt[R], spec: S) -> GateResult:
        def work(into: Path) -> str:
            result = self._build.evaluate(spec)
            (into / _RESULT_NAME).write_text(result.model_dump_json(), encoding="utf-8")
            if result.parity is None:  # the engine may have failed for lack of memory
                repeat_when_resumed(into)
            return result.describe()

        detail = f"{attempt.label} against fp32 torch"
        done = self._steps.run_cached(f"gate-{attempt.key}", "gate", detail, work)
        return GateResult.model_validate_json((done / _RESULT_NAME).read_bytes())


@dataclass(frozen=True)
class CandidateSearch(Generic[R, S]):
    """Search for the graphs that one build seals."""

    steps: StepRunner
    build: ModelBuild[R, S]
    gate: AccuracyGate[R, S]
    keep: int  # maximum number of graphs per device
    # Search time per device. After this time, the search skips the remaining candidates if it has
    # already accepted one. The limit does not apply if speed screening ranked the candidates.
    seconds: float

    @classmethod
    def of(cls, build: ModelBuild[R, S], *, keep: int, seconds: float) -> CandidateSearch[R, S]:
        """Return the search of `build`, with its steps and its accuracy gate."""
        steps = build.context.steps
        return cls(steps, build, AccuracyGate(steps, build), keep, seconds)

    def select_graphs(self) -> list[EvaluatedCandidate[R, S]]:
        """Return the accepted graphs of every device.

        Raises GateFailed if no CPU graph is accepted, UnsupportedModel if none can be built.
        """
        for_cpu = self.select_for(Device.CPU) or [self._accept_fallback()]
        return [*for_cpu, *self.select_for(Device.GPU)]

    def select_for(self, device: Device) -> list[EvaluatedCandidate[R, S]]:
        """Evaluate graphs for `device` in the order of `ModelBuild.rank` until enough are accepted.

        For encoders, this order starts with the fastest graphs, and the search also stops at a
        graph that is far slower than an accepted graph. Without a ranking by speed, the search
        skips the remaining graphs after the search time, once it has accepted one (see `seconds`).

        A host without `device` cannot measure speed and keeps the order of the build recipe. The
        search then stops after one accepted graph, because every evaluation takes minutes there.
        """
        is_here = has_device(device)
        limit = self.keep if is_here else 1
        end_s = time.monotonic() + self.seconds
        ranking = self.build.rank(device) if is_here else Ranking(self.build.candidates(device))
        accepted: list[EvaluatedCandidate[R, S]] = []
        for recipe in ranking.recipes:
            names = [candidate.recipe.name for candidate in accepted]
            if len(accepted) >= limit or ranking.is_far_behind(recipe.name, names):
                break
            if accepted and ranking.screening is None and time.monotonic() > end_s:
                self.steps.report_skipped(recipe.name, describe_search_timeout(self.seconds))
                continue
            # In a ranking by speed, this candidate is slower than the accepted graphs, and its
            # fallbacks are slower still. Without a ranking, a fallback may be the fastest graph.
            allow_fallbacks = not accepted or ranking.screening is None
            candidate = self.gate.first_accepted(recipe, allow_fallbacks=allow_fallbacks)
            accepted += [candidate] if candidate is not None else []
        if device is Device.GPU and is_here and not accepted:
            self._warn_without_gpu_graph(ranking)
        return accepted

    def _warn_without_gpu_graph(self, ranking: Ranking[R]) -> None:
        """Warn that the artifact gets no GPU graph, if any graph failed or was not measured.

        Graphs that were rejected for their accuracy alone cause no warning.
        """
        failures = {**ranking.unmeasured, **self.gate.find_failures(Device.GPU)}
        if failures:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            self.steps.report(
                f"warning: the model gets no graph for the GPU, because graphs failed ({reasons}). "
                "If the GPU is short of memory, stop its other processes and build with `--force`"
            )

    def _accept_fallback(self) -> EvaluatedCandidate[R, S]:
        recipe = self.build.fallback
        self.steps.report(f"no candidate for the CPU passed the gate: trying {recipe.name}")
        candidate = self.gate.first_accepted(recipe)
        if candidate is None:
            raise self.gate.failure()
        return candidate
