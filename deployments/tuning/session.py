"""One tuning of one model on one kind of host: locked, measured, kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.locks import held, held_if_free, is_held
from deployments.manifest import REFERENCE_NAME
from deployments.tuning.costs import CostTable, Shape, read_costs, write_costs
from deployments.tuning.measure import shapes_up_to
from deployments.tuning.parity import Reference
from deployments.tuning.placement import Placement
from deployments.tuning.tuner import Contest, tune

log = logging.getLogger("ray.serve.hundredfold")


def tune_once(
    placement: Placement,
    seconds: float,
    *,
    force: bool = False,
    wait: bool = False,
    shapes: Sequence[Shape] | None = None,
) -> CostTable | None:
    """The table of this host, measured now unless a valid one is there and `force` is not set.

    One at a time per kind of host, wherever the store is shared: while somebody else measures,
    `wait` decides between waiting and None. `shapes` None: all that the model reads of the usual
    ones. Raises ArtifactError, EngineFailed, and OSError where the store cannot be written.
    """
    with _locked(_lock_path(placement), wait=wait) as is_ours:
        if not is_ours:
            return None
        if not force and (found := read_costs(placement)) is not None:
            return found
        reference = Reference.read(placement.artifact / REFERENCE_NAME)
        contest = Contest(
            lane=placement.lane,
            shapes=shapes or shapes_up_to(placement.manifest.max_tokens),
            items=reference.items,
            seconds=seconds,
        )
        table = tune(placement, reference, contest)
        write_costs(placement.artifact, table)
        return table


def is_being_tuned(placement: Placement) -> bool:
    """Whether somebody measures for this kind of host right now."""
    try:
        return is_held(_lock_path(placement))
    except OSError:  # nothing to be read there, or no such locks in this file system
        return False


def _lock_path(placement: Placement) -> Path:
    return placement.costs_path.with_suffix(".lock")


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Whether the lock is ours, which it always is after a wait."""

    def tell(holder: str) -> None:
        log.info("waiting for the tuning by %s", holder or "another process")

    path.parent.mkdir(parents=True, exist_ok=True)
    if not wait:
        with held_if_free(path) as is_ours:
            yield is_ours
        return
    with held(path, tell):
        yield True
