"""Commands that start the pods of a RayService as containers, as KubeRay's operator would.

The operator makes the command of Ray from `rayStartParams`, and sets variables besides those of the
manifest: https://github.com/ray-project/kuberay/blob/v1.7.0/ray-operator/controllers/ray/common/pod.go
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.errors import BenchmarkError

ENGINES = ("podman", "docker")
METRICS_PORT = 8080
GCS_PORT = 6379
AGENT_PORT = 52365
SHM_SIZE = "64m"  # as in a pod


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetwork:
    """What the containers of one cluster share."""

    name: str
    subnet: str  # the first three bytes of its addresses
    image: str
    store: Path
    token: str  # of Ray

    @property
    def head(self) -> str:
        return self.address(2)

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number}"


def read_ray_cluster(manifest: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `rayClusterConfig` of a RayService, and its Serve config.

    Raises BenchmarkError if the manifest has none.
    """
    try:
        documents = list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))
        (service,) = [each["spec"] for each in documents if each["kind"] == "RayService"]
        return service["rayClusterConfig"], yaml.safe_load(service["serveConfigV2"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as exc:
        raise BenchmarkError(
            f"`{manifest}` has no RayService: {exc!r}", hint="make one with `hundredfold render`"
        ) from exc


def build_ray_command(group: Mapping[str, Any], head: str | None) -> str:
    """Return the command of Ray in a pod of `group`. `head`: its address; None for the head."""
    limits = _find_container(group)["resources"]["limits"]
    parameters = {
        "num-cpus": limits["cpu"],
        "memory": str(_parse_gib(limits["memory"]) << 30),
        "metrics-export-port": str(METRICS_PORT),
        "dashboard-agent-listen-port": str(AGENT_PORT),
        **group["rayStartParams"],
    }
    if labels := group.get("labels"):
        parameters["labels"] = ",".join(f"{name}={value}" for name, value in labels.items())
    options = " ".join(f"--{name}={value}" for name, value in parameters.items())
    # The autoscaler, for which the head starts without Ray's own, needs the API of Kubernetes.
    role = "--head --no-monitor" if head is None else f"--address={head}:{GCS_PORT}"
    return f"ray start {role} --block {options}"


def build_arguments(
    name: str,
    number: int,
    group: Mapping[str, Any],
    network: PodNetwork,
    ports: Mapping[int, int],
) -> list[str]:
    """Return the arguments of the engine that start a pod of `group` as the container `name`.

    `number` is the last byte of its address, `ports` has ports of the container by those of
    127.0.0.1.
    """
    head = None if network.address(number) == network.head else network.head
    container, pod = _find_container(group), group["template"]["spec"]["securityContext"]
    environment = {
        **{each["name"]: each["value"] for each in container["env"] if "value" in each},
        "KUBERAY_GEN_RAY_START_CMD": build_ray_command(group, head),
        "RAY_ADDRESS": f"{head or '127.0.0.1'}:{GCS_PORT}",
        "RAY_AUTH_TOKEN": network.token,
        "RAY_CLOUD_INSTANCE_ID": name,
        "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"),
    }
    command: list[str] = [*container["command"], *container["args"]]
    return [
        *("run", "--detach", "--name", name, "--hostname", name),
        *("--network", network.name, "--ip", network.address(number)),
        *("--user", f"{pod['runAsUser']}:{pod['runAsGroup']}", "--cap-drop", "all"),
        *("--security-opt", "no-new-privileges", "--shm-size", SHM_SIZE),
        *("--memory", f"{_parse_gib(container['resources']['limits']['memory'])}g"),
        *("--volume", f"{network.store}:/artifacts:ro"),
        *(f"--publish=127.0.0.1:{outer}:{inner}" for outer, inner in ports.items()),
        *(f"--env={key}={value}" for key, value in environment.items()),
        *("--entrypoint", command[0], network.image, *command[1:]),
    ]


def _find_container(group: Mapping[str, Any]) -> Mapping[str, Any]:
    container: Mapping[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def _parse_gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def find_engine(named: str | None) -> str:
    """Return the program `named`, else the first of ENGINES. Raises BenchmarkError without one."""
    for program in ENGINES if named is None else (named,):
        if found := shutil.which(program):
            return found
    missing = "neither podman nor docker is" if named is None else f"{named} is not"
    raise BenchmarkError(f"{missing} installed", hint="install podman")


def run_engine(engine: str, arguments: Sequence[str], *, check: bool = True) -> str:
    """Run podman or docker, and return its output. Raises BenchmarkError if it fails."""
    done = subprocess.run([engine, *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise BenchmarkError(f"`{engine} {arguments[0]}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout
