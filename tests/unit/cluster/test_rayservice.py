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
from cluster.environment import RAY_ENVIRONMENT
from cluster.kuberay import render
from cluster.linting.linter import check_text

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "serve_config.yaml"
SCHEMA = REPOSITORY / "tests/data/kuberay/rayservices-v1.schema.json"  # NOTICE has its source
FOLDER = render.FOLDER

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all(render.RAYSERVICE.read_text()))
SERVICE, *BUDGETS = MANIFESTS
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD = CLUSTER["headGroupSpec"]
WORKERS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS = {"head": HEAD["template"]} | {name: g["template"] for name, g in WORKERS.items()}
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
DEPLOYMENTS = {d["name"]: d for d in SERVE["applications"][0]["deployments"]}
every_pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


def find_container(pod: dict[str, Any]) -> dict[str, Any]:
    (main_container,) = pod["spec"]["containers"]
    return main_container


def read_documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def forbid_unknown_keys(schema: Any) -> Any:
    """Return a schema that rejects unknown keys. Kubernetes drops unknown keys silently."""
    if isinstance(schema, list):
        return [forbid_unknown_keys(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: forbid_unknown_keys(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


def write_second_production(directory: Path) -> Path:
    """Write the settings of a cluster with the name `second` that are otherwise equal."""
    production = directory / "production.yaml"
    text = render.PRODUCTION.read_text()
    production.write_text(text.replace("name: hundredfold  ", "name: second  ", 1))
    return production


def test_manifest_is_up_to_date() -> None:
    assert render.RAYSERVICE.read_text() == render.render_rayservice(CONFIG, render.PRODUCTION), (
        f"run `{render.COMMAND}`"
    )


def test_render_check_reports_a_stale_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "rayservice.yaml"
    command = ["render", "--config", str(CONFIG), "--output", str(target)]
    assert main([*command, "--check"]) == 1
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    target.write_text(target.read_text().replace("2.60.0", "2.59.0"))
    assert main([*command, "--check"]) == 1
    assert "hint: run `hundredfold render`" in capsys.readouterr().err


def test_render_reads_the_named_file_of_kubernetes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    production, target = write_second_production(tmp_path), tmp_path / "out.yaml"
    command = ["render", "--config", str(CONFIG), "--production", str(production)]
    assert main([*command, "--output", str(target)]) == 0
    assert [each["metadata"]["name"] for each in yaml.safe_load_all(target.read_text())] == [
        "second",
        "second-cpu",
        "second-head",
    ]
    production.write_text("")
    assert main(command) == 1
    assert f"hint: correct `{production}`" in capsys.readouterr().err


def test_file_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "none" / "rayservice.yaml"
    assert main(["render", "--config", str(CONFIG), "--output", str(target)]) == 1
    assert capsys.readouterr().err == (
        f"error: cannot use `{target}`: No such file or directory\n\n"
        "hint: name a file that this user may write, `--output FILE`\n"
    )


def test_render_rejects_a_config_with_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "serve_config.yaml"
    broken.write_text(CONFIG.read_text().replace("keep_alive_timeout_s", "keepalive_timeout_s"))
    assert main(["render", "--config", str(broken)]) == 1
    assert "did you mean `keep_alive_timeout_s`" in capsys.readouterr().err


def test_manifest_fits_the_schema_of_kuberay() -> None:
    schema = forbid_unknown_keys(json.loads(SCHEMA.read_text()))
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(SERVICE)] == []
    HEAD["template"]["spec"]["nodeSelectors"] = {}
    try:  # the schema must reject an unknown key
        assert not validator.is_valid(SERVICE)
    finally:
        del HEAD["template"]["spec"]["nodeSelectors"]


def test_embedded_config_is_valid_and_accepts_other_pods() -> None:
    assert check_text(SERVICE["spec"]["serveConfigV2"]) == []
    assert SERVE["http_options"]["host"] == "0.0.0.0"
    assert SERVE["applications"][0]["args"]["encoders"]["gpu"]["available"] == "always"


def test_head_offers_no_cpus_and_no_gpus() -> None:
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in json.dumps(HEAD)
    assert SERVICE["spec"]["excludeHeadPodFromServeSvc"] is True
    assert "labels" not in HEAD  # no label_selector may match the head


@every_pod
def test_pods_have_the_same_environment(pod: dict[str, Any]) -> None:
    environment = {entry["name"]: entry["value"] for entry in find_container(pod)["env"]}
    assert environment == dict(RAY_ENVIRONMENT)


@every_pod
def test_pods_are_restricted_and_mount_artifacts_read_only(pod: dict[str, Any]) -> None:
    spec, main_container = pod["spec"], find_container(pod)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main_container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hostNetwork" not in spec
    (mount,) = main_container["volumeMounts"]
    assert mount == {"name": "artifacts", "mountPath": "/artifacts", "readOnly": True}
    assert SERVE["applications"][0]["args"]["store"] == mount["mountPath"]


@every_pod
def test_pods_have_equal_requests_and_limits(pod: dict[str, Any]) -> None:
    resources = find_container(pod)["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["ephemeral-storage"] == "8Gi"  # of logs, which Ray rotates


@every_pod
def test_pods_start_the_kuberay_command_under_tini(pod: dict[str, Any]) -> None:
    assert SERVICE["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    init, separator, *shell = find_container(pod)["command"]
    assert (init, separator) == ("/usr/bin/tini", "--")
    start_command = "printf %s, ray start --head --num-cpus=0"
    done = subprocess.run(
        [*shell, *find_container(pod)["args"]],
        env={"PATH": os.environ["PATH"], "KUBERAY_GEN_RAY_START_CMD": start_command},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "ray,start,--head,--num-cpus=0,"


def test_ports_have_the_names_of_kuberay() -> None:
    ports = {
        name: {port["name"]: port["containerPort"] for port in find_container(pod)["ports"]}
        for name, pod in PODS.items()
    }
    serve = SERVE["http_options"]["port"]
    assert ports["head"] == {
        "gcs-server": 6379,
        "dashboard": 8265,
        "client": 10001,
        "serve": serve,
        "metrics": 8080,
        "haproxy": 9101,
    }
    for name in WORKERS:
        assert ports[name] == {"serve": serve, "metrics": 8080, "haproxy": 9101}


def test_prometheus_finds_the_ports_of_every_pod_and_may_connect() -> None:
    (monitor,) = read_documents("pod-monitor.yaml")
    assert select_pods(monitor["spec"]["selector"]["matchLabels"]) == set(PODS)
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    jobs = {each["port"]: each["relabelings"][0]["replacement"] for each in endpoints}
    assert jobs == {"metrics": "hundredfold", "haproxy": "hundredfold-haproxy"}
    (policy,) = read_documents("network-policy.yaml")
    admitted = [port["port"] for port in policy["spec"]["ingress"][-1]["ports"]]
    for pod in PODS.values():
        ports = {port["name"]: port["containerPort"] for port in find_container(pod)["ports"]}
        assert [ports[name] for name in jobs] == admitted


def test_replicas_match_exactly_one_worker_group() -> None:
    pools = {name: group["labels"]["hundredfold/pool"] for name, group in WORKERS.items()}
    assert pools == {"cpu": "cpu", "gpu": "gpu"}
    for name in ("Ingress", "Tokenizer", "CpuEncoder"):
        options = DEPLOYMENTS[name]["ray_actor_options"]
        assert options["label_selector"] == {"hundredfold/pool": "cpu"}
        assert options["num_cpus"] == int(options["num_cpus"]) >= 1
    assert DEPLOYMENTS["GpuEncoder"]["ray_actor_options"]["num_gpus"] == 1


def test_gpu_pods_scale_from_zero_and_cpu_pods_do_not() -> None:
    assert WORKERS["cpu"]["minReplicas"] >= 2
    assert DEPLOYMENTS["CpuEncoder"]["autoscaling_config"]["min_replicas"] >= 2
    gpu = WORKERS["gpu"]
    assert gpu["minReplicas"] == 0
    assert find_container(gpu["template"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert gpu["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert CLUSTER["enableInTreeAutoscaling"] is True
    assert CLUSTER["autoscalerOptions"]["version"] == "v2"
    # Version 2 of the autoscaler sets restartPolicy to Never and rejects any other value.
    assert all("restartPolicy" not in pod["spec"] for pod in PODS.values())


def test_drained_worker_tells_ray_and_waits_for_the_slowest_shutdown(tmp_path: Path) -> None:
    slowest_s = max(d["graceful_shutdown_timeout_s"] for d in DEPLOYMENTS.values())
    for name in ("python", "sleep"):  # print their arguments
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $*\n")
        (tmp_path / name).chmod(0o755)
    for group in WORKERS.values():
        pod = group["template"]
        command = find_container(pod)["lifecycle"]["preStop"]["exec"]["command"]
        # The hook runs both programs at once, so their lines may come in any order.
        done = subprocess.run(
            command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        notice, wait = sorted(done.stdout.splitlines())
        drain_s = int(wait.removeprefix("sleep "))
        assert notice == f"python -m cluster.kuberay.drain {drain_s}"
        assert slowest_s + 60 <= drain_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_readiness_probe_checks_the_proxy_of_its_pod() -> None:
    for group in WORKERS.values():
        shell, flag, command = find_container(group["template"])["readinessProbe"]["exec"][
            "command"
        ]
        assert (shell, flag) == ("/bin/bash", "-c")
        url = next(w for w in shlex.split(command) if w.startswith("http"))
        assert url == f"http://127.0.0.1:{SERVE['http_options']['port']}/-/healthz"


def test_ray_requires_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert RAY_ENVIRONMENT["RAY_AUTH_MODE"] == "token"


def select_pods(selector: dict[str, str]) -> set[str]:
    """Return the pods that match a label selector, including the labels that KubeRay adds."""
    labels = {
        name: {
            **pod["metadata"]["labels"],
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/group": "headgroup" if name == "head" else name,
        }
        for name, pod in PODS.items()
    }
    return {name for name, pod_labels in labels.items() if selector.items() <= pod_labels.items()}


def test_network_policy_covers_every_pod_and_opens_one_port() -> None:
    (policy,) = read_documents("network-policy.yaml")
    assert select_pods(policy["spec"]["podSelector"]["matchLabels"]) == set(PODS)
    rules = policy["spec"]["ingress"]
    open_to_all = [rule["ports"] for rule in rules if "from" not in rule]
    # Every pod gives the name `serve` to the port `http_options.port`.
    assert open_to_all == [[{"port": "serve", "protocol": "TCP"}]]
    (unlimited,) = (rule for rule in rules if "ports" not in rule)
    (peer,) = unlimited["from"]
    assert select_pods(peer["podSelector"]["matchLabels"]) == set(PODS)
    assert "namespaceSelector" not in peer


def test_disruption_budgets_let_one_worker_go_and_keep_the_head() -> None:
    selectors = [budget["spec"]["selector"]["matchLabels"] for budget in BUDGETS]
    # GPU workers have no budget: with few of them, a budget could block every drain.
    assert [select_pods(selector) for selector in selectors] == [{"cpu"}, {"head"}]
    assert [budget["spec"]["minAvailable"] for budget in BUDGETS] == [
        WORKERS["cpu"]["minReplicas"] - 1,
        1,
    ]


def test_clusters_of_one_namespace_select_only_their_own_pods(tmp_path: Path) -> None:
    """Kubernetes evicts no pod that two disruption budgets select."""
    production = write_second_production(tmp_path)
    second, *budgets = yaml.safe_load_all(render.render_rayservice(CONFIG, production))
    for budget in budgets:
        assert select_pods(budget["spec"]["selector"]["matchLabels"]) == set()
    others = second["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for groups, is_own in ((WORKERS.values(), True), (others, False)):
        for group in groups:
            (constraint,) = group["template"]["spec"]["topologySpreadConstraints"]
            selected = select_pods(constraint["labelSelector"]["matchLabels"])
            assert selected == ({group["groupName"]} if is_own else set())


def test_volume_claim_is_that_of_the_pods() -> None:
    (claim,) = read_documents("artifacts.yaml")
    (loader,) = read_documents("artifacts-loader.yaml")
    name = claim["metadata"]["name"]
    for pod in [*PODS.values(), loader]:
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == name
    assert find_container(loader)["image"] == find_container(PODS["cpu"])["image"]


def test_kustomization_lists_every_manifest() -> None:
    (kustomization,) = read_documents("kustomization.yaml")
    not_applied = {
        *("kustomization.yaml", "production.yaml"),
        *("artifacts-loader.yaml", "pod-monitor.yaml"),
    }
    manifests = {path.name for path in FOLDER.glob("*.yaml")} - not_applied
    assert set(kustomization["resources"]) == manifests
