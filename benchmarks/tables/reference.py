"""Tables for the documents: built from the code, some from several files of docs/results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import orjson
from ray.util.metrics import Counter, Metric

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import REPOSITORY, Table
from benchmarks.tables.rivals import summarize_published
from benchmarks.tables.runs import summarize_runs
from cluster.config_entries import KeyPath
from cluster.linting.document import YamlDocument, read_document
from deployments.artifacts.types import GENERATIVE_TASKS, TaskName
from deployments.config import USER_CONFIGS, AppArgs
from deployments.errors import ServeError
from deployments.host.idle_cores import IdleCores
from deployments.ingress.apis.documentation.openapi import to_openapi_path
from deployments.ingress.apis.huggingface.routes import EXAMPLES
from deployments.ingress.apis.text_generation.routes import ENVELOPE_EXAMPLE
from deployments.ingress.app import build_apis
from deployments.ingress.devices.cluster_state import ClusterSnapshot
from deployments.ingress.http.api import ApiRoutes
from deployments.ingress.replica import IngressReplica, ServeRuntime
from deployments.metrics import (
    EncoderMetrics,
    GeneratorMetrics,
    IngressMetrics,
    LoadMetrics,
    TokenizerMetrics,
)
from deployments.tasks import TASKS, find_head, list_task_names
from deployments.terminal.command_line import CommandGroup, Tree
from deployments.transports.base import Clients
from hundredfold.__main__ import build_program

CONFIG = REPOSITORY / "serve_config.yaml"
NO_STORE = Path("no-store")  # placeholder; the APIs are listed without reading a store
MAX_VALUE_CHARS = 60  # a longer value of a setting is shown as "see the file"
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_APPLICATION: KeyPath = ("applications", 0)


def tasks_table() -> Table:
    rows = []
    for name in list_task_names():
        default = EXAMPLES[TaskName.SUMMARIZATION]
        if name == TaskName.TEXT_GENERATION:
            default = ENVELOPE_EXAMPLE
        example = EXAMPLES.get(name, default)
        returns = "Generated text ([generation](generation.md))"
        if name not in GENERATIVE_TASKS:
            returns = _first_line(TASKS[name]).removeprefix("Task that returns ").removesuffix(".")
            returns = returns[0].upper() + returns[1:]
        rows.append([_code(name), find_head(name).value, returns, _code(_json(example))])
    return Table("tasks", ("task", "head", "answer", "body"), rows)


def routes_table() -> Table:
    """Return a row per HTTP operation. Hidden operations, which serve page files, are left out."""
    rows = [
        [
            api.name,
            operation.method,
            "<br>".join(_code(to_openapi_path(path)) for path in operation.paths),
            operation.access.value,
            operation.summary,
        ]
        for api in _build_apis()
        for operation in api.operations()
        if not operation.hidden
    ]
    return Table("routes", ("API", "method", "paths", "access", "use"), rows)


def metrics_table() -> Table:
    recorders = {
        "Ingress": IngressMetrics(),
        "encoders": EncoderMetrics(),
        "generators": GeneratorMetrics(),
        "Tokenizer": TokenizerMetrics(),
        "all but the Ingress": LoadMetrics("Tokenizer"),
    }
    rows = []
    for replicas, recorder in recorders.items():
        for metric in vars(recorder).values():
            if isinstance(metric, Metric):
                info = metric.info
                labels = ", ".join(map(_code, info["tag_keys"]))
                kind = type(metric).__name__.lower()
                # The Prometheus exporter appends `_total` to names of counters.
                name = info["name"] + ("_total" if isinstance(metric, Counter) else "")
                rows.append([_code(name), kind, labels, replicas, info["description"]])
    return Table("metrics", ("metric", "type", "labels", "replicas", "meaning"), rows)


def errors_table() -> Table:
    """Return a row per code of an error response, by status."""
    _build_apis()  # imports the modules that define errors of one API
    kinds = [kind for kind in _list_errors(ServeError) if "code" in vars(kind)]
    rows = [
        [_code(kind.code), str(kind.status), "yes" if kind.retryable else "no", _first_line(kind)]
        for kind in sorted(kinds, key=lambda kind: (kind.status, kind.code))
    ]
    return Table("errors", ("code", "status", "retry", "meaning"), rows)


def _list_errors(root: type[ServeError]) -> Iterator[type[ServeError]]:
    """Yield `root` and the errors of the server below it, without those of commands."""
    if root.__module__.startswith("deployments."):
        yield root
        for kind in root.__subclasses__():
            yield from _list_errors(kind)


def commands_table() -> Table:
    """Return a row per command, in the order of the help."""
    program = build_program()
    rows = [[_code(name), text] for name, text in _list_commands(program.name, program.tree)]
    return Table("commands", ("command", "use"), rows)


def _list_commands(prefix: str, tree: Tree) -> Iterator[tuple[str, str]]:
    for name, node in tree.items():
        if isinstance(node, CommandGroup):
            yield from _list_commands(f"{prefix} {name}", node.commands)
        else:
            yield f"{prefix} {name}", node.help


def settings_table() -> Table:
    """Return a row per setting of `args` and `user_config`.

    The cell `meaning` is the comment of the setting in serve_config.yaml. The cell `value` has two
    values if the setting differs between CPU and GPU. Raises BenchmarkError if the file lacks a
    setting.
    """
    text = CONFIG.read_text(encoding="utf-8")
    document = read_document(text)
    lines = text.splitlines()
    rows = []
    for name, schema, paths in _list_settings(document):
        present = [path for path in paths if path in document.lines]
        if not present:
            raise BenchmarkError(f"`{CONFIG.name}` lacks `{name}`", hint="add it with a comment")
        values = dict.fromkeys(_format_value(_find(document, path)) for path in present)
        meaning = _read_comment(lines, document.lines[present[0]] - 1)
        rows.append([_code(name), ", GPU: ".join(values), _describe_bounds(schema), meaning])
    return Table("settings", ("setting", "value", "allowed", "meaning"), rows)


def _list_settings(document: YamlDocument) -> Iterator[tuple[str, Any, list[KeyPath]]]:
    """Yield the name, the JSON schema and the paths in the config of each setting.

    A setting for both devices has two paths, the path for the CPU first.
    """
    for name, schema in _flatten(AppArgs.model_json_schema()):
        devices = ("cpu", "gpu") if "*" in name else ("",)
        paths = [tuple(name.replace("*", device).split(".")) for device in devices]
        yield f"args.{name}", schema, [(*_APPLICATION, "args", *path) for path in paths]
    names = [entry["name"] for entry in _find(document, (*_APPLICATION, "deployments"))]
    for deployment, settings in USER_CONFIGS.items():
        if deployment.startswith("Gpu"):
            continue
        twins = dict.fromkeys((deployment, deployment.replace("Cpu", "Gpu")))
        roots = [(*_APPLICATION, "deployments", names.index(twin), "user_config") for twin in twins]
        shown = deployment.replace("Cpu", "*")
        for name, schema in _flatten(settings.model_json_schema()):
            yield f"{shown}.{name}", schema, [(*root, *name.split(".")) for root in roots]


def _flatten(root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the schema of each leaf of a JSON schema.

    In a name, `*` stands for a device.
    """

    def walk(schema: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, field in schema["properties"].items():
            path = f"{prefix}{name}"
            target = _resolve(root, field)
            values = _resolve(root, field.get("additionalProperties") or {})
            if "properties" in target:
                yield from walk(target, f"{path}.")
            elif "properties" in values:
                yield from walk(values, f"{path}.*.")
            else:
                yield path, field

    return walk(root, "")


def _resolve(root: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return cast(Mapping[str, Any], root["$defs"][name]) if name else schema


def _describe_bounds(schema: Mapping[str, Any]) -> str:
    """Return the allowed values; of a mapping, those of its values."""
    if "additionalProperties" in schema:
        return _describe_bounds(schema["additionalProperties"])
    if "enum" in schema:
        return ", ".join(_code(str(value)) for value in schema["enum"])
    bounds = [
        f"{sign} {schema[key]:{'g' if schema[key] < 1e6 else ','}}"
        for key, sign in BOUNDS.items()
        if key in schema
    ]
    if bounds:
        return ", ".join(bounds)
    if "anyOf" in schema:
        return ", ".join(filter(None, map(_describe_bounds, schema["anyOf"])))
    names = {"array": "list", "boolean": "`true`, `false`", "string": "text", "null": "`null`"}
    return names.get(schema.get("type", ""), "")


def _read_comment(lines: list[str], index: int) -> str:
    """Return the comment at the end of the line, else the comment lines directly above it."""
    _, mark, comment = lines[index].partition("  # ")
    if mark:
        return comment.strip()
    above: list[str] = []
    while index and lines[index - 1].lstrip().startswith("#"):
        index -= 1
        above.insert(0, lines[index].strip().lstrip("# "))
    return " ".join(above)


def _find(document: YamlDocument, path: KeyPath) -> Any:
    value = document.value
    for key in path:
        value = value[key]
    return value


def _build_apis() -> tuple[ApiRoutes, ...]:
    """Build the APIs of a server without models and replicas, only to list their operations."""
    nothing = cast(Any, None)
    runtime = ServeRuntime(Clients(nothing, {}, {}, {}), ClusterSnapshot, nothing, nothing, nothing)
    args = AppArgs(store=NO_STORE, encoders={})
    return build_apis(IngressReplica(args, runtime, nothing, IdleCores()).api_context)


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _format_value(value: object) -> str:
    text = _json(value)
    return _code(text) if len(text) <= MAX_VALUE_CHARS else "see the file"


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _code(text: str) -> str:
    return f"`{text}`"


REFERENCES: Mapping[str, Callable[[], Table]] = {
    "tasks": tasks_table,
    "routes": routes_table,
    "errors": errors_table,
    "commands": commands_table,
    "settings": settings_table,
    "metrics": metrics_table,
    "rivals": summarize_published,
    "runs": summarize_runs,
}
