"""One forward pass of an engine: an output or an error per item."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.batching.batches import collate
from deployments.engines.base import EncoderEngine
from deployments.errors import EngineFailed, EngineLost, ServeError, WrongTask, hide_details
from deployments.messages import TokenizedItem

log = logging.getLogger("ray.serve.hundredfold")


@dataclass(slots=True)
class PassResult:
    """Result of one forward pass: an array or an error per item."""

    compute_type: str
    started_s: float
    results: list[NDArray[np.float32] | ServeError] = field(default_factory=list)
    forward_s: float = 0.0


def check_unpooled(engine: EncoderEngine) -> None:
    """Raise WrongTask if the engine returns no vectors of single tokens."""
    if not engine.info.supports_unpooled:
        raise WrongTask(
            f"the {engine.info.compute_type} graph of this model returns one vector per text, none "
            "per token. Build the model again: ONNX graphs of this release return both."
        )


def run_pass(engine: EncoderEngine, items: list[TokenizedItem], unpooled: bool) -> PassResult:
    """Run one forward pass. Never raises: errors are in the results."""
    done = PassResult(engine.info.compute_type, started_s=time.perf_counter())
    done.results.extend(_compute(engine, items, unpooled))
    done.forward_s = time.perf_counter() - done.started_s
    return done


def _compute(
    engine: EncoderEngine, items: list[TokenizedItem], unpooled: bool
) -> list[NDArray[np.float32] | ServeError]:
    """Run a pass. If it fails as a whole, run both halves of it, so that only faulty items fail.

    If the engine is lost, all items fail at once.
    """
    try:
        outputs = engine.run(collate(items, unpooled=unpooled)).items
        if len(outputs) != len(items):
            raise EngineFailed(f"the engine returned {len(outputs)} outputs for {len(items)} items")
        return _reject_nonfinite(outputs)
    except Exception as error:
        if len(items) == 1 or isinstance(error, EngineLost):
            log.error("%s: a pass failed", engine.info.compute_type, exc_info=error)
            return [hide_details(error)] * len(items)
    middle = len(items) // 2
    return [
        *_compute(engine, items[:middle], unpooled),
        *_compute(engine, items[middle:], unpooled),
    ]


def _reject_nonfinite(
    outputs: Sequence[NDArray[np.float32]],
) -> list[NDArray[np.float32] | ServeError]:
    """Replace each output that contains NaN or infinity with an error."""
    if isinstance(outputs, np.ndarray) and np.isfinite(outputs.sum()):
        return list(outputs)  # a finite sum proves that all outputs are finite
    error = EngineFailed("the model's output contains NaN or infinity")
    return [output if np.isfinite(output).all() else error for output in outputs]
