"""One tuning of one model on one kind of host: locked, measured, kept."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.manifest import REFERENCE_NAME
from deployments.tuning.costs import CostTable, Shape, read_costs, write_costs
from deployments.tuning.measure import shapes_up_to
from deployments.tuning.parity import Reference
from deployments.tuning.placement import Placement
from deployments.tuning.tuner import Contest, tune


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
        with _lock_path(placement).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no such locks in this file system
        return False
    return False


def _lock_path(placement: Placement) -> Path:
    return placement.costs_path.with_suffix(".lock")


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Whether the lock is ours; the kernel frees it when its holder dies.

    The file stays: who waits for a lock on a file that is removed waits for the wrong one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
