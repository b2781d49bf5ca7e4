"""Renderer of the KubeRay RayService from serve_config.yaml and production.yaml."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from cluster.access import use_key_file
from cluster.check import check_text, report
from cluster.default_config import CONFIG_HELP, find_config
from cluster.kuberay.capacity import find_capacity_errors, find_gpu_memory_errors
from cluster.kuberay.overlay import (
    InvalidOverlay,
    Production,
    merge,
    read_production,
    read_yaml,
)
from cluster.kuberay.pods import (
    KEY_FILE,
    PART_OF,
    Manifest,
    ServeEndpoint,
    build_head_group,
    build_security_context,
    build_worker_group,
)
from cluster.serve_config import find_applications, read_args, read_mapping
from deployments.command_line import print_error
from deployments.config import AppArgs
from deployments.console import print_text

FOLDER = Path(__file__).parent
PRODUCTION = FOLDER / "production.yaml"
RAYSERVICE = FOLDER / "rayservice.yaml"
SERVE_PORT = 8000  # default of Serve for `http_options.port`
SERVE_SHUTDOWN_S = 20.0  # default of Serve for `graceful_shutdown_timeout_s`
COMMAND = "hundredfold render"
HEADER = f"""\
# Generated from serve_config.yaml, cluster/kuberay/production.yaml and cluster/environment.py by
#     {COMMAND}
# Edit those files, not this one; a test compares them.
"""


def render_rayservice(config: Path, production: Path) -> str:
    """Build the text of rayservice.yaml.

    Raises InvalidOverlay if the merged config is invalid or the pods are too small for it, OSError
    if a file cannot be read.
    """
    overlay = read_production(production)
    merged = merge(read_yaml(config), overlay.serve)
    # Pods do not have the variables of this shell.
    problems = check_text(
        _dump_config(merged), is_deployed=overlay.keys_secret is None, environment={}
    )
    if problems:
        raise InvalidOverlay("the merged Serve config is invalid:\n" + report("merged", problems))
    errors = list(find_capacity_errors(_list_deployments(merged), overlay.workers))
    for args in read_args(merged):
        errors += find_gpu_memory_errors(AppArgs.parse(args), overlay.workers)
    if errors:
        raise InvalidOverlay("\n".join(errors))
    if overlay.keys_secret is not None:
        use_key_file(merged, KEY_FILE)
    manifest = _build_rayservice(overlay, _read_endpoint(merged), _dump_config(merged))
    return HEADER + yaml.dump(manifest, Dumper=_BlockText, sort_keys=False, width=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=CONFIG_HELP)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file is out of date"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write rayservice.yaml. With `--check`, only compare it with the new text.

    Return FAILED if rendering failed or the text differs.
    """
    config = find_config(arguments.config)
    try:
        text = render_rayservice(config, PRODUCTION)
    except (InvalidOverlay, OSError) as exc:
        return print_error(str(exc), f"correct `{PRODUCTION}` or `{config}`")
    if not arguments.check:
        RAYSERVICE.write_text(text, encoding="utf-8")
        return print_text(f"wrote {RAYSERVICE}")
    if not RAYSERVICE.exists() or RAYSERVICE.read_text(encoding="utf-8") != text:
        return print_error(f"`{RAYSERVICE}` is out of date", f"run `{COMMAND}`")
    return print_text(f"{RAYSERVICE} is up to date")


class _BlockText(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as blocks, so that the config stays readable."""


def _represent_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockText.add_representer(str, _represent_block)


def _dump_config(merged: dict[str, Any]) -> str:
    return yaml.safe_dump(merged, sort_keys=False, width=100)


def _read_endpoint(merged: dict[str, Any]) -> ServeEndpoint:
    stores = {args.get("store") for args in read_args(merged)}
    if len(stores) != 1 or None in stores:
        raise InvalidOverlay(
            "`args.store` must be the same directory in all applications: the pods mount the "
            "artifacts there"
        )
    # A terminating worker must run at least as long as the slowest shutdown of its replicas.
    timeouts = [
        entry.get("graceful_shutdown_timeout_s", SERVE_SHUTDOWN_S)
        for entry in _list_deployments(merged)
    ]
    port = read_mapping(merged, "http_options").get("port", SERVE_PORT)
    return ServeEndpoint(port=port, store=str(stores.pop()), drain_s=ceil(max(timeouts)))


def _list_deployments(merged: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry.raw for app in find_applications(merged) for entry in app.deployments()]


def _build_rayservice(production: Production, endpoint: ServeEndpoint, embedded: str) -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": production.name,
            "labels": dict(PART_OF),
            # Keeps the command of the pods, which starts KubeRay's `ray start` under tini.
            "annotations": {"ray.io/overwrite-container-cmd": "true"},
        },
        "spec": {
            # The head runs no replicas, so it must not get requests. At least one CPU worker with a
            # proxy always runs, because min_replicas is above zero.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": embedded,
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "securityContext": build_security_context(),
                    "resources": {
                        "requests": {"cpu": "500m", "memory": "1Gi"},
                        "limits": {"cpu": "500m", "memory": "1Gi"},
                    },
                },
                "headGroupSpec": build_head_group(production, endpoint),
                "workerGroupSpecs": [
                    build_worker_group(group, production, endpoint) for group in production.workers
                ],
            },
        },
    }
