"""Manifests of the previous schema, in terms of the present one.

Artifacts of the previous schema load without a change of their files. `hundredfold models migrate`
writes their manifests anew, before the release after this one stops to read them.
"""

from __future__ import annotations

from typing import Any

SCHEMA = 4
PREVIOUS = SCHEMA - 1


def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of the schema PREVIOUS as one of SCHEMA.

    Schema 4 added limits of the gate for batches. Schema 3 compared the worst batched cosine with
    `cosine_worst`, and no choices; dynamic int8 of that time would violate today's defaults.
    """
    gate = dict(raw.get("gate") or {})
    if "cosine_worst" in gate:
        gate.setdefault("batched_cosine_worst", gate["cosine_worst"])
    else:
        gate.setdefault("batched_cosine_worst", 0.93)
    gate.setdefault("batched_top1_agreement", 0.0)
    return {**raw, "schema_version": SCHEMA, "gate": gate}
