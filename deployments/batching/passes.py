"""One forward pass of an engine: an output or an error per item."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.batching.batch_policy import collate
from deployments.engines.base import EncoderEngine
from deployments.errors import EngineFailed, EngineLost, ServeError, WrongTask, hide_details
from deployments.messages import TokenizedItem

PROBE_TOKENS = 4

log = logging.getLogger("ray.serve.hundredfold")


@dataclass(slots=True)
class PassResult:
    """Result of one forward pass: an array or an error per item.

    `failure` is set only if the engine fails on a known good item too, or is lost.
    """

    compute_type: str
    started_s: float
    results: list[NDArray[np.float32] | ServeError] = field(default_factory=list)
    forward_s: float = 0.0
    failure: EngineFailed | None = None


def check_unpooled(engine: EncoderEngine) -> None:
    """Raise WrongTask if the engine cannot return one vector per token."""
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


def build_probe_item(mask_token: int | None = None) -> TokenizedItem:
    """Build an item that every working engine computes; models for fill-mask need a mask token."""
    ids = np.arange(PROBE_TOKENS, dtype=np.int32)
    if mask_token is not None:
        ids[1] = mask_token
    return TokenizedItem(ids, PROBE_TOKENS)


def run_checked_pass(
    engine: EncoderEngine,
    items: list[TokenizedItem],
    unpooled: bool,
    get_known_good: Callable[[], TokenizedItem],
) -> PassResult:
    """Run one forward pass. If every item fails, run a known good item.

    If the known good item fails too, the engine is at fault and `failure` is set. A lost engine is
    at fault without this check. The check is needed because texts of one client may cause NaN
    outputs. Such texts must not lead to the quarantine of the model.
    """
    done = run_pass(engine, items, unpooled)
    failures = [result for result in done.results if isinstance(result, EngineFailed)]
    if len(failures) == len(items):
        lost = [failure for failure in failures if isinstance(failure, EngineLost)]
        (known,) = lost[:1] or _compute(engine, [get_known_good()], unpooled)
        done.failure = known if isinstance(known, EngineFailed) else None
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
