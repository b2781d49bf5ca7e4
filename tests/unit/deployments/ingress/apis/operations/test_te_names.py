from __future__ import annotations

import re
from pathlib import Path

import pytest

from deployments.ingress.apis.operations.metrics_text import ALIASES, add_aliases

ROOT = Path(__file__).parents[6]

OURS = """\
# HELP hundredfold_requests_total Requests answered, by status
# TYPE hundredfold_requests_total counter
hundredfold_requests_total{replica="aa",model="org/m",status="200"} 3
hundredfold_requests_total{replica="aa",model="org/m",status="422",} 2
hundredfold_requests_total{replica="aa",model="org/m",status="429"} 1
hundredfold_requests_total{replica="aa",model="org/m",status="500"} 4
hundredfold_requests_total{model="org/m",task="feature-extraction",status="200"} 5
hundredfold_requests_total{model="org/m",task="feature-extraction",status="504"} 1
# HELP hundredfold_request_seconds Whole request inside the ingress
# TYPE hundredfold_request_seconds histogram
hundredfold_request_seconds_bucket{le="0.1",model="org/m"} 3
hundredfold_request_seconds_sum{model="org/m"} 0.2
hundredfold_request_seconds_count{model="org/m"} 3
# HELP hundredfold_waiting_items Texts waiting when a pass ended
# TYPE hundredfold_waiting_items gauge
hundredfold_waiting_items 7
# HELP hundredfold_queue_seconds Longest wait for an engine thread
# TYPE hundredfold_queue_seconds histogram
hundredfold_queue_seconds_count{model="org/m"} 1
"""


def added() -> list[str]:
    text = add_aliases(OURS)
    assert text.startswith(OURS), "the input text must stay"
    return text.removeprefix(OURS).splitlines()


def test_aliases_count_requests_by_outcome() -> None:
    lines = added()
    labels = 'replica="aa",model="org/m"'
    embed = 'model="org/m",task="feature-extraction"'
    assert [line for line in lines if line.startswith("te_request_success")] == [
        f'te_request_success{{{labels},status="200"}} 3',
        f'te_request_success{{{embed},status="200"}} 5',
    ]
    assert [line for line in lines if line.startswith("te_request_failure")] == [
        f'te_request_failure{{err="validation",{labels},status="422",}} 2',
        f'te_request_failure{{err="overloaded",{labels},status="429"}} 1',
        f'te_request_failure{{err="inference",{labels},status="500"}} 4',
        f'te_request_failure{{err="inference",{embed},status="504"}} 1',
    ]
    assert len([line for line in lines if line.startswith("te_request_count")]) == 6
    assert [line for line in lines if line.startswith("te_embed")] == [
        f'te_embed_count{{{embed},status="200"}} 5',
        f'te_embed_count{{{embed},status="504"}} 1',
        f'te_embed_success{{{embed},status="200"}} 5',
    ]


def test_aliases_keep_histogram_and_gauge_samples() -> None:
    lines = added()
    assert 'te_request_duration_bucket{le="0.1",model="org/m"} 3' in lines
    assert 'te_request_duration_sum{model="org/m"} 0.2' in lines
    assert "te_queue_size{} 7" in lines


def test_each_alias_has_one_header_and_samples() -> None:
    lines = added()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert types == [
        "te_request_count",
        "te_request_success",
        "te_request_failure",
        "te_request_duration",
        "te_queue_size",
        "te_embed_count",
        "te_embed_success",
    ]
    assert not any("queue_duration" in line for line in lines), "per pass is not per request"


SOURCES = """\
hundredfold_batch_items_bucket{le="8",deployment="CpuEncoder"} 6
hundredfold_batch_items_sum{deployment="CpuEncoder"} 9
hundredfold_batch_items_count{deployment="CpuEncoder"} 6
hundredfold_request_seconds_count{task="feature-extraction",status="200"} 4
hundredfold_request_seconds_count{task="text-classification",status="200"} 2
hundredfold_requests_total{task="feature-extraction",status="200"} 4
hundredfold_requests_total{task="text-classification",status="200"} 2
hundredfold_requests_total{task="text-classification",status="422"} 1
hundredfold_waiting_items 7
hundredfold_waiting_requests 5
"""


@pytest.mark.parametrize(
    "line",
    [
        'te_batch_next_size_bucket{le="8",deployment="CpuEncoder"} 6',
        'te_batch_next_size_sum{deployment="CpuEncoder"} 9',
        "tgi_queue_size{} 5",
        'te_embed_duration_count{task="feature-extraction",status="200"} 4',
        'te_predict_count{task="text-classification",status="422"} 1',
        'te_predict_success{task="text-classification",status="200"} 2',
        'te_predict_duration_count{task="text-classification",status="200"} 2',
    ],
)
def test_aliases_have_the_values_of_their_sources(line: str) -> None:
    lines = add_aliases(SOURCES).splitlines()
    assert line in lines
    assert not any(each.startswith("te_predict_success") and "422" in each for each in lines)


def test_every_documented_name_is_that_of_an_alias() -> None:
    text = (ROOT / "docs/apis.md").read_text(encoding="utf-8")
    repeated = text.partition("- `/metrics` repeats metrics ")[2].partition(" Under")[0]
    names = set(re.findall(r"`(\w+)`", repeated))
    kinds = "count", "success", "duration"
    by_kind = {f"{name}_{kind}" for name in ("te_embed", "te_predict") for kind in kinds}
    assert {"te_embed", "te_predict"} <= names
    assert names - {"te_embed", "te_predict"} | by_kind == {alias.name for alias in ALIASES}


def test_aliases_of_nothing_are_empty() -> None:
    assert add_aliases("\n") == "\n"
