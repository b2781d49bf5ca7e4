"""Cost tables of other hosts, for models that were not measured on this host."""

from __future__ import annotations

import logging
from math import log as logarithm

from pydantic import ValidationError

from deployments.artifacts.store import list_host_files
from deployments.tuning.costs import (
    CostTable,
    TuningTarget,
    find_artifact_mismatch,
    read_costs,
)
from deployments.tuning.host import Host, read_engine_versions

log = logging.getLogger("ray.serve.hundredfold")


def find_selecting_costs(target: TuningTarget) -> CostTable | None:
    """Return the cost table that selects the variants of `target`; None if there is none.

    Prefer the table of this host. Otherwise use the table of the most similar host whose variants
    compute the same outputs here. The most similar host may be this host, measured with another
    number of threads.
    """
    return read_costs(target) or next(
        (one for one in read_similar_costs(target) if computes_alike(one, target)), None
    )


def find_nearest_costs(target: TuningTarget) -> CostTable | None:
    """Return the table that predicts the times of `target` best; None if there is none."""
    return read_costs(target) or next(iter(read_similar_costs(target)), None)


def read_similar_costs(target: TuningTarget) -> list[CostTable]:
    """Return the model's tables for the device of `target`, the most similar host first.

    For each host, the tables with the most similar number of threads come first. Leaves out tables
    that are unreadable or of another artifact.
    """
    tables = []
    for path in list_host_files(target.artifact, f"{target.device}-*.json"):
        try:
            table = CostTable.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("%s is not used: %s", path, error)
            continue
        if find_artifact_mismatch(table, target) is None:
            tables.append(table)
    host, threads = target.host, target.settings.intra_op_threads
    return sorted(tables, key=lambda one: (*_distance(one.host, host), abs(one.threads - threads)))


def computes_alike(table: CostTable, target: TuningTarget) -> bool:
    """Return whether the table's variants give the same outputs here as on the table's host.

    The processor's instructions, the GPU, the providers and the engine versions decide which
    kernels run.
    """
    here = target.host
    return (
        (table.host.flags, table.providers) == (here.flags, target.settings.providers)
        and (here.device == "cpu" or table.host.name == here.name)
        and table.engines == read_engine_versions(each.engine for each in target.candidates)
    )


def _distance(there: Host, here: Host) -> tuple[bool, bool, bool, float]:
    return (
        there.flags != here.flags,
        there.generation != here.generation,
        there.name != here.name,
        abs(logarithm(there.cores / here.cores)),
    )
