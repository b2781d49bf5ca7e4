"""Renderer of the KubeRay manifests from serve_config.yaml and production.yaml."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cluster.access import use_key_file
from cluster.config_entries import find_applications, read_args
from cluster.default_config import CONFIG_HELP, find_config
from cluster.kuberay.capacity import find_capacity_errors, find_gpu_memory_errors
from cluster.kuberay.endpoint import ServeEndpoint, read_endpoint
from cluster.kuberay.memory import find_memory_errors
from cluster.kuberay.overlay import (
    InvalidOverlay,
    Production,
    merge,
    read_production,
    read_yaml,
)
from cluster.kuberay.pods import (
    KEY_FILE,
    Manifest,
    build_disruption_budgets,
    build_head_group,
    build_labels,
    build_security_context,
    build_worker_group,
)
from cluster.linting.linter import check_text, report
from deployments.config import AppArgs
from deployments.terminal.command_line import print_error
from deployments.terminal.console import print_text

FOLDER = Path(__file__).parent
PRODUCTION = FOLDER / "production.yaml"
RAYSERVICE = FOLDER / "rayservice.yaml"
COMMAND = "hundredfold render"
HEADER = f"""\
# Generated from serve_config.yaml, cluster/kuberay/production.yaml and cluster/environment.py by
#     {COMMAND}
# Edit those files, not this one; a test compares them. The RayService comes first, then the limits
# on the pods that node drains and cluster upgrades may evict at once. Loss of the head restarts the
# whole cluster (docs/kubernetes.md); a drain of its node waits until an operator deletes the pod.
"""


def render_rayservice(config: Path, production: Path) -> str:
    """Build the text of rayservice.yaml.

    Raises InvalidOverlay if a file or the merged config is invalid, or if the config does not work
    with the pods: they are too small, or clients could not reach them. Raises OSError if a file
    cannot be read.
    """
    overlay = read_production(production)
    merged = merge(read_yaml(config), overlay.serve)
    # Pods do not have the variables of this shell.
    problems = check_text(
        _dump_config(merged), is_deployed=overlay.keys_secret is None, environment={}
    )
    if problems:
        raise InvalidOverlay("the merged Serve config is invalid:\n" + report("merged", problems))
    applications = list(find_applications(merged))
    entries = [entry.raw for each in applications for entry in each.deployments()]
    errors = list(find_capacity_errors(entries, overlay.workers))
    errors += find_memory_errors(applications, overlay.workers)
    for args in read_args(merged):
        errors += find_gpu_memory_errors(AppArgs.parse(args), overlay.workers)
    if errors:
        raise InvalidOverlay("\n".join(errors))
    if overlay.keys_secret is not None:
        use_key_file(merged, KEY_FILE)
    service = _build_rayservice(overlay, read_endpoint(merged), _dump_config(merged))
    manifests = [service, *build_disruption_budgets(overlay)]
    return HEADER + yaml.dump_all(manifests, Dumper=_BlockText, sort_keys=False, width=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help=CONFIG_HELP)
    parser.add_argument(
        "--production",
        type=Path,
        default=PRODUCTION,
        metavar="FILE",
        help="what differs on Kubernetes (default: production.yaml of the installation)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RAYSERVICE,
        metavar="FILE",
        help="file to write (default: rayservice.yaml of the installation)",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file is out of date"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the manifests. With `--check`, only compare the file with the new text.

    Return FAILED if rendering failed, the text differs, or the file cannot be read or written.
    """
    config, production = find_config(arguments.config), arguments.production
    output: Path = arguments.output
    try:
        text = render_rayservice(config, production)
    except OSError as exc:
        return print_error(f"cannot read `{exc.filename}`: {exc.strerror}")
    except InvalidOverlay as exc:
        return print_error(str(exc), f"correct `{production}` or `{config}`")
    try:
        if not arguments.check:
            output.write_text(text, encoding="utf-8")
            return print_text(f"wrote {output}")
        if not output.exists() or output.read_bytes() != text.encode():
            return print_error(f"`{output}` is out of date", f"run `{COMMAND}`")
    except OSError as exc:
        hint = "name a file that this user may write, `--output FILE`"
        return print_error(f"cannot use `{output}`: {exc.strerror}", hint)
    return print_text(f"{output} is up to date")


class _BlockText(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings as blocks, so that the config stays readable."""


def _represent_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockText.add_representer(str, _represent_block)


def _dump_config(merged: dict[str, Any]) -> str:
    return yaml.safe_dump(merged, sort_keys=False, width=100)


def _build_rayservice(production: Production, endpoint: ServeEndpoint, embedded: str) -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": production.name,
            "labels": build_labels(production),
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
