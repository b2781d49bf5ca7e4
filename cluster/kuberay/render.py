"""Render the KubeRay RayService from serve_config.yaml and production.yaml."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cluster.check import DEFAULT_CONFIG, check_text, report
from cluster.kuberay.capacity import capacity_errors
from cluster.kuberay.overlay import InvalidOverlay, Production, merge, read_production
from cluster.kuberay.pods import PART_OF, Manifest, Serving, head_group, restricted, worker_group

FOLDER = Path(__file__).parent
PRODUCTION = FOLDER / "production.yaml"
RAYSERVICE = FOLDER / "rayservice.yaml"
COMMAND = "hundredfold render"
HEADER = f"""\
# Generated from serve_config.yaml, cluster/kuberay/production.yaml and cluster/environment.py by
#     {COMMAND}
# Edit those, not this; a test fails when they and this differ.
"""


def render_rayservice(config: Path, production: Path) -> str:
    """The text of rayservice.yaml. Raises InvalidOverlay and OSError."""
    overlay = read_production(production)
    merged = merge(yaml.safe_load(config.read_text(encoding="utf-8")), overlay.serve)
    embedded = yaml.safe_dump(merged, sort_keys=False, width=100)
    problems = check_text(embedded)
    if problems:
        raise InvalidOverlay("the merged Serve config is wrong:\n" + report("merged", problems))
    deployments = [entry for app in merged["applications"] for entry in app["deployments"]]
    missing = list(capacity_errors(deployments, overlay.workers))
    if missing:
        raise InvalidOverlay("\n".join(missing))
    manifest = _rayservice(overlay, _serving(merged), embedded)
    return HEADER + yaml.dump(manifest, Dumper=_BlockText, sort_keys=False, width=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hundredfold render`."""
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--check", action="store_true", help="compare only; 1 if out of date")


def run(arguments: argparse.Namespace) -> int:
    """Write rayservice.yaml, or compare it; 0 if done or equal, 1 if different, 2 if impossible."""
    try:
        text = render_rayservice(arguments.config, PRODUCTION)
    except (InvalidOverlay, OSError) as exc:
        print(f"error: {exc}\n", file=sys.stderr)
        print(f"hint: correct `{PRODUCTION}` or `{arguments.config}`", file=sys.stderr)
        return 2
    if not arguments.check:
        RAYSERVICE.write_text(text, encoding="utf-8")
        print(f"wrote {RAYSERVICE}")
        return 0
    if not RAYSERVICE.exists() or RAYSERVICE.read_text(encoding="utf-8") != text:
        print(f"error: `{RAYSERVICE}` is out of date\n", file=sys.stderr)
        print(f"hint: run `{COMMAND}`", file=sys.stderr)
        return 1
    print(f"{RAYSERVICE} is up to date")
    return 0


class _BlockText(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that the embedded config can be read."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockText.add_representer(str, _block)


def _serving(merged: dict[str, Any]) -> Serving:
    stores = {app["args"]["store"] for app in merged["applications"]}
    if len(stores) != 1 or None in stores:
        raise InvalidOverlay("`args.store` must be one directory: the artifacts are mounted there")
    return Serving(port=merged["http_options"]["port"], store=str(stores.pop()))


def _rayservice(production: Production, serving: Serving, embedded: str) -> Manifest:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {
            "name": production.name,
            "labels": dict(PART_OF),
            # The pods bring their own command, with tini in front of KubeRay's `ray start`.
            "annotations": {"ray.io/overwrite-container-cmd": "true"},
        },
        "spec": {
            # Every CPU worker has a proxy and min_replicas is above zero; the head need not serve.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": embedded,
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "securityContext": restricted(),
                    "resources": {
                        "requests": {"cpu": "500m", "memory": "1Gi"},
                        "limits": {"cpu": "500m", "memory": "1Gi"},
                    },
                },
                "headGroupSpec": head_group(production, serving),
                "workerGroupSpecs": [
                    worker_group(group, production, serving) for group in production.workers
                ],
            },
        },
    }
