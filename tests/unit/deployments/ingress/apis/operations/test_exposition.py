from __future__ import annotations

from deployments.ingress.apis.operations.metrics_text import merge_expositions

NODE_A = """\
# HELP ray_node_cpu CPUs
# TYPE ray_node_cpu gauge
ray_node_cpu{ip="10.0.0.1"} 2
# HELP ray_hundredfold_requests_total Requests answered
# TYPE ray_hundredfold_requests_total counter
ray_hundredfold_requests_total{Component="core_worker",Version="2.60.0",WorkerId="aa",model="m"} 3
ray_hundredfold_requests_total{WorkerId="bb",model="m",SessionName="s1"} 4
# HELP ray_hundredfold_queue_seconds Waiting
# TYPE ray_hundredfold_queue_seconds histogram
ray_hundredfold_queue_seconds_bucket{le="0.1",NodeAddress="10.0.0.1",model="m"} 1
ray_hundredfold_queue_seconds_sum{model="m"} 0.05
ray_hundredfold_queue_seconds_count{model="m"} 1
"""
NODE_B = """\
# HELP ray_hundredfold_requests_total Requests answered
# TYPE ray_hundredfold_requests_total counter
ray_hundredfold_requests_total{WorkerId="cc",model="m",otel_scope_name="ray"} 5
"""


def test_merge_has_one_header_per_metric() -> None:
    assert merge_expositions([NODE_A, NODE_B]).splitlines() == [
        "# HELP hundredfold_requests_total Requests answered",
        "# TYPE hundredfold_requests_total counter",
        'hundredfold_requests_total{replica="aa",model="m"} 3',
        'hundredfold_requests_total{replica="bb",model="m",} 4',
        'hundredfold_requests_total{replica="cc",model="m",} 5',
        "# HELP hundredfold_queue_seconds Waiting",
        "# TYPE hundredfold_queue_seconds histogram",
        'hundredfold_queue_seconds_bucket{le="0.1",model="m"} 1',
        'hundredfold_queue_seconds_sum{model="m"} 0.05',
        'hundredfold_queue_seconds_count{model="m"} 1',
    ]


def test_merge_skips_nodes_without_response() -> None:
    assert merge_expositions(["", NODE_B]) == merge_expositions([NODE_B])


def test_merge_drops_metrics_of_ray() -> None:
    assert "node_cpu" not in merge_expositions([NODE_A])


def test_merge_of_nothing_is_a_line_break() -> None:
    assert merge_expositions([]) == "\n"


def test_label_values_are_not_changed() -> None:
    sample = 'ray_hundredfold_items_total{model="org/Version=1"} 1'
    assert merge_expositions([sample]).strip() == 'hundredfold_items_total{model="org/Version=1"} 1'
