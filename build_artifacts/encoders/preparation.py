"""The prepared checkpoint of a build and the reference outputs that candidates must match."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from build_artifacts.checkpoints.architectures import MODEL_ERRORS
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import (
    TorchModel,
    check_token_ids,
    load_model,
)
from build_artifacts.compaction.apply import compact
from build_artifacts.compaction.find import find_compaction
from build_artifacts.compaction.plan import Compaction
from build_artifacts.encoders.probes import tokenize_probes
from build_artifacts.encoders.reference_engine import TorchReferenceEngine
from build_artifacts.errors import UnsupportedModel, first_line
from build_artifacts.evaluation import (
    EvaluatedModel,
    Evaluation,
    ExampleSampling,
    load_evaluation,
    score_engine,
)
from build_artifacts.pruning.prune import prune_checkpoint
from build_artifacts.steps.unused_layers import report_unused_layers
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import REFERENCE_NAME
from deployments.artifacts.types import Dtype
from deployments.messages import TokenizedItem
from deployments.tokenization.encodings import open_tokenizer
from deployments.tuning.parity import ReferenceOutputs, run_probes

COMPACTION_NAME = "compaction.json"
_SCORES_NAME = "scores.json"


@dataclass(frozen=True)
class PreparedModel:
    """A checkpoint with metadata, removable channels and reference outputs.

    `reference_dir` holds the files that `prepare` wrote; `evaluation` is None without labeled data.
    """

    weights: Path  # directory of the checkpoint, with any adapter merged
    metadata: CheckpointMetadata
    reference_dir: Path
    evaluation: Evaluation | None
    original: PreparedModel | None = None  # the model before pruning; None: not pruned

    @cached_property
    def compaction(self) -> Compaction:
        """Channels and heads that compaction removes."""
        path = self.reference_dir / COMPACTION_NAME
        return Compaction.model_validate_json(path.read_bytes())

    @cached_property
    def reference(self) -> ReferenceOutputs:
        """Outputs of the reference model for the probe texts."""
        return ReferenceOutputs.read(self.reference_dir / REFERENCE_NAME)

    @cached_property
    def scores(self) -> Mapping[str, float]:
        """Metrics that candidates are compared with: those of the model before any pruning."""
        return (self.original or self).own_scores

    @cached_property
    def own_scores(self) -> Mapping[str, float]:
        """Metrics of the reference model by name; empty without labeled data."""
        scores: dict[str, float] = json.loads((self.reference_dir / _SCORES_NAME).read_bytes())
        return scores

    def model(self, dtype: Dtype) -> TorchModel:
        """Load the compacted torch model. Raises UnsupportedModel if it cannot be loaded."""
        head = self.metadata.loaded_head
        model = load_model(self.weights, head=head, dtype=dtype, is_checked=True)
        return model if self.compaction.is_empty else compact(model, self.compaction)


def load_examples(
    path: Path, weights: Path, metadata: CheckpointMetadata, sampling: ExampleSampling
) -> Evaluation:
    """Load the examples of a file for the main task of a checkpoint.

    Raises the errors of `load_evaluation`.
    """
    model = EvaluatedModel.of(weights, metadata)
    return load_evaluation(path, metadata.tasks[0], model, sampling)


def cached_prune(
    steps: StepRunner, original: PreparedModel, fraction: float, items: Sequence[TokenizedItem]
) -> PreparedModel:
    """Prune the heads and channels that matter least for `items`, and prepare the result.

    Raises UnsupportedModel if the model cannot be loaded, pruned or prepared.
    """
    metadata = original.metadata

    def work(into: Path) -> str:
        return prune_checkpoint(original.weights, metadata, fraction, items, into)

    detail = f"{fraction:.0%} of heads and channels, rated on {len(items)} items"
    directory = steps.run_cached("prune", "prune", detail, work)
    pruned = cached_prepare(steps, directory, metadata, original.evaluation, key="pruned")
    return replace(pruned, original=original)


def cached_prepare(
    steps: StepRunner,
    weights: Path,
    metadata: CheckpointMetadata,
    evaluation: Evaluation | None,
    *,
    key: str = "reference",
) -> PreparedModel:
    """Compute reference outputs and scores of `weights` in the cached step `key`.

    Raises UnsupportedModel as `prepare` does.
    """

    def work(into: Path) -> str:
        prepare(weights, metadata, evaluation, into)
        report_unused_layers(steps, weights, metadata)
        prepared = PreparedModel(weights, metadata, into, evaluation)
        scores = "".join(f", {name} {score:.4f}" for name, score in prepared.own_scores.items())
        return f"{metadata.architecture}, {metadata.max_tokens} tokens{scores}"

    detail = "fp32 torch on the probes" + (", and on the data" if evaluation else "")
    directory = steps.run_cached(key, "reference", detail, work)
    return PreparedModel(weights, metadata, directory, evaluation)


def prepare(
    weights: Path, metadata: CheckpointMetadata, evaluation: Evaluation | None, into: Path
) -> None:
    """Write reference outputs, scores and the compaction plan to `into`.

    The outputs are those of the model before compaction, so the gate detects a compaction that
    changes them. Raises UnsupportedModel if the model cannot be loaded, it requires other inputs, a
    token id has no vector in the model, or an output is not finite.
    """
    model = load_model(weights, head=metadata.loaded_head, dtype="float32")
    reference = TorchReferenceEngine(model, metadata)
    items = tokenize_probes(weights, metadata)
    tokenizer = open_tokenizer(weights)
    known = tokenizer.get_vocab(with_added_tokens=True).values()  # any client may send each token
    highest = max(max(known), *(int(item.ids.max()) for item in items))
    check_token_ids(model, highest, tokenizer.id_to_token(highest))
    try:
        outputs = tuple(run_probes(reference, items, 1))
    except MODEL_ERRORS as exc:
        raise UnsupportedModel(
            f"`{metadata.architecture}` does not run on token ids alone: {first_line(exc)}",
            hint="use a model without other inputs, and without a fixed number of tokens",
        ) from exc
    if not all(np.isfinite(output).all() for output in outputs):
        raise UnsupportedModel(
            f"`{metadata.architecture}` returns NaN or infinity in fp32 torch",
            hint="the checkpoint is damaged: download or save it again",
        )
    ReferenceOutputs(items, outputs, metadata.problem_type).write(into / REFERENCE_NAME)
    scores = {} if evaluation is None else score_engine(reference, evaluation)
    (into / _SCORES_NAME).write_text(json.dumps(scores), encoding="utf-8")
    (into / COMPACTION_NAME).write_text(find_compaction(model).model_dump_json(), encoding="utf-8")
