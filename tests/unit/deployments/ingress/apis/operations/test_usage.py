from __future__ import annotations

from deployments.ingress.apis.operations.usage import KeyUsage, read_usage

TEXT = """\
# TYPE hundredfold_key_requests_total counter
hundredfold_key_requests_total{key="bob",replica="a",status="200"} 3.0
hundredfold_key_requests_total{key="bob",replica="b",status="200"} 4.0
hundredfold_key_requests_total{key="bob",replica="b",status="429"} 1.0
hundredfold_key_tokens_total{compute="cpu-int8",key="bob",replica="a"} 12.0
hundredfold_key_tokens_total{compute="cache",key="bob",replica="a"} 5.0
hundredfold_key_compute_seconds_total{compute="cpu-int8",key="bob",replica="a"} 0.5
hundredfold_key_compute_seconds_total{compute="cpu-fp32",key="bob",replica="b"} 0.25
hundredfold_key_compute_seconds_total{compute="gpu-fp16",key="bob",replica="b"} 0.125
hundredfold_key_requests_total{key="alice",replica="a",status="200"} 1.0
hundredfold_requests_total{model="key",status="200"} 9.0
"""


def test_usage_is_summed_over_replicas_and_by_hardware() -> None:
    assert read_usage(TEXT) == [
        KeyUsage(name="alice", requests={"200": 1}, tokens=0, seconds={}),
        KeyUsage(
            name="bob",
            requests={"200": 7, "429": 1},
            tokens=17,
            seconds={"cpu": 0.75, "gpu": 0.125},
        ),
    ]


def test_usage_without_keys_is_empty() -> None:
    assert read_usage("hundredfold_requests_total 1\n") == []
