"""The pods of the cluster: one shape for head and workers, so that they cannot drift apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.environment import RAY_ENVIRONMENT
from cluster.kuberay.capacity import POOL_LABEL
from cluster.kuberay.overlay import Pod, Production, WorkerGroup

Manifest = dict[str, Any]

# network-policy.yaml and disruption-budgets.yaml select pods by this label.
PART_OF = {"app.kubernetes.io/part-of": "hundredfold"}
USER_ID = 1000  # of the images
GPU_RESOURCE = "nvidia.com/gpu"
# KubeRay looks ports up by these names.
HEAD_PORTS: Mapping[str, int] = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
METRICS_PORT = 8080


@dataclass(frozen=True, slots=True)
class Serving:
    """What the pods need to know of the merged Serve config."""

    port: int
    store: str  # mount point of the artifacts


def head_group(production: Production, serving: Serving) -> Manifest:
    """Controller and autoscaler; `num-cpus: 0` keeps every replica away."""
    container = _container("ray-head", production.images.cpu, production.head, serving)
    container["ports"] = _ports({**HEAD_PORTS, "serve": serving.port, "metrics": METRICS_PORT})
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
        "template": _template(production, container),
    }


def worker_group(group: WorkerGroup, production: Production, serving: Serving) -> Manifest:
    """Pods that hold replicas. One without a replica has no proxy and stays unready on purpose."""
    image = getattr(production.images, group.image)
    container = _container("ray-worker", image, group, serving)
    container["ports"] = _ports({"serve": serving.port, "metrics": METRICS_PORT})
    container["readinessProbe"] = _proxy_answers(serving.port)
    # Kubernetes takes the pod out of the Service at once; HAProxy here still serves what arrives.
    container["lifecycle"] = {
        "preStop": {"exec": {"command": ["/bin/sleep", str(production.shutdown.drain_s)]}}
    }
    template = _template(production, container)
    # Only the head's autoscaler talks to Kubernetes.
    template["spec"]["automountServiceAccountToken"] = False
    template["spec"]["terminationGracePeriodSeconds"] = production.shutdown.grace_s
    template["spec"]["topologySpreadConstraints"] = [_spread(group)]
    if group.gpus:
        for kind in ("requests", "limits"):
            container["resources"][kind][GPU_RESOURCE] = str(group.gpus)
        toleration = {"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}
        template["spec"]["tolerations"] = [toleration]
    return {
        "groupName": group.name,
        "replicas": group.min_replicas,
        "minReplicas": group.min_replicas,
        "maxReplicas": group.max_replicas,
        "idleTimeoutSeconds": group.idle_timeout_s,
        "labels": {POOL_LABEL: group.name},
        "rayStartParams": {},
        "template": template,
    }


def restricted() -> Manifest:
    """The container's half of the Pod Security Standard `restricted`."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _container(name: str, image: str, size: Pod, serving: Serving) -> Manifest:
    amount = {"cpu": str(size.cpu), "memory": f"{size.memory_gib}Gi"}
    return {
        "name": name,
        "image": image,
        # KubeRay's own command bypasses the image's entry point. tini reaps what HAProxy leaves
        # behind; `exec` lets `ray start` receive SIGTERM and stop Ray in order.
        "command": ["/usr/bin/tini", "--", "/bin/bash", "-c"],
        "args": ["ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD"],
        "env": [{"name": key, "value": value} for key, value in RAY_ENVIRONMENT.items()],
        "resources": {"requests": dict(amount), "limits": dict(amount)},
        "securityContext": restricted(),
        "volumeMounts": [{"name": "artifacts", "mountPath": serving.store, "readOnly": True}],
    }


def _template(production: Production, container: Manifest) -> Manifest:
    claim = {"claimName": production.artifacts_claim, "readOnly": True}
    return {
        "metadata": {"labels": dict(PART_OF)},
        "spec": {
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "artifacts", "persistentVolumeClaim": claim}],
        },
    }


def _ports(ports: Mapping[str, int]) -> list[Manifest]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _proxy_answers(port: int) -> Manifest:
    """KubeRay's default gives up after one slow answer; a busy pod must not leave the Service."""
    url = f"http://127.0.0.1:{port}/-/healthz"
    command = f"wget --tries=1 --timeout=4 -q -O- {url} | grep -q success"
    return {
        "exec": {"command": ["/bin/bash", "-c", command]},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }


def _spread(group: WorkerGroup) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {**PART_OF, "ray.io/group": group.name}},
    }
