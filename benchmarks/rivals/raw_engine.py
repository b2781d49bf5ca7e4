"""Rate of the engine alone on the texts of the workloads, as if the server had no overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from benchmarks.common.engine_timing import SENTENCES_PER_BATCH, RawEngine
from benchmarks.common.local_model import LocalModel
from benchmarks.common.report import format_number, log_progress
from benchmarks.common.statistics import RoundSummary, summarize
from benchmarks.rivals.workloads import TextWorkload
from deployments.host.machine import usable_cores
from deployments.tuning.measure import wait_until_idle

# Approximate number of tokens of the texts per workload; RawEngine repeats them for many cores.
MEASURED_TOKENS = 40_000


class RawEngineRates:
    """Rates of the artifact's graph in this process: all cores, batches sorted by length."""

    def __init__(self, model: LocalModel, workloads: Sequence[TextWorkload]) -> None:
        self._rates: dict[str, list[float]] = {}
        self._sizes = {workload.name: workload.texts_per_request for workload in workloads}
        self._engines = {
            workload.name: RawEngine(model, take_texts(workload), usable_cores())
            for workload in workloads
            if not workload.is_generation
        }

    def run_round(self, number: int) -> None:
        for name, engine in self._engines.items():
            engine.warm_up(SENTENCES_PER_BATCH)
            wait_until_idle()
            rate = engine.sentences_per_s(engine.splits[0], SENTENCES_PER_BATCH) / self._sizes[name]
            self._rates.setdefault(name, []).append(rate)
            shown = format_number(rate, 1)
            log_progress(f"round {number}: the engine alone, {name}, {shown} requests/s")

    def summarize(self) -> Mapping[str, RoundSummary]:
        """Return requests per second by workload."""
        return {name: summarize(rates) for name, rates in self._rates.items()}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def take_texts(workload: TextWorkload) -> list[str]:
    """Return the first texts of a workload: about MEASURED_TOKENS tokens, at least one text."""
    count = max(1, int(MEASURED_TOKENS / workload.tokens))
    return list(islice(chain.from_iterable(workload.requests), count))
