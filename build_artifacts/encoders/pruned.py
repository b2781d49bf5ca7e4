"""Preparation of a pruned model: pruning, new reference outputs, and the accuracy gate."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.encoders.preparation import PreparedModel, cached_prune, load_examples
from build_artifacts.errors import GateFailed
from build_artifacts.evaluation import ExampleSampling
from build_artifacts.pruning.prune import Pruning
from build_artifacts.workspaces.step_runner import StepRunner
from deployments.artifacts.manifest import Gate
from deployments.messages import TokenizedItem
from deployments.tuning.parity import compare_outputs

# Use a sample of the calibration data, because each example takes a forward and a backward pass.
_SAMPLING = ExampleSampling(limit=256)


def prepare_pruned(
    steps: StepRunner,
    original: PreparedModel,
    pruning: Pruning,
    gate: Gate,
) -> PreparedModel:
    """Return `original` after pruning.

    With labeled data, the gate limits the loss of the task's metric. Without labeled data, the gate
    limits the difference of the outputs for the probe texts, which hardly any pruned model passes.
    Raises GateFailed if the pruned model does not pass, UnsupportedModel for an architecture whose
    layers are unknown, and BadEvaluationData for bad calibration data.
    """
    pruned = cached_prune(steps, original, pruning.fraction, load_calibration(original, pruning))
    reasons = _find_violations(original, pruned, gate)
    if reasons:
        raise GateFailed(
            f"the model without {pruning.fraction:.0%} of its heads and feed-forward channels does "
            f"not pass the accuracy gate: {'; '.join(reasons)}",
            hint=_hint(original),
        )
    return pruned


def load_calibration(original: PreparedModel, pruning: Pruning) -> Sequence[TokenizedItem]:
    """Return the items of at most 256 examples of `pruning.data`, or all probes if it is None.

    Raises BadEvaluationData for bad data.
    """
    if pruning.data is None:
        return original.reference.items
    return load_examples(pruning.data, original.weights, original.metadata, _SAMPLING).items


def _find_violations(original: PreparedModel, pruned: PreparedModel, gate: Gate) -> Sequence[str]:
    evaluation = original.evaluation
    if evaluation is not None:
        return evaluation.find_violations(
            original.scores, pruned.own_scores, max_drop=gate.metric_drop
        )
    outputs = pruned.reference.outputs
    return compare_outputs(
        original.reference, outputs, outputs, gate, original.metadata.head
    ).reasons


def _hint(original: PreparedModel) -> str:
    if original.evaluation is None:
        return "prune less, or let a metric decide: --eval FILE --gate metric_drop=POINTS"
    return "prune less, pass `--prune-data FILE`, or accept it with `--gate metric_drop=POINTS`"
