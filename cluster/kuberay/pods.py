"""Pod templates of the Ray head and workers, and the disruption budgets of their pods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.access import key_file_environment
from cluster.environment import OBJECT_STORE_BYTES, RAY_ENVIRONMENT
from cluster.kuberay.endpoint import HEAD_PORTS, PROMETHEUS_PORTS, ServeEndpoint
from cluster.kuberay.overlay import Pod, Production, WorkerGroup
from cluster.replica_resources import POOL_LABEL

Manifest = dict[str, Any]

# network-policy.yaml selects the pods of all clusters in a namespace by this label.
PART_OF = {"app.kubernetes.io/part-of": "hundredfold"}
USER_ID = 1000  # id of the user in the images
GPU_RESOURCE = "nvidia.com/gpu"
KEY_FILE = Path("/keys/keys.json")  # file in the mounted secret `keys_secret`
STOP_S = 55  # seconds for Ray to stop after the drain
OBJECT_STORE = {"object-store-memory": str(OBJECT_STORE_BYTES)}


def build_labels(production: Production) -> dict[str, str]:
    """Build the labels of the pods of one RayService.

    Another RayService in the namespace must not share them: Kubernetes evicts no pod that the
    disruption budgets of both select.
    """
    return {**PART_OF, "app.kubernetes.io/instance": production.name}


def build_head_group(production: Production, endpoint: ServeEndpoint) -> Manifest:
    """Build the head group. `num-cpus: 0` keeps replicas away from the head."""
    container = _build_container("ray-head", production.images.cpu, production.head, endpoint)
    container["ports"] = _build_ports({**HEAD_PORTS, "serve": endpoint.port, **PROMETHEUS_PORTS})
    return {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0", **OBJECT_STORE},
        "template": _build_template(production, container),
    }


def build_worker_group(
    group: WorkerGroup, production: Production, endpoint: ServeEndpoint
) -> Manifest:
    """Build a worker group. A worker without replicas has no proxy and stays unready."""
    image = getattr(production.images, group.image)
    container = _build_container("ray-worker", image, group, endpoint)
    container["ports"] = _build_ports({"serve": endpoint.port, **PROMETHEUS_PORTS})
    container["readinessProbe"] = _build_readiness_probe(endpoint.port)
    container["lifecycle"] = {"preStop": {"exec": {"command": _build_drain(endpoint.drain_s)}}}
    template = _build_template(production, container)
    # Workers need no token, because only the autoscaler on the head calls the Kubernetes API.
    template["spec"]["automountServiceAccountToken"] = False
    template["spec"]["terminationGracePeriodSeconds"] = endpoint.drain_s + STOP_S
    template["spec"]["topologySpreadConstraints"] = [_build_spread_constraint(group, production)]
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
        "rayStartParams": dict(OBJECT_STORE),
        "template": template,
    }


def build_disruption_budgets(production: Production) -> list[Manifest]:
    """Build the budgets that limit evictions by node drains.

    Of each group, at least `min_replicas - 1` pods stay. The head is never evicted. A group with
    `min_replicas` of 0 or 1 gets no budget, because a budget of one pod would block every drain.
    """
    budgets = [
        (group.name, group.min_replicas - 1, {"ray.io/group": group.name})
        for group in production.workers
        if group.min_replicas > 1
    ]
    budgets.append(("head", 1, {"ray.io/node-type": "head"}))
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{production.name}-{name}", "labels": build_labels(production)},
            "spec": {
                # Kubernetes cannot query the size of a RayCluster, so percentages do not work.
                "minAvailable": pods,
                # A worker without a replica is unready by design; it must not block a drain.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {**build_labels(production), **labels}},
            },
        }
        for name, pods, labels in budgets
    ]


def build_security_context() -> Manifest:
    """Build the container fields of the Pod Security Standard `restricted`."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _build_container(name: str, image: str, size: Pod, endpoint: ServeEndpoint) -> Manifest:
    amount = {
        "cpu": str(size.cpu),
        "memory": f"{size.memory_gib}Gi",
        # Without a limit, a pod may fill the disk of its node, which then evicts other pods too.
        "ephemeral-storage": f"{size.disk_gib}Gi",
    }
    return {
        "name": name,
        "image": image,
        # KubeRay's own command bypasses the image's entry point. tini reaps orphaned HAProxy
        # processes. `exec` lets `ray start` receive SIGTERM and stop Ray in order.
        "command": ["/usr/bin/tini", "--", "/bin/bash", "-c"],
        "args": ["ulimit -n 65536; exec $KUBERAY_GEN_RAY_START_CMD"],
        "env": _build_variables(RAY_ENVIRONMENT),
        "resources": {"requests": dict(amount), "limits": dict(amount)},
        "securityContext": build_security_context(),
        "volumeMounts": [{"name": "artifacts", "mountPath": endpoint.store, "readOnly": True}],
    }


def _build_template(production: Production, container: Manifest) -> Manifest:
    claim = {"claimName": production.artifacts_claim, "readOnly": True}
    volumes: list[Manifest] = [{"name": "artifacts", "persistentVolumeClaim": claim}]
    if production.keys_secret is not None:
        volumes.append({"name": "keys", "secret": {"secretName": production.keys_secret}})
        # Mount the directory, because Kubernetes does not update a file that is mounted alone.
        mount = {"name": "keys", "mountPath": str(KEY_FILE.parent), "readOnly": True}
        container["volumeMounts"].append(mount)
        container["env"] += _build_variables(key_file_environment(KEY_FILE))
    return {
        "metadata": {"labels": build_labels(production)},
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
            "volumes": volumes,
        },
    }


def _build_drain(drain_s: int) -> list[str]:
    """Build the preStop command: tell Serve that the node drains, and wait.

    Kubernetes removes a terminating pod from the Service at once. However, the HAProxies and
    handles of other pods would use its replicas until the replicas are killed. Serve therefore
    replaces the replicas first. The pod's HAProxy serves until its last request ends. Without
    replicas, the Ray node then ends, and the pod with it, before `drain_s` seconds have passed.
    """
    notice = f"python -m cluster.kuberay.drain {drain_s}"
    return ["/bin/bash", "-c", f"{notice} & exec sleep {drain_s}"]


def _build_variables(environment: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in environment.items()]


def _build_ports(ports: Mapping[str, int]) -> list[Manifest]:
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _build_readiness_probe(port: int) -> Manifest:
    """Build a readiness probe that tolerates slow responses.

    KubeRay's default probe fails after one slow response and removes busy pods from the Service.
    """
    url = f"http://127.0.0.1:{port}/-/healthz"
    command = f"wget --tries=1 --timeout=4 -q -O- {url} | grep -q success"
    return {
        "exec": {"command": ["/bin/bash", "-c", command]},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }


def _build_spread_constraint(group: WorkerGroup, production: Production) -> Manifest:
    labels = {**build_labels(production), "ray.io/group": group.name}
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
