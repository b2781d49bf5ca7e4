"""`hundredfold dashboard` and `hundredfold alerts`: a dashboard for Grafana, rules for Prometheus.

Both are Python data, so that a test can check that the server has all metrics that they name.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import yaml

from deployments.errors import ModelLoading, Overloaded, RateLimited
from deployments.metrics import PREFIX
from deployments.terminal.command_line import OK
from deployments.terminal.console import print_json

_TARGETS = 'up{job="hundredfold"}'  # job of docs/operations.md and kuberay/pod-monitor.yaml
KUBERNETES_PREFIX = "ray_"  # Ray's agents put this before the name of each metric
_SCHEMA = 39  # version of Grafana's dashboard JSON, read by Grafana 10 and later
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8  # columns of Grafana's grid, and size of a panel
_MODEL = 'model=~"$model"'
# A key that reaches its own limits says nothing about the load of the server.
_BEYOND_KEY = f'code="{RateLimited.code}"'
_WITHIN_KEY = f'code!="{RateLimited.code}"'
_REFUSED = f'code=~"{Overloaded.code}|{ModelLoading.code}"'
# Also a model that cannot be served, although its status is 503: waiting does not help.
_FAILED = f'status=~"5..",code!="{ModelLoading.code}"'
# Backends whose counters cover requests that HAProxy answers itself and the ingress does not count.
# The excluded backends have no requests for models: `default_backend` denies unknown paths, and
# `stats` is HAProxy's status page.
_EDGE = 'proxy!~"default_backend|stats"'
_EDGE_DENIED = ("requests_denied_total",)  # counts responses with status 429
# Counters of responses with status 502, 503 and 504.
_EDGE_FAILED = ("connection_errors_total", "response_errors_total", "responses_denied_total")


class Series(NamedTuple):
    """Lines of a panel. `legend` is a name, or a label in `{{}}` whose values name the lines."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str  # Grafana's name of the unit
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that fires when `expression` has returned a value for `minutes` minutes.

    `critical`: clients get no answers. `warning`: soon they may not.
    """

    name: str
    severity: Literal["critical", "warning"]
    expression: str
    minutes: int
    summary: str


def _rate(metric: str, labels: str = _MODEL, by: str = "", window: str = "$__rate_interval") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({PREFIX}_{metric}{{{labels}}}[{window}]))"


def _edge_rate(*metrics: str, by: str = "", window: str = "$__rate_interval") -> str:
    grouped = f" by ({by})" if by else ""
    return " + ".join(
        f"sum{grouped} (rate(haproxy_backend_{name}{{{_EDGE}}}[{window}]))" for name in metrics
    )


def _quantiles(metric: str, *quantiles: float) -> tuple[Series, ...]:
    return tuple(
        Series(f"histogram_quantile({q}, {_rate(f'{metric}_bucket', by='le')})", f"p{q * 100:g}")
        for q in quantiles
    )


def _mean(metric: str) -> Series:
    return Series(f"{_rate(f'{metric}_sum')} / {_rate(f'{metric}_count')}", "mean")


def _maximum(metric: str, by: str) -> Series:
    return Series(f"max by ({by}) ({PREFIX}_{metric})", f"{{{{{by}}}}}")


def _share_of_hits(cache: str) -> Series:
    lookups = f"{cache}_cache_lookups_total"
    hits = _rate(lookups, f'{_MODEL},result="hit"')
    return Series(f"{hits} / {_rate(lookups)}", cache.replace("_", " "))


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by status",
            "reqps",
            (Series(_rate("requests_total", by="status"), "{{status}}"),),
        ),
        Panel("Time of a request", "s", _quantiles("request_seconds", 0.5, 0.95, 0.99)),
        Panel(
            "Requests by model",
            "reqps",
            (Series(_rate("requests_total", by="model"), "{{model}}"),),
        ),
        Panel(
            "Refused and failed requests",
            "percentunit",
            tuple(
                Series(
                    f"{_rate('requests_total', f'{_MODEL},{which}')} / {_rate('requests_total')}",
                    legend,
                )
                for which, legend in (
                    (_REFUSED, "refused"),
                    (_BEYOND_KEY, "beyond the limits of a key"),
                    (_FAILED, "failed"),
                )
            ),
        ),
        Panel("Requests that HAProxy answers itself", "reqps", (
            Series(_edge_rate(*_EDGE_DENIED), "refused"),
            Series(_edge_rate(*_EDGE_FAILED), "failed"),
        )),
        Panel("Share of cache hits", "percentunit", (
            _share_of_hits("response"), _share_of_hits("tokenization"),
        )),
        Panel(
            "Tokens by key",
            "short",
            (Series(_rate("key_tokens_total", "", by="key"), "{{key}}"),),
        ),
    ),
    "Replicas": (
        Panel("Running replicas", "short", (_maximum("running_replicas", "deployment"),)),
        Panel("Busy share", "percentunit", (_maximum("busy_ratio", "deployment"),)),
        Panel("Queue, predicted time", "s", (_maximum("queued_seconds", "deployment"),)),
        Panel("Tokenization", "s", _quantiles("tokenization_seconds", 0.5, 0.99)),
    ),
    "Encoders": (
        Panel("Texts by hardware", "short", (
            Series(_rate("items_total", by="compute"), "{{compute}}"),
        )),
        Panel("Wait for an engine thread", "s", _quantiles("queue_seconds", 0.5, 0.99)),
        Panel("Forward pass", "s", _quantiles("forward_seconds", 0.5, 0.99)),
        Panel("Texts in a forward pass", "short", (_mean("batch_items"),)),
        Panel("Share of padding", "percentunit", (
            Series(
                f"{_rate('padding_tokens_total')} / "
                f"({_rate('padding_tokens_total')} + {_rate('tokens_total')})",
                "padding",
            ),
        )),
        Panel("Waiting texts", "short", (
            Series(f"sum ({PREFIX}_waiting_items)", "waiting"),
        )),
    ),
    "Generators": (
        Panel("Tokens", "short", (
            Series(_rate("generated_tokens_total"), "generated"),
            Series(_rate("prompt_tokens_total"), "prompts"),
        )),
        Panel("One step", "s", _quantiles("generation_step_seconds", 0.5, 0.99)),
        Panel("Requests", "short", (
            Series(f"sum ({PREFIX}_running_requests{{{_MODEL}}})", "with a KV slot"),
            Series(f"sum ({PREFIX}_waiting_requests{{{_MODEL}}})", "waiting"),
        )),
        Panel("Wait for a KV slot, predicted", "s", (
            _maximum("generation_waiting_seconds", "model"),
        )),
        Panel("Share of accepted draft tokens", "percentunit", (
            Series(
                f"{_rate('accepted_draft_tokens_total')} / {_rate('draft_tokens_total')}",
                "accepted",
            ),
        )),
    ),
}  # fmt: skip


def list_alerts(server: str) -> tuple[Alert, ...]:
    """Return the alerts. `server` is the label of Prometheus whose values tell servers apart."""

    def share_of_requests(status: str) -> str:
        chosen, all_requests = (
            _rate("requests_total", which, by=server, window="5m")
            for which in (status, _WITHIN_KEY)
        )
        return f"{chosen} / {all_requests}"

    def share_at_edge(metrics: tuple[str, ...]) -> str:
        chosen, all_requests = (
            _edge_rate(*names, by=server, window="5m")
            for names in (metrics, ("http_requests_total",))
        )
        return f"({chosen}) / {all_requests}"

    def lacks(metric: str) -> str:
        return f"(max by ({server}) ({_TARGETS}) == 1 unless on ({server}) {PREFIX}_{metric})"

    return (
        Alert(
            "HundredfoldDown",
            "critical",
            f"max by ({server}) ({_TARGETS}) == 0 or absent({_TARGETS})",
            3,
            "Prometheus reads no metrics: the server is down, or its key for Prometheus is wrong",
        ),
        Alert(
            "HundredfoldMissing",
            "critical",
            f"{lacks('busy_ratio')} or {lacks('running_replicas')}",
            5,
            "no ingress, or no other replica, reports metrics",
        ),
        Alert(
            "HundredfoldFailures",
            "critical",
            f"{share_of_requests(_FAILED)} > 0.01 or {share_at_edge(_EDGE_FAILED)} > 0.01",
            5,
            "more than 1 % of the requests fail; the log of the ingress names those that reached "
            "it",
        ),
        Alert(
            "HundredfoldOverloaded",
            "warning",
            f"{share_of_requests(_REFUSED)} > 0.1 or {share_at_edge(_EDGE_DENIED)} > 0.1",
            10,
            "more than 10 % of the requests within the limits of their keys are refused; allow "
            "more replicas, or lower the load",
        ),
        Alert(
            "HundredfoldQueueLong",
            "warning",
            f"max by ({server}, deployment) ({PREFIX}_queued_seconds) > 10",
            10,
            "a replica has more than 10 s of work waiting",
        ),
        Alert(
            "HundredfoldSaturated",
            "warning",
            f"min by ({server}, deployment) ({PREFIX}_busy_ratio) > 0.95",
            30,
            "all replicas of a deployment are busy; autoscaling may have reached its maximum",
        ),
    )


def build_dashboard(prefix: str) -> dict[str, Any]:
    """Build Grafana's JSON of ROWS. The dashboard has menus for the data source and the models."""
    models = f"label_values({prefix}{PREFIX}_requests_total, model)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"},
        {
            "name": "model",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": models, "refId": "models"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]
    return {
        "title": "Hundredfold",
        "uid": "hundredfold",
        "schemaVersion": _SCHEMA,
        "tags": ["hundredfold"],
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": _place_panels(prefix),
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _place_panels(prefix: str) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        grid = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        placed.append({"type": "row", "id": len(placed), "title": title, "gridPos": grid})
        y += 1
        for number, panel in enumerate(panels):
            row, column = divmod(number, _COLUMNS // _WIDTH)
            grid = {"x": column * _WIDTH, "y": y + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            placed.append(_build_panel(panel, prefix) | {"id": len(placed), "gridPos": grid})
        y += _HEIGHT * -(-len(panels) * _WIDTH // _COLUMNS)
    return placed


def _build_panel(panel: Panel, prefix: str) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": add_prefix(series.expression, prefix),
                "legendFormat": series.legend,
            }
            for number, series in enumerate(panel.series)
        ],
    }


def build_alerts(prefix: str) -> dict[str, Any]:
    """Build a rule file of Prometheus from the alerts.

    On Kubernetes all pods of a cluster are one server, whose targets have one job.
    """
    rules = [
        {
            "alert": alert.name,
            "expr": add_prefix(alert.expression, prefix),
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in list_alerts("job" if prefix else "instance")
    ]
    return {"groups": [{"name": PREFIX, "rules": rules}]}


def add_prefix(expression: str, prefix: str) -> str:
    return expression.replace(f"{PREFIX}_", f"{prefix}{PREFIX}_")


class _PrintCommand:
    """Command that prints a file about the metrics of `/metrics` or of Ray's agents."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--kubernetes",
            action="store_const",
            const=KUBERNETES_PREFIX,
            default="",
            dest="prefix",
            help="for metrics of Ray's agents, whose names begin with `ray_`",
        )


class DashboardCommand(_PrintCommand):
    def run(self, arguments: argparse.Namespace) -> int:
        return print_json(build_dashboard(arguments.prefix))


class AlertsCommand(_PrintCommand):
    def run(self, arguments: argparse.Namespace) -> int:
        yaml.safe_dump(build_alerts(arguments.prefix), sys.stdout, sort_keys=False, width=100)
        return OK


DASHBOARD, ALERT_RULES = DashboardCommand(), AlertsCommand()
