"""Parity: comparison of a graph with the fp32 torch model, by the code that serves the graph.

The build writes ReferenceOutputs, which contain items (the probes) and their outputs. Builds and
tuning run the probes on every candidate, unbatched and batched, and compare the outputs. This
module does not import torch.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.manifest import Gate, Parity
from deployments.artifacts.types import FrozenModel, ModelHead
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import ArtifactError, EngineFailed
from deployments.messages import TokenizedItem

Number = TypeVar("Number", bound=np.generic)
Floats: TypeAlias = NDArray[np.float32]
ProbeOutputs: TypeAlias = Sequence[Floats]  # one array per probe, shaped as ModelHead states

# Probes per batch in the batched run, besides two items of `build_neighbors`.
PARITY_BATCH_ITEMS = 6
# The comparison of batched with unbatched outputs skips a choice whose two best classes differ by
# less than this in probability. Kernels for other batch shapes sum in another order, and bf16 and
# fp16 round the sums, so the choice may change with the batch.
_BATCHED_TIE_MARGIN = 0.01
# Standard deviation that `logit_correlation` adds to the logits of both outputs. An error of 0.05
# then passes a limit of 0.98 even if the reference hardly varies. The int8 graphs of the demo
# models have root mean square errors of 0.04 to 0.05. Logits of most models deviate by 0.5 to 2.
_LOGIT_NOISE = 0.25
_SPARSE_ENTRY = 0.1  # see sparse_cosines


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """Probes, and the unbatched output of the fp32 torch model for each probe."""

    items: tuple[TokenizedItem, ...]
    outputs: tuple[Floats, ...]
    problem_type: str | None = None  # `ArtifactManifest.problem_type`

    def write(self, path: Path) -> None:
        """Write one .npz file: concatenated arrays, and the index at which each array ends.

        Outputs stay fp32. In fp16, the reference itself would have the error of a good fp16 graph.
        """
        pooled = self.outputs[0].ndim == 1
        rows = [output[None] if pooled else output for output in self.outputs]
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                ids=np.concatenate([item.ids for item in self.items]).astype("<i4"),
                id_ends=_ends([item.ids for item in self.items]),
                second_segment_start=np.array(
                    [item.second_segment_start for item in self.items], dtype="<i8"
                ),
                outputs=np.concatenate(rows).astype("<f4"),
                output_ends=_ends(rows),
                pooled=np.array(pooled),
                problem_type=np.array(self.problem_type or ""),
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` wrote. Raises ArtifactError if it is missing or damaged."""
        try:
            # Open the file here: np.load does not close a file that is not an archive.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                ids = _split(file["ids"], file["id_ends"])
                outputs = _split(file["outputs"], file["output_ends"])
                seconds = file["second_segment_start"].tolist()
                pooled = bool(file["pooled"])
                problem_type = str(file["problem_type"]) if "problem_type" in file else ""
            items = tuple(TokenizedItem(i, s) for i, s in zip(ids, seconds, strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as exc:
            raise ArtifactError(f"{path}: not a file of reference outputs: {exc}") from exc
        shaped = tuple(rows[0] if pooled else rows for rows in outputs)
        return cls(items, shaped, problem_type or None)


def _ends(parts: Sequence[NDArray[Number]]) -> NDArray[np.int64]:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)


def _split(flat: NDArray[Number], ends: NDArray[np.int64]) -> list[NDArray[Number]]:
    starts = [0, *ends.tolist()]
    if starts != sorted(starts) or starts[-1] != len(flat):
        raise ValueError("the ends of the arrays do not match their length")
    return [flat[start:end] for start, end in pairwise(starts)]


class ParityResult(FrozenModel):
    """Result of one candidate. `parity` is None if the candidate returned no valid outputs."""

    parity: Parity | None
    reasons: tuple[str, ...]  # violations of the gate; empty if the candidate passed

    @property
    def passed(self) -> bool:
        return not self.reasons


def run_probes(
    engine: EncoderEngine, items: Sequence[TokenizedItem], batch_size: int
) -> list[Floats]:
    """Run all items in batches of `batch_size`. Return one output per item. Raises EngineFailed."""
    batches = (items[i : i + batch_size] for i in range(0, len(items), batch_size))
    return [output for batch in batches for output in engine.run(collate(batch)).items]


def run_batched_probes(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> list[Floats]:
    """Run all items in shuffled batches, each with two unusual items of `build_neighbors`.

    This reveals a graph whose quantization ranges span the batch: its outputs for an item change
    next to long items and outliers. Return one output per item. Raises EngineFailed.
    """
    neighbors = build_neighbors(items)
    order = np.random.default_rng(len(items)).permutation(len(items)).tolist()
    outputs: dict[int, Floats] = {}
    for number, start in enumerate(range(0, len(items), PARITY_BATCH_ITEMS)):
        chosen = order[start : start + PARITY_BATCH_ITEMS]
        others = neighbors[number % len(neighbors)]
        batch = collate([*others, *(items[i] for i in chosen)])
        outputs.update(zip(chosen, engine.run(batch).items[len(others) :], strict=True))
    return [outputs[i] for i in range(len(items))]


def build_neighbors(
    items: Sequence[TokenizedItem],
) -> list[tuple[TokenizedItem, TokenizedItem]]:
    """Build pairs of unusual items from the tokens of `items`, as long as the longest item.

    The first item of a pair is the start of the concatenated texts, or of their tokens in random
    order. The second item repeats one token: the rarest, the most frequent, the first or the last.
    """
    length = max(len(item.ids) for item in items)
    tokens = np.concatenate([item.ids for item in items])
    mixed = np.random.default_rng(0).permutation(tokens)
    ids, counts = np.unique(tokens, return_counts=True)
    repeated = (ids[counts.argmin()], ids[counts.argmax()], tokens[0], tokens[-1])
    rows = zip((tokens, mixed, tokens, mixed), repeated, strict=True)
    return [
        (
            TokenizedItem(text[:length], length),
            TokenizedItem(np.full_like(text[:length], token), length),
        )
        for text, token in rows
    ]


def check_graph(
    spec: GraphSpec, settings: EncoderSettings, reference: ReferenceOutputs, gate: Gate
) -> ParityResult:
    """Open the graph and compare it with the reference, as `check_engine` does."""
    try:
        engine = open_engine(spec, settings)
    except EngineFailed as exc:
        return ParityResult(parity=None, reasons=(exc.message,))
    try:
        return check_engine(engine, reference, gate, spec.head)
    finally:
        engine.close()


def check_engine(
    engine: EncoderEngine, reference: ReferenceOutputs, gate: Gate, head: ModelHead
) -> ParityResult:
    """Run the probes unbatched and batched and compare the outputs with the reference.

    If the engine raises EngineFailed, the result has no parity, and the error as its reason.
    """
    try:
        unbatched = run_probes(engine, reference.items, 1)
        batched = run_batched_probes(engine, reference.items)
    except EngineFailed as exc:
        return ParityResult(parity=None, reasons=(exc.message,))
    return compare_outputs(reference, unbatched, batched, gate, head)


def compare_outputs(
    reference: ReferenceOutputs,
    unbatched: ProbeOutputs,
    batched: ProbeOutputs,
    gate: Gate,
    head: ModelHead,
) -> ParityResult:
    """Compare a candidate's outputs with the reference and with the limits of the gate.

    The measure depends on the model's head and problem type:
    - Vectors, and regression with several scores: cosine, lower if the norms differ. Clients may
      compare vectors by dot product, whatever the checkpoint states. Sparse vectors: the same, less
      strict for vectors that are nearly empty.
    - Choices (a label, a token's label, the ends of a span, a masked token): top-1 agreement and
      correlation of the logits. The lower value of the unbatched and the batched run counts. The
      cosine of a few logits is a weak measure. Each label of a multi-label model is a choice.
    - A single score: concordance correlation over all probes. The cosine of one number is only its
      sign, and the plain correlation ignores an offset and a factor.
    """
    for outputs in (unbatched, batched):
        if problem := _find_invalid_output(outputs, reference.outputs):
            return ParityResult(parity=None, reasons=(problem,))
    is_score = head is ModelHead.LABELS and len(reference.outputs[0]) == 1
    is_vector = head is ModelHead.VECTOR or reference.problem_type == "regression"
    to_choices = _label_choices if reference.problem_type == "multi_label" else CHOICES.get(head)
    similarity = concordance if is_score else scaled_cosines if is_vector else cosines
    if head is ModelHead.SPARSE:
        similarity = sparse_cosines
    to_reference = similarity(unbatched, reference.outputs)
    agreement = batched_agreement = logits = None
    if to_choices is not None and not is_vector and not is_score:
        agreement = min(
            top1_agreement(outputs, reference.outputs, to_choices, gate.near_tie_margin)
            for outputs in (unbatched, batched)
        )
        batched_agreement = top1_agreement(batched, unbatched, to_choices, _BATCHED_TIE_MARGIN)
        logits = min(logit_correlation(o, reference.outputs) for o in (unbatched, batched))
    parity = Parity(
        cosine_mean=float(to_reference.mean()),
        cosine_worst=float(to_reference.min()),
        batched_cosine_worst=float(similarity(unbatched, batched).min()),
        top1_agreement=agreement,
        batched_top1_agreement=batched_agreement,
        logit_correlation=logits,
    )
    return ParityResult(
        parity=parity, reasons=tuple(_find_violations(parity, gate, is_score=is_score))
    )


def _find_invalid_output(actual: ProbeOutputs, expected: ProbeOutputs) -> str | None:
    if [output.shape for output in actual] != [output.shape for output in expected]:
        return "an output does not have the shape of the reference"
    if not all(np.isfinite(output).all() for output in actual):
        return "an output is not a finite number"
    return None


def _label_choices(output: Floats) -> Floats:
    """Convert the logits of a multi-label model, [W], to a choice between no and yes per label."""
    return np.stack([np.zeros_like(output), output], axis=1)


# Converts an output to logits [D, C]: D decisions between C classes.
ToChoices = Callable[[Floats], Floats]
CHOICES: Mapping[ModelHead, ToChoices] = {
    ModelHead.LABELS: lambda output: output[None],
    ModelHead.TOKENS: lambda output: output,
    ModelHead.SPAN: lambda output: output.T,
    ModelHead.MASKS: lambda output: output,
}


def top1_agreement(
    actual: ProbeOutputs, expected: ProbeOutputs, to_choices: ToChoices, near_tie_margin: float
) -> float:
    """Return the share of equal top-1 classes; 1 if there is no decision to compare.

    Skips a decision if its two best classes in `expected` differ by less than `near_tie_margin` in
    probability.
    """
    equal: list[NDArray[np.bool_]] = []
    for output, expected_output in zip(actual, expected, strict=True):
        logits, expected_logits = to_choices(output), to_choices(expected_output)
        same_class = logits.argmax(axis=1) == expected_logits.argmax(axis=1)
        equal.append(same_class[_top2_gaps(expected_logits) >= near_tie_margin])
    decisions = np.concatenate(equal)
    return float(decisions.mean()) if len(decisions) else 1.0


def _top2_gaps(logits: Floats) -> NDArray[np.float64]:
    """Return the probability difference of the two best classes per row; 1 for a single class."""
    if logits.shape[1] < 2:
        return np.ones(len(logits))
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    best = np.partition(weights, -2, axis=1)[:, -2:]
    return np.asarray((best[:, 1] - best[:, 0]) / weights.sum(axis=1))


def logit_correlation(actual: ProbeOutputs, expected: ProbeOutputs) -> float:
    """Return the correlation of all logits, centered per class; lower if their variances differ.

    The value is 2 cov(a, b) / (var a + var b). For logits that are 1.3 times as large, and thus for
    other probabilities, it is 0.97. Offsets of classes do not count: `top1_agreement` finds those
    that change a choice.

    `top1_agreement` finds no error if one class is the best everywhere, or if no choice is clear.
    Both outputs count as if the same noise, with a deviation of _LOGIT_NOISE, were added to them.
    The result is therefore near 1 if both outputs hardly vary.
    """
    actual_means, expected_means = _class_means(actual), _class_means(expected)
    products, count = np.zeros(3), 0
    for output, expected_output in zip(actual, expected, strict=True):
        x = np.atleast_2d(output) - actual_means
        y = np.atleast_2d(expected_output) - expected_means
        products += (x * y).sum(), (x * x).sum(), (y * y).sum()
        count += x.size
    covariance, variance, expected_variance = products / max(count, 1) + _LOGIT_NOISE**2
    return float(2 * covariance / (variance + expected_variance))


def _class_means(outputs: ProbeOutputs) -> NDArray[np.float64]:
    """Return the mean logit per class, [C], over all rows of all outputs."""
    rows = [np.atleast_2d(output) for output in outputs]
    total = np.sum([each.sum(axis=0, dtype=np.float64) for each in rows], axis=0)
    return np.asarray(total / max(sum(map(len, rows)), 1))


def _find_violations(parity: Parity, gate: Gate, *, is_score: bool) -> Iterator[str]:
    measured: list[tuple[str, float, float]] = [
        ("mean cosine", parity.cosine_mean, gate.cosine_mean),
        ("worst cosine", parity.cosine_worst, gate.cosine_worst),
        ("worst batched cosine", parity.batched_cosine_worst, gate.batched_cosine_worst),
    ]
    if (
        parity.top1_agreement is not None
        and parity.batched_top1_agreement is not None
        and parity.logit_correlation is not None
    ):
        measured = [
            ("top-1 agreement", parity.top1_agreement, gate.top1_agreement),
            ("logit correlation", parity.logit_correlation, gate.logit_correlation),
            (
                "batched top-1 agreement",
                parity.batched_top1_agreement,
                gate.batched_top1_agreement,
            ),
        ]
    elif is_score:  # one concordance is both mean and worst value: apply the stricter limit
        measured = [
            ("concordance", parity.cosine_mean, max(gate.cosine_mean, gate.cosine_worst)),
            ("batched concordance", parity.batched_cosine_worst, gate.batched_cosine_worst),
        ]
    for name, value, minimum in measured:
        if value < minimum:
            yield f"{name} {value:.4f} < {minimum}"


def cosines(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Return the cosine of each flattened output with its counterpart, [N]."""
    return np.array([_cosine(x.ravel(), y.ravel()) for x, y in zip(a, b, strict=True)])


def scaled_cosines(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Return the cosine of each output with its counterpart, lower if their norms differ, [N].

    The value is 2 a*b / (a*a + b*b): a norm that is 20 % larger lowers it by 1.6 %.
    """
    pairs = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b, strict=True)]
    return np.array([2 * float(x @ y) / max(float(x @ x + y @ y), 1e-12) for x, y in pairs])


def sparse_cosines(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Return `scaled_cosines` of sparse vectors, [N].

    All vectors count as if they had one more entry, of _SPARSE_ENTRY times the mean norm. Few texts
    have a nearly empty vector. Its errors are large only relative to its own norm, and so small
    that they change no search result.
    """
    entry = _SPARSE_ENTRY * float(np.mean([np.linalg.norm(y) for y in b]))
    return scaled_cosines([np.append(x, entry) for x in a], [np.append(y, entry) for y in b])


def concordance(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Return the concordance correlation, shape [1], of two outputs with one score per item.

    The value is 2 cov(a, b) / (var a + var b + (mean a - mean b)^2), that is the correlation, lower
    if the scores have an offset or a factor. It is 0.985 for random errors, or for an offset, of
    0.17 standard deviations of the scores, and for the factors 0.84 and 1.19.
    """
    x, y = (np.concatenate(scores).astype(np.float64) for scores in (a, b))
    spread = x.var() + y.var() + (x.mean() - y.mean()) ** 2
    return np.array([1 - np.square(x - y).mean() / max(spread, 1e-12)])


def _cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    if not x.size:
        return 1.0  # a text without a mask token has no output to compare
    return float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12)
