from __future__ import annotations

from deployments.ingress.apis.shared.envelope import merge_parameters


def test_null_in_nested_parameters_overrides_nothing() -> None:
    merged = merge_parameters({"top_k": 2, "parameters": {"top_k": None, "seed": None}})
    assert merged == {"top_k": 2, "seed": None}
