"""The committed Kubernetes manifests: up to date, valid, safe, and consistent with each other."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.__main__ import main
from cluster.check import check_text
from cluster.environment import RAY_ENVIRONMENT
from cluster.kuberay import render

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "serve_config.yaml"
SCHEMA = REPOSITORY.parent / "shared/data/kuberay/rayservices-v1.schema.json"
FOLDER = render.FOLDER

SERVICE: dict[str, Any] = yaml.safe_load(render.RAYSERVICE.read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]
WORKERS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS = {"head": HEAD["template"]} | {name: g["template"] for name, g in WORKERS.items()}
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
DEPLOYMENTS = {d["name"]: d for d in SERVE["applications"][0]["deployments"]}
every_pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def paired_linears(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused: Kubernetes drops them without a word."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    stricter = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        stricter.setdefault("additionalProperties", False)
    return stricter


def test_the_manifest_is_what_render_makes_now() -> None:
    assert render.RAYSERVICE.read_text() == render.render_rayservice(CONFIG, render.PRODUCTION), (
        f"run `{render.COMMAND}`"
    )


def test_render_check_tells_a_stale_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rayservice.yaml"
    monkeypatch.setattr(render, "RAYSERVICE", target)
    command = ["render", "--config", str(CONFIG)]
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    target.write_text(target.read_text().replace("2.60.0", "2.59.0"))
    assert main([*command, "--check"]) == 1
    assert "hint: run `hundredfold render`" in capsys.readouterr().err


def test_render_refuses_a_config_with_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "serve_config.yaml"
    broken.write_text(CONFIG.read_text().replace("keep_alive_timeout_s", "keepalive_timeout_s"))
    assert main(["render", "--config", str(broken)]) == 2
    assert "did you mean `keep_alive_timeout_s`" in capsys.readouterr().err


@pytest.mark.skipif(not SCHEMA.exists(), reason="the RayService schema is not at hand")
def test_the_manifest_fits_kuberays_schema() -> None:
    schema = closed(json.loads(SCHEMA.read_text()))
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(SERVICE)] == []
    HEAD["template"]["spec"]["nodeSelectors"] = {}
    try:  # the schema would notice
        assert not validator.is_valid(SERVICE)
    finally:
        del HEAD["template"]["spec"]["nodeSelectors"]


def test_the_embedded_config_passes_the_linter_and_listens_to_other_pods() -> None:
    assert check_text(SERVICE["spec"]["serveConfigV2"]) == []
    assert SERVE["http_options"]["host"] == "0.0.0.0"
    assert SERVE["applications"][0]["args"]["encoders"]["gpu"]["available"] == "always"


def test_the_head_does_no_work() -> None:
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in json.dumps(HEAD)
    assert SERVICE["spec"]["excludeHeadPodFromServeSvc"] is True
    assert "labels" not in HEAD  # so that no label_selector finds it


@every_pod
def test_every_pod_has_the_same_environment(pod: dict[str, Any]) -> None:
    given = {entry["name"]: entry["value"] for entry in container(pod)["env"]}
    assert given == dict(RAY_ENVIRONMENT)


@every_pod
def test_every_pod_is_restricted_and_reads_artifacts_only(pod: dict[str, Any]) -> None:
    spec, only = pod["spec"], container(pod)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hostNetwork" not in spec
    (mount,) = only["volumeMounts"]
    assert mount == {"name": "artifacts", "mountPath": "/artifacts", "readOnly": True}
    assert SERVE["applications"][0]["args"]["store"] == mount["mountPath"]


@every_pod
def test_every_pod_asks_for_what_it_may_use(pod: dict[str, Any]) -> None:
    resources = container(pod)["resources"]
    assert resources["requests"] == resources["limits"]


@every_pod
def test_every_pod_starts_kuberays_command_under_tini(pod: dict[str, Any]) -> None:
    assert SERVICE["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    init, separator, *shell = container(pod)["command"]
    assert (init, separator) == ("/usr/bin/tini", "--")
    generated = "printf %s, ray start --head --num-cpus=0"
    done = subprocess.run(
        [*shell, *container(pod)["args"]],
        env={"PATH": os.environ["PATH"], "KUBERAY_GEN_RAY_START_CMD": generated},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "ray,start,--head,--num-cpus=0,"


def test_ports_have_the_names_kuberay_looks_for() -> None:
    ports = {
        name: {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        for name, pod in PODS.items()
    }
    serve = SERVE["http_options"]["port"]
    assert ports["head"] == {
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "serve": serve,
        "metrics": 8080,
    }
    assert all(ports[name]["serve"] == serve for name in WORKERS)


def test_replicas_find_their_worker_group_and_no_other() -> None:
    pools = {name: group["labels"]["hundredfold/pool"] for name, group in WORKERS.items()}
    assert pools == {"cpu": "cpu", "gpu": "gpu"}
    for name in ("Ingress", "Tokenizer", "CpuEncoder"):
        options = DEPLOYMENTS[name]["ray_actor_options"]
        assert options["label_selector"] == {"hundredfold/pool": "cpu"}
        assert options["num_cpus"] == int(options["num_cpus"]) >= 1
    assert DEPLOYMENTS["GpuEncoder"]["ray_actor_options"]["num_gpus"] == 1


def test_cpu_pods_always_stand_and_gpu_pods_come_when_needed() -> None:
    assert WORKERS["cpu"]["minReplicas"] >= 2
    assert DEPLOYMENTS["CpuEncoder"]["autoscaling_config"]["min_replicas"] >= 2
    gpu = WORKERS["gpu"]
    assert gpu["minReplicas"] == 0
    assert container(gpu["template"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert gpu["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert CLUSTER["enableInTreeAutoscaling"] is True
    assert CLUSTER["autoscalerOptions"]["version"] == "v2"
    # Version 2 of the autoscaler refuses any other policy than Never, which it sets itself.
    assert all("restartPolicy" not in pod["spec"] for pod in PODS.values())


def test_a_leaving_worker_outlives_the_requests_it_has() -> None:
    timeout_s = DEPLOYMENTS["Ingress"]["user_config"]["timeout_s"]
    for group in WORKERS.values():
        program, seconds = container(group["template"])["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "/bin/sleep"
        assert timeout_s < int(seconds) < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_readiness_probe_asks_this_pods_own_proxy() -> None:
    for group in WORKERS.values():
        shell, flag, command = container(group["template"])["readinessProbe"]["exec"]["command"]
        assert (shell, flag) == ("/bin/bash", "-c")
        asked = next(w for w in shlex.split(command) if w.startswith("http"))
        assert asked == f"http://127.0.0.1:{SERVE['http_options']['port']}/-/healthz"


def test_ray_asks_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert RAY_ENVIRONMENT["RAY_AUTH_MODE"] == "token"


def selected(selector: dict[str, str]) -> set[str]:
    """The pods of the cluster that a label selector finds, with the labels KubeRay adds."""
    labels = {
        name: {
            **pod["metadata"]["labels"],
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/group": "headgroup" if name == "head" else name,
        }
        for name, pod in PODS.items()
    }
    return {name for name, have in labels.items() if selector.items() <= have.items()}


def test_the_network_policy_guards_every_pod_and_opens_one_port() -> None:
    (policy,) = paired_linears("network-policy.yaml")
    assert selected(policy["spec"]["podSelector"]["matchLabels"]) == set(PODS)
    rules = policy["spec"]["ingress"]
    open_to_all = [rule["ports"] for rule in rules if "from" not in rule]
    assert open_to_all == [[{"port": SERVE["http_options"]["port"], "protocol": "TCP"}]]
    (unlimited,) = (rule for rule in rules if "ports" not in rule)
    (peer,) = unlimited["from"]
    assert selected(peer["podSelector"]["matchLabels"]) == set(PODS)
    assert "namespaceSelector" not in peer


def test_disruption_budgets_leave_a_worker_and_the_head() -> None:
    budgets = paired_linears("disruption-budgets.yaml")
    found = [selected(budget["spec"]["selector"]["matchLabels"]) for budget in budgets]
    assert found == [{"cpu"}, {"head"}]
    for budget in budgets:
        assert type(budget["spec"]["minAvailable"]) is int
    assert budgets[0]["spec"]["minAvailable"] < WORKERS["cpu"]["minReplicas"]


def test_the_volume_is_the_one_the_pods_mount() -> None:
    (claim,) = paired_linears("artifacts.yaml")
    (loader,) = paired_linears("artifacts-loader.yaml")
    name = claim["metadata"]["name"]
    for pod in [*PODS.values(), loader]:
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == name
    assert container(loader)["image"] == container(PODS["cpu"])["image"]


def test_the_kustomization_lists_what_there_is() -> None:
    (kustomization,) = paired_linears("kustomization.yaml")
    not_applied = {"kustomization.yaml", "production.yaml", "artifacts-loader.yaml"}
    there = {path.name for path in FOLDER.glob("*.yaml")} - not_applied
    assert set(kustomization["resources"]) == there
