"""Step 5: a candidate graph against the fp32 torch model, through the code that will serve.

Texts go through the server's own encoder, collation and engine, so that what is verified is what
answers later, on the CPU provider: an FP16 graph computes the same numbers there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from build_artifacts.facts import ModelFacts
from build_artifacts.models import load_model
from build_artifacts.recipe import CandidateRecipe, Gate
from build_artifacts.rows import reads_token_types, row_model
from deployments.batching.collate import collate
from deployments.encoding.encoder import Encoder
from deployments.engines.base import Engine, EngineInfo
from deployments.errors import EngineFailed
from deployments.manifest import Parity
from deployments.messages import Call, TokenIds, Truncation
from deployments.tasks.text_classification import softmax

Rows = NDArray[np.float32]  # [N, W], one row per probe

# Items of one batch in the company test; probes of all lengths are mixed in it.
COMPANY_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Reference:
    """What the fp32 torch model answers to the probes."""

    probes: tuple[TokenIds, ...]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a candidate did. `parity` is None when it gave no usable numbers at all."""

    parity: Parity | None
    reasons: tuple[str, ...]  # empty: it passed

    @property
    def passed(self) -> bool:
        """Whether the candidate may be sealed."""
        return not self.reasons


def encode_probes(directory: Path, max_tokens: int, texts: Sequence[str]) -> tuple[TokenIds, ...]:
    """Token ids of each text, cut to `max_tokens`, by the tokenizer.json in `directory`."""
    call = Call(
        texts=tuple(texts),
        fields=tuple(f"probes[{i}]" for i in range(len(texts))),
        options=None,
        truncation=Truncation.KEEP_START,
        deadline_s=float("inf"),
    )
    (encoded,) = Encoder(directory, max_tokens).encode([call])
    if isinstance(encoded, BaseException):
        raise encoded
    return tuple(encoded.ids)


def torch_rows(weights: Path, facts: ModelFacts, probes: Iterable[TokenIds]) -> Rows:
    """The fp32 torch model's rows for the probes, each computed alone."""
    import torch

    model = load_model(weights, is_embedding=facts.is_embedding, dtype="float32")
    model = row_model(model, facts.pooling)
    token_types = reads_token_types(model)
    rows = []
    with torch.inference_mode():
        for ids in probes:
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if token_types:
                inputs["token_type_ids"] = torch.zeros_like(tokens)
            rows.append(model(**inputs)[0].numpy())
    return np.stack(rows)


def verify(
    graph: Path, recipe: CandidateRecipe, facts: ModelFacts, reference: Reference, gate: Gate
) -> Verdict:
    """Run `graph` on the probes, alone and in company, and hold it against the gate."""
    from deployments.engines.onnx import OnnxEngine

    info = EngineInfo(compute_type=recipe.name)
    try:
        engine = OnnxEngine(graph, info, disabled_optimizers=recipe.disabled_optimizers)
        alone = _answers(engine, reference.probes, 1)
        company = _answers(engine, reference.probes, COMPANY_ITEMS)
        engine.close()
    except EngineFailed as exc:
        return Verdict(None, (exc.message,))
    return judge(reference.rows, alone, company, facts, gate)


def _answers(engine: Engine, probes: Sequence[TokenIds], items: int) -> Rows:
    batches = (probes[i : i + items] for i in range(0, len(probes), items))
    return np.concatenate([engine.run(collate(batch)).rows for batch in batches])


def judge(reference: Rows, alone: Rows, company: Rows, facts: ModelFacts, gate: Gate) -> Verdict:
    """Parity of a candidate's rows, and where they miss the gate.

    Several labels are judged by their best one, alone and in company, the worse counts, because
    the cosine of two or three numbers says little; a single score by its correlation with the
    reference over all probes, because the cosine of one number is its sign.
    """
    if not (np.isfinite(alone).all() and np.isfinite(company).all()):
        return Verdict(None, ("an output is not a finite number",))
    likeness = correlations if facts.width == 1 else cosines
    against = likeness(alone, reference)
    agreement = None
    if facts.labels and facts.width > 1:
        agreement = min(label_agreement(r, reference, gate.decided_gap) for r in (alone, company))
    parity = Parity(
        cosine_mean=float(against.mean()),
        cosine_worst=float(against.min()),
        company_cosine_worst=float(likeness(alone, company).min()),
        top1_agreement=agreement,
    )
    return Verdict(parity, _misses(parity, gate))


def label_agreement(rows: Rows, reference: Rows, decided_gap: float) -> float:
    """Share of the probes the reference is decided about that get its best label; 1 if none is."""
    odds = np.sort(softmax(reference), axis=1)
    decided = odds[:, -1] - odds[:, -2] >= decided_gap
    same = rows.argmax(axis=1) == reference.argmax(axis=1)
    return float(same[decided].mean()) if decided.any() else 1.0


def _misses(parity: Parity, gate: Gate) -> tuple[str, ...]:
    measured: list[tuple[str, float, float]] = [
        ("mean cosine", parity.cosine_mean, gate.cosine_mean),
        ("worst cosine", parity.cosine_worst, gate.cosine_worst),
        ("worst cosine alone to company", parity.company_cosine_worst, gate.cosine_worst),
    ]
    if parity.top1_agreement is not None:
        measured = [("label agreement", parity.top1_agreement, gate.top1_agreement)]
    return tuple(
        f"{what} {value:.4f} < {least}" for what, value, least in measured if value < least
    )


def cosines(a: Rows, b: Rows) -> NDArray[np.float64]:
    """Cosine of each pair of rows, [N]."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return np.asarray((x * y).sum(axis=1) / np.maximum(norms, 1e-12))


def correlations(a: Rows, b: Rows) -> NDArray[np.float64]:
    """Correlation of two columns of scores over all rows, [1]."""
    x, y = (column.astype(np.float64)[:, 0] for column in (a, b))
    return cosines((x - x.mean())[None], (y - y.mean())[None])
