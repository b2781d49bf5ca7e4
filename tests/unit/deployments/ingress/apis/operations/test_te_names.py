from __future__ import annotations

from deployments.ingress.apis.operations.metrics_text import add_aliases

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


def test_aliases_of_nothing_are_empty() -> None:
    assert add_aliases("\n") == "\n"
