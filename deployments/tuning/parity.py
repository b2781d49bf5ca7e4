"""Whether a graph still answers like the fp32 torch model, through the code that will serve.

The build writes a ReferenceOutputs; builds and hosts hold every candidate against it: `answers` alone and
in company, then `judge`. Nothing here needs torch.
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
from pydantic import BaseModel, ConfigDict

from deployments.artifacts.manifest import Gate, Parity
from deployments.artifacts.types import ModelHead
from deployments.batching.batches import collate
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine, GraphSpec, open_engine
from deployments.errors import ArtifactError, EngineFailed
from deployments.messages import TokenizedItem

Number = TypeVar("Number", bound=np.generic)
Floats: TypeAlias = NDArray[np.float32]
ProbeOutputs: TypeAlias = Sequence[Floats]  # one array per probe, of the shape its ModelHead says

# Probes of one batch in the company test; probes of all lengths are mixed in it.
PARITY_BATCH_ITEMS = 8


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """Probes, and what the fp32 torch model answers to each of them alone."""

    items: tuple[TokenizedItem, ...]
    outputs: tuple[Floats, ...]

    def write(self, path: Path) -> None:
        """Keep it in one .npz file: ragged arrays end to end, and where each of them ends.

        ProbeOutputs stay fp32, for half the digits would be noise beside a good int8 graph's.
        """
        pooled = self.outputs[0].ndim == 1
        rows = [answer[None] if pooled else answer for answer in self.outputs]
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
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote. Raises ArtifactError."""
        try:
            # np.load leaves a path open when the file is no archive; an open file is closed here.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                ids = _parts(file["ids"], file["id_ends"])
                answers = _parts(file["outputs"], file["output_ends"])
                seconds = file["second_segment_start"].tolist()
                pooled = bool(file["pooled"])
            items = tuple(TokenizedItem(i, s) for i, s in zip(ids, seconds, strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as exc:
            raise ArtifactError(f"{path}: not a reference: {exc}") from exc
        return cls(items, tuple(rows[0] if pooled else rows for rows in answers))


def _ends(parts: Sequence[NDArray[Number]]) -> NDArray[np.int64]:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)


def _parts(flat: NDArray[Number], ends: NDArray[np.int64]) -> list[NDArray[Number]]:
    starts = [0, *ends.tolist()]
    if starts != sorted(starts) or starts[-1] != len(flat):
        raise ValueError("the parts do not make up the whole")
    return [flat[start:end] for start, end in pairwise(starts)]


class ParityResult(BaseModel):
    """How a candidate did. `parity` is None when it gave no usable numbers at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parity: Parity | None
    reasons: tuple[str, ...]  # empty: it passed

    @property
    def passed(self) -> bool:
        """Whether the candidate may be sealed."""
        return not self.reasons


def run_probes(engine: EncoderEngine, items: Sequence[TokenizedItem], company: int) -> list[Floats]:
    """The engine's answer to every item, `company` items to a batch. Raises EngineFailed."""
    batches = (items[i : i + company] for i in range(0, len(items), company))
    return [answer for batch in batches for answer in engine.run(collate(batch)).items]


def check_graph(
    spec: GraphSpec, settings: EncoderSettings, reference: ReferenceOutputs, gate: Gate
) -> ParityResult:
    """The graph against the reference; one that cannot be opened or fails has no parity."""
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
    """What the engine makes of the probes, alone and in company, held against the gate."""
    try:
        alone = run_probes(engine, reference.items, 1)
        company = run_probes(engine, reference.items, PARITY_BATCH_ITEMS)
    except EngineFailed as exc:
        return ParityResult(parity=None, reasons=(exc.message,))
    return compare_outputs(reference, alone, company, gate, head)


def compare_outputs(
    reference: ReferenceOutputs,
    alone: ProbeOutputs,
    company: ProbeOutputs,
    gate: Gate,
    head: ModelHead,
) -> ParityResult:
    """Parity of a candidate's answers to the reference's probes, and where they miss the gate.

    Vectors are judged by their cosines. Whatever chooses (a label, a token's label, the ends of a
    span, a masked token) is judged by its choices, alone and in company, the worse counts, because
    the cosine of a few logits says little; a single score by its correlation with the reference
    over all probes, because the cosine of one number is its sign.
    """
    for given in (alone, company):
        if unusable := _invalid_output(given, reference.outputs):
            return ParityResult(parity=None, reasons=(unusable,))
    single = head is ModelHead.LABELS and len(reference.outputs[0]) == 1
    likeness = correlation if single else cosines
    against = likeness(alone, reference.outputs)
    agreement = None
    if head is not ModelHead.VECTOR and not single:
        agreement = min(
            top1_agreement(given, reference.outputs, head, gate.near_tie_margin)
            for given in (alone, company)
        )
    parity = Parity(
        cosine_mean=float(against.mean()),
        cosine_worst=float(against.min()),
        batched_cosine_worst=float(likeness(alone, company).min()),
        top1_agreement=agreement,
    )
    return ParityResult(parity=parity, reasons=tuple(_violations(parity, gate)))


def _invalid_output(given: ProbeOutputs, due: ProbeOutputs) -> str | None:
    if [answer.shape for answer in given] != [answer.shape for answer in due]:
        return "an answer is not of the reference's shape"
    if not all(np.isfinite(answer).all() for answer in given):
        return "an output is not a finite number"
    return None


# Rows [D, C] of C logits each, of which the best is the choice.
_CHOICES: Mapping[ModelHead, Callable[[Floats], Floats]] = {
    ModelHead.LABELS: lambda answer: answer[None],
    ModelHead.TOKENS: lambda answer: answer,
    ModelHead.SPAN: lambda answer: answer.T,
    ModelHead.MASKS: lambda answer: answer,
}


def top1_agreement(
    given: ProbeOutputs, due: ProbeOutputs, head: ModelHead, near_tie_margin: float
) -> float:
    """Share of the choices `due` is decided about that `given` makes too; 1 if there is none."""
    same: list[NDArray[np.bool_]] = []
    for mine, theirs in zip(given, due, strict=True):
        chosen, right = _CHOICES[head](mine), _CHOICES[head](theirs)
        agreeing = chosen.argmax(axis=1) == right.argmax(axis=1)
        same.append(agreeing[_gaps(right) >= near_tie_margin])
    decided = np.concatenate(same)
    return float(decided.mean()) if len(decided) else 1.0


def _gaps(logits: Floats) -> NDArray[np.float64]:
    """Probability between the two best of each row; 1 where there is but one."""
    if logits.shape[1] < 2:
        return np.ones(len(logits))
    shares = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    best = np.partition(shares, -2, axis=1)[:, -2:]
    return np.asarray((best[:, 1] - best[:, 0]) / shares.sum(axis=1))


def _violations(parity: Parity, gate: Gate) -> Iterator[str]:
    measured: list[tuple[str, float, float]] = [
        ("mean cosine", parity.cosine_mean, gate.cosine_mean),
        ("worst cosine", parity.cosine_worst, gate.cosine_worst),
        ("worst cosine alone to company", parity.batched_cosine_worst, gate.cosine_worst),
    ]
    if parity.top1_agreement is not None:
        measured = [("top-1 agreement", parity.top1_agreement, gate.top1_agreement)]
    for what, value, least in measured:
        if value < least:
            yield f"{what} {value:.4f} < {least}"


def cosines(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Cosine of each answer, taken as one long vector, with its counterpart; [N]."""
    return np.array([_cosine(x.ravel(), y.ravel()) for x, y in zip(a, b, strict=True)])


def correlation(a: ProbeOutputs, b: ProbeOutputs) -> NDArray[np.float64]:
    """Correlation of two lists of single scores, [1]."""
    x, y = (np.concatenate(scores).astype(np.float64) for scores in (a, b))
    return np.array([_cosine(x - x.mean(), y - y.mean())])


def _cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    if not x.size:
        return 1.0  # a text without a mask token: nothing was asked, nothing is wrong
    return float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), 1e-12)
