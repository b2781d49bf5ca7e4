"""Our metrics once more under the names of text-embeddings-inference's.

Dashboards and autoscalers know those. Only what we measure in the same sense is told: there is
nothing per request about tokenization, queue and inference, and nothing per text and task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deployments.metrics import PREFIX

STATUS = re.compile(r'\bstatus="(\d+)"')


@dataclass(frozen=True, slots=True)
class Alias:
    """One family under another name; `label` may drop a sample (None) or add a label to it."""

    name: str
    source: str
    kind: str
    description: str
    label: Callable[[str], str | None] = lambda _labels: ""

    def lines(self, exposition: str) -> Iterator[str]:
        """The samples under the new name, with the labels they have."""
        sample = re.compile(rf"^{self.source}((?:_bucket|_sum|_count)?)(?:{{(.*)}})? (\S+)$", re.M)
        for suffix, labels, value in sample.findall(exposition):
            own = self.label(labels)
            if own is not None:
                yield f"{self.name}{suffix}{{{own}{labels}}} {value}"


def with_te_names(exposition: str) -> str:
    """The text, and behind it the families that have an alias."""
    lines: list[str] = []
    for alias in ALIASES:
        if samples := list(alias.lines(exposition)):
            lines += (
                f"# HELP {alias.name} {alias.description}",
                f"# TYPE {alias.name} {alias.kind}",
                *samples,
            )
    return exposition + "".join(f"{line}\n" for line in lines)


def _only_success(labels: str) -> str | None:
    return "" if _status(labels) == 200 else None


def _reason_of_failure(labels: str) -> str | None:
    status = _status(labels)
    if status == 200:
        return None
    if status == 429:
        return 'err="overloaded",'
    return 'err="validation",' if status < 500 else 'err="inference",'


def _status(labels: str) -> int:
    found = STATUS.search(labels)
    return int(found[1]) if found else 200


ALIASES = (
    Alias("te_request_count", f"{PREFIX}_requests_total", "counter", "Requests"),
    Alias(
        "te_request_success",
        f"{PREFIX}_requests_total",
        "counter",
        "Requests that were answered",
        _only_success,
    ),
    Alias(
        "te_request_failure",
        f"{PREFIX}_requests_total",
        "counter",
        "Requests that failed: by the client, for want of room, or here",
        _reason_of_failure,
    ),
    Alias(
        "te_request_duration",
        f"{PREFIX}_request_seconds",
        "histogram",
        "Whole request inside the ingress, seconds",
    ),
    Alias("te_batch_next_size", f"{PREFIX}_batch_items", "histogram", "Items in a forward pass"),
    Alias("te_queue_size", f"{PREFIX}_waiting_items", "gauge", "Texts waiting when a pass ended"),
)
