"""Activations on calibration texts: ranges over all tokens, and values of sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from build_artifacts.graph_files import open_with_outputs
from build_artifacts.types import FloatArray

CalibrationInputs = Mapping[str, NDArray[np.int64]]

# Minimum number of tokens whose values are stored; the maximum is twice this number. If the texts
# have fewer tokens, the values of all tokens are stored. BERT-large needs 700 KB per token. 512
# tokens give MiniLM the same accuracy and take twice the time.
_SAMPLED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Observed:
    """One activation: the range of each channel [K], and the values of sampled tokens [N, K]."""

    low: FloatArray
    high: FloatArray
    sample: FloatArray

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        return cls(
            np.min([part.low for part in parts], axis=0),
            np.max([part.high for part in parts], axis=0),
            np.concatenate([part.sample for part in parts]),
        )

    def transform(self, scale: FloatArray, shift: FloatArray) -> Observed:
        """Return the activation (x - shift) / scale; every scale is positive."""
        return Observed(
            (self.low - shift) / scale, (self.high - shift) / scale, (self.sample - shift) / scale
        )


def observe(
    graph: Path, names: Sequence[str], feeds: Sequence[CalibrationInputs]
) -> dict[str, Observed]:
    """Run the float `graph` on each of `feeds` and return the activations by name."""
    tokens = sum(each["input_ids"].size for each in feeds)
    step = max(1, tokens // _SAMPLED_TOKENS)
    found: dict[str, list[Observed]] = {name: [] for name in names}
    first = 0
    for values in _run(graph, names, feeds):
        count = len(next(iter(values.values())))
        for name, rows in values.items():
            seen = Observed(rows.min(axis=0), rows.max(axis=0), rows[-first % step :: step].copy())
            found[name].append(seen)
        first += count
    return {name: Observed.merge(parts) for name, parts in found.items()}


def _run(
    graph: Path, names: Sequence[str], feeds: Iterable[CalibrationInputs]
) -> Iterable[dict[str, FloatArray]]:
    """Yield the activations of each text, [tokens, K], by name."""
    from onnxruntime import GraphOptimizationLevel

    session = open_with_outputs(graph, list(names), GraphOptimizationLevel.ORT_ENABLE_BASIC)
    for each in feeds:
        values = session.run(list(names), dict(each))
        yield {
            name: np.asarray(value, np.float32).reshape(-1, value.shape[-1])
            for name, value in zip(names, values, strict=True)
        }
