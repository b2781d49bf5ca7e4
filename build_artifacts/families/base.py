"""Interface of a model family for the build: candidates, export, accuracy, speed and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.encoders.screening import SpeedScreening
from build_artifacts.evaluation import ALL_EXAMPLES, ExampleSampling
from build_artifacts.pruning.prune import Pruning
from build_artifacts.recipes import BuildRecipe, compute_digest
from build_artifacts.steps.seal import ArtifactContents, ArtifactIdentity
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import Parity
from deployments.artifacts.types import Device, Precision


class Recipe(Protocol):
    """One way to build a graph. Equal recipes give equal graphs."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def precision(self) -> Precision: ...


R = TypeVar("R", bound=Recipe)
S = TypeVar("S")  # how to open a graph: GraphSpec or DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBudget:
    """Time and data that a build may use."""

    # Seconds per device. After this time, a build that ranks candidates by speed exports no further
    # candidate if it has exported one. Any other build evaluates no further candidate if it has
    # accepted one.
    search_seconds: float = 300.0
    tune_seconds: float = 60.0  # s, for all graphs together; 0 disables tuning
    evaluation: Path | None = None  # labeled data for the accuracy gate
    sampling: ExampleSampling = ALL_EXAMPLES


def describe_search_timeout(seconds: float) -> str:
    """Return the reason why a candidate is skipped after the search time."""
    return f"the search time of {seconds:.0f} s is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Inputs of one build, the same for every family."""

    steps: StepRunner
    weights: Path  # directory of the checkpoint, with any adapter merged
    metadata: CheckpointMetadata
    recipe: BuildRecipe
    budget: BuildBudget
    pruning: Pruning | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt(Generic[R]):
    """One try at a graph: a recipe, or a variant of it that may be more accurate."""

    recipe: R
    label: str  # text for progress lines
    key: str  # cache key, equal for equal graphs
    excluded_nodes: tuple[str, ...] = ()  # MatMuls outside the quantization scheme; see `quantize`


class GateResult(BaseModel):
    """Result of the accuracy gate. Stored; a resumed build evaluates only failed graphs again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: Parity | None  # None: the graph failed or returned invalid numbers
    scores: dict[str, float] = {}  # values by metric name
    reasons: tuple[str, ...] = ()  # violated limits or the failure; empty: accepted
    # Generative models only: greedy answers to the gate prompts, as token ids.
    samples: tuple[tuple[int, ...], ...] = ()

    def describe(self) -> str:
        if self.reasons or self.parity is None:
            return f"rejected, {'; '.join(self.reasons)}"
        parity = self.parity
        agreement, correlation = parity.top1_agreement, parity.logit_correlation
        return "".join(
            (
                f"accepted, cosine {parity.cosine_mean:.4f} mean {parity.cosine_worst:.4f} worst",
                f", {parity.batched_cosine_worst:.4f} batched",
                "" if agreement is None else f", top-1 agreement {agreement:.1%}",
                "" if correlation is None else f", logit correlation {correlation:.4f}",
                *(f", {name} {score:.4f}" for name, score in self.scores.items()),
            )
        )


@dataclass(frozen=True, kw_only=True)
class EvaluatedCandidate(Generic[R, S]):
    """A graph in the workspace with its gate result."""

    recipe: R
    spec: S
    result: GateResult
    excluded_nodes: tuple[str, ...] = ()  # MatMuls outside the quantization scheme; see `quantize`

    @property
    def digest(self) -> str:
        """Digest that differs between all graphs of one build, also attempts at one recipe."""
        return compute_digest((self.recipe, self.excluded_nodes))

    @property
    def is_accepted(self) -> bool:
        return not self.result.reasons

    @property
    def parity(self) -> Parity:
        """Parity of the graph with the reference. Every accepted candidate has a parity."""
        if self.result.parity is None:
            raise AssertionError("bug: an accepted candidate has no parity")
        return self.result.parity


@dataclass(frozen=True)
class Ranking(Generic[R]):
    """Candidates of one device in the order of evaluation."""

    recipes: Sequence[R]
    screening: SpeedScreening | None = None  # None: `recipes` are in the order of the build recipe

    @property
    def unmeasured(self) -> Mapping[str, str]:
        """Reasons by name of the graphs that speed screening could not measure and dropped."""
        return {} if self.screening is None else self.screening.unmeasured

    def is_far_behind(self, name: str, accepted: Sequence[str]) -> bool:
        """Return whether `name` is too slow for evaluation, compared with the `accepted` graphs."""
        return self.screening is not None and self.screening.is_far_behind(name, accepted)


class ModelBuild(ABC, Generic[R, S]):
    """One build of one model; implemented by each family."""

    gate_failed_hint: ClassVar[str]

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    @abstractmethod
    def candidates(self, device: Device) -> Sequence[R]:
        """Return the recipes for `device` in order of preference."""

    @property
    @abstractmethod
    def fallback(self) -> R:
        """The recipe to try when no candidate for the CPU is accepted."""

    @abstractmethod
    def attempts(self, recipe: R) -> Iterator[Attempt[R]]:
        """Yield the unchanged recipe, then its accuracy fallbacks, the most accurate last."""

    @abstractmethod
    def export(self, attempt: Attempt[R]) -> S:
        """Build the graph.

        Raises UnsupportedModel if the recipe does not fit the model, or if this host lacks
        something that the engine of the graph requires.
        """

    @abstractmethod
    def evaluate(self, spec: S) -> GateResult:
        """Compare the graph with the fp32 reference model."""

    def rank(self, device: Device) -> Ranking[R]:
        """Return the candidates in the order of evaluation. A family may rank them by speed."""
        return Ranking(self.candidates(device))

    @abstractmethod
    def package(
        self, accepted: Sequence[EvaluatedCandidate[R, S]], identity: ArtifactIdentity
    ) -> ArtifactContents:
        """Measure the accepted graphs on this host and list the contents of the artifact."""


class ModelFamily(Protocol):
    """Models that the compiler exports, evaluates and measures alike. One entry of `FAMILIES`."""

    def matches(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> bool:
        """Return whether the family builds the checkpoint. `tasks[0]` is the model's main task."""
        ...

    def read_metadata(self, checkpoint: Checkpoint, tasks: tuple[str, ...]) -> CheckpointMetadata:
        """Read the metadata of a checkpoint, in which any adapter is already merged.

        Raises UnsupportedModel if the checkpoint lacks a setting or cannot be built.
        """
        ...

    def start(self, context: BuildContext) -> ModelBuild[Any, Any]:
        """Compute the reference outputs and return the build.

        Raises BuildError for options that the family rejects, for unusable data, for a model that
        cannot be loaded, and for a pruned model that fails the accuracy gate.
        """
