"""Tables of the documents that are built from the code, such as those of settings and tasks.

tests/unit/benchmarks/tables/test_command.py checks that the documents contain the current tables.
"""

from __future__ import annotations

import pytest

from benchmarks.tables.reference import REFERENCES
from deployments.tasks import list_task_names


@pytest.mark.parametrize("name", REFERENCES)
def test_every_cell_has_a_text(name: str) -> None:
    table = REFERENCES[name]()
    assert table.rows
    for row in table.rows:
        assert len(row) == len(table.columns)
        empty = [head for head, cell in zip(table.columns, row, strict=True) if not cell]
        assert set(empty) <= {"labels", "allowed"}, row


def test_every_task_and_every_setting_is_listed() -> None:
    tasks = {row[0].strip("`"): row for row in REFERENCES["tasks"]().rows}
    assert tasks.keys() == set(list_task_names())
    assert [answer for _, _, answer, _ in tasks.values() if answer.startswith("Task")] == []
    settings = {row[0].strip("`"): row for row in REFERENCES["settings"]().rows}
    assert settings["args.generators.*.kv_slots"][1:3] == ["`8`, GPU: `32`", "≥ 1"]
    assert settings["Ingress.limits.items"][2:] == [
        "≥ 1",
        "texts per request; LangChain sends 1,000 at a time",
    ]
    assert settings["Ingress.placement.prices"][2] == "> 0"
    assert settings["Ingress.tracing.sample_ratio"][2] == "≥ 0, ≤ 1"
    assert settings["*Encoder.batching.client_pass_ms"][3].startswith("Predicted ms of a forward")


def test_routes_have_their_access() -> None:
    rows = {row[2].partition("<br>")[0]: row for row in REFERENCES["routes"]().rows}
    assert rows["`/health`"][3] == "public"
    assert rows["`/models/ps`"][3] == "admin"
    assert rows["`/v1/chat/completions`"][:2] == ["OpenAI", "POST"]


def test_commands_of_groups_have_their_whole_name() -> None:
    commands = dict(REFERENCES["commands"]().rows)
    assert {"`hundredfold serve`", "`hundredfold keys add`", "`hundredfold bench gpu`"} <= set(
        commands
    )
    assert commands["`hundredfold models gc`"] == "Remove versions that nothing names"
