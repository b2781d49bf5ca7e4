"""The merge of production.yaml into serve_config.yaml rejects invalid results."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.access import find_key_file
from cluster.config_entries import ApplicationEntry
from cluster.kuberay.capacity import (
    count_pods,
    find_capacity_errors,
    find_gpu_memory_errors,
)
from cluster.kuberay.endpoint import find_endpoint_errors
from cluster.kuberay.memory import find_memory_errors
from cluster.kuberay.overlay import InvalidOverlay, WorkerGroup, merge, read_production
from cluster.kuberay.pods import build_disruption_budgets
from cluster.kuberay.render import PRODUCTION, render_rayservice
from cluster.replica_resources import ResourceDemand
from deployments.config import AppArgs

CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


def write_edited_overlay(tmp_path: Path, old: str, new: str) -> Path:
    """Write a copy of production.yaml with the first `old` replaced by `new`."""
    text = PRODUCTION.read_text()
    assert text.count(old) >= 1, old
    copy = tmp_path / "production.yaml"
    copy.write_text(text.replace(old, new, 1))
    return copy


def create_group(
    name: str, *, cpu: int = 4, gpus: int = 0, pods: int = 2, min_pods: int | None = None
) -> WorkerGroup:
    return WorkerGroup(
        name=name,
        image="gpu" if gpus else "cpu",
        cpu=cpu,
        memory_gib=8,
        gpus=gpus,
        min_replicas=pods if min_pods is None else min_pods,
        max_replicas=pods,
        idle_timeout_s=60,
    )


def create_deployment(
    name: str, replicas: int, pool: str | None = None, **options: Any
) -> dict[str, Any]:
    if pool is not None:
        options["label_selector"] = {"hundredfold/pool": pool}
    return {"name": name, "num_replicas": replicas, "ray_actor_options": options}


def test_large_replicas_are_placed_before_small_ones() -> None:
    deployments = [
        create_deployment("small", 2, num_cpus=1),
        create_deployment("large", 2, num_cpus=3),
    ]
    replicas = [(ResourceDemand.of(each), 2) for each in deployments]
    assert count_pods(create_group("cpu", cpu=4), replicas) == 2


def test_replica_without_a_number_of_cpus_has_that_of_ray() -> None:
    for options in ({}, {"num_cpus": None}):
        demand = ResourceDemand.of(create_deployment("plain", 1, **options))
        assert (demand.cpus, demand.gpus) == (1, 0)


def test_merge_joins_mappings_by_key_and_lists_by_name() -> None:
    base = {"a": {"x": 1, "y": 2}, "items": [{"name": "p", "k": 1}, {"name": "q", "k": 2}]}
    changes = {"a": {"y": 3, "z": 4}, "items": [{"name": "q", "k": 5}], "new": [1]}
    assert merge(base, changes) == {
        "a": {"x": 1, "y": 3, "z": 4},
        "items": [{"name": "p", "k": 1}, {"name": "q", "k": 5}],
        "new": [1],
    }
    assert base["a"] == {"x": 1, "y": 2}


def test_merge_replaces_other_lists() -> None:
    assert merge({"providers": ["a", "b"]}, {"providers": ["c"]}) == {"providers": ["c"]}


@pytest.mark.parametrize("name", [None, ["x"], {}])
def test_lists_of_items_with_other_names_than_texts_are_replaced(name: object) -> None:
    assert merge({"items": [{"name": "p"}]}, {"items": [{"name": name}]}) == {
        "items": [{"name": name}]
    }


def test_merge_rejects_changes_to_missing_items() -> None:
    with pytest.raises(InvalidOverlay, match="there is no `r`"):
        merge({"items": [{"name": "p"}]}, {"items": [{"name": "r"}]})


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("memory_gib: 4", "memory_gb: 4", "memory_gb"),
        ("min_replicas: 3 ", "min_replicas: 11 ", "min_replicas exceeds"),
        ("image: gpu", "image: tpu", "image"),
        ("name: hundredfold ", "name: Hundred_Fold ", "name"),
    ],
)
def test_invalid_overlay_is_rejected(tmp_path: Path, old: str, new: str, expected: str) -> None:
    with pytest.raises(InvalidOverlay, match=expected):
        read_production(write_edited_overlay(tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("host: 0.0.0.0", "hots: 0.0.0.0", "did you mean `host`"),
        ("- name: CpuEncoder", "- name: CpuLine", "there is no `CpuLine`"),
        ("max_replicas: 10         #", "max_replicas: 3         #", "max_replicas .* need 8 pods"),
        ("min_replicas: 3 ", "min_replicas: 2 ", "min_replicas .* need 3 pods"),
        ("num_cpus: 2 ", "num_cpus: 5 ", "`CpuEncoder` fits on 0 worker groups"),
        ("gpus: 1 ", "gpus: 0 ", "`GpuEncoder` fits on 0 worker groups"),
        ("store: /artifacts", "store: null     ", "args.store"),
        ("no_auth: true ", "no_auth: false ", "without API keys"),
        ("keys_secret: null", "keys_secret: ''", "keys_secret"),
        ("host: 0.0.0.0 ", "host: 127.0.0.1 ", "`http_options.host` is 127.0.0.1"),
        ("host: 0.0.0.0 ", "host: 10.0.0.1 ", "`http_options.host` is 10.0.0.1"),
        ("serve:\n", "serve:\n  proxy_location: HeadOnly\n", "`proxy_location` is HeadOnly"),
        ("pool_bytes: 2147483648 ", "pool_bytes: 4294967296 ", "may take .* lower `pool_bytes`"),
        ("memory_gib: 8 ", "memory_gib: 6 ", "2 `CpuEncoder` fit on its CPUs and may take 7.2 GiB"),
    ],
)
def test_overlay_with_invalid_result_is_rejected(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    with pytest.raises(InvalidOverlay, match=expected):
        render_rayservice(CONFIG, write_edited_overlay(tmp_path, old, new))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [1\n", "`serve_config.yaml`: line 2: "),
        (b"a: 2024-13-45\n", "`serve_config.yaml`: line 1: "),
        (b"\xff", "`serve_config.yaml`: 'utf-8' codec"),
        (b"", "invalid"),
    ],
)
def test_unreadable_file_is_rejected(tmp_path: Path, content: bytes, expected: str) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_bytes(content)
    with pytest.raises(InvalidOverlay, match=expected):
        render_rayservice(config, PRODUCTION)
    production = tmp_path / "production.yaml"
    production.write_bytes(content)
    with pytest.raises(InvalidOverlay, match=r"production\.yaml"):
        render_rayservice(CONFIG, production)


def test_pods_get_the_default_port_and_every_pod_needs_a_store(tmp_path: Path) -> None:
    config = tmp_path / "serve_config.yaml"
    config.write_text(CONFIG.read_text().replace("  port: 8000", "  # the default port"))
    assert render_rayservice(config, PRODUCTION).count("containerPort: 8000") == 3
    with pytest.raises(InvalidOverlay, match=r"args\.store"):
        render_rayservice(CONFIG, write_edited_overlay(tmp_path, "store: /artifacts", "models: []"))


def test_secret_of_keys_is_mounted_and_named_to_every_replica(tmp_path: Path) -> None:
    production = write_edited_overlay(tmp_path, "keys_secret: null ", "keys_secret: team ")
    text = production.read_text()
    production.write_text(text.replace("            no_auth: true ", "            no_auth: false "))
    service, *_ = yaml.safe_load_all(render_rayservice(CONFIG, production))
    cluster = service["spec"]
    serve = yaml.safe_load(cluster["serveConfigV2"])
    key_file = find_key_file(serve)
    assert key_file is not None
    groups = cluster["rayClusterConfig"]["workerGroupSpecs"]
    assert len(groups) == 2
    for group in groups:
        pod = group["template"]["spec"]
        assert {"name": "keys", "secret": {"secretName": "team"}} in pod["volumes"]
        (container,) = pod["containers"]
        mount = {"name": "keys", "mountPath": str(key_file.parent), "readOnly": True}
        assert mount in container["volumeMounts"]
        # An Ingress reads this variable if the config does not list its deployment or key file.
        assert {"name": "HUNDREDFOLD_KEYS", "value": str(key_file)} in container["env"]


def test_key_file_of_the_shell_does_not_close_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUNDREDFOLD_KEYS", str(tmp_path / "keys.json"))
    production = write_edited_overlay(tmp_path, "no_auth: true ", "no_auth: false ")
    with pytest.raises(InvalidOverlay, match="lets other hosts connect without API keys"):
        render_rayservice(CONFIG, production)


def test_application_of_another_project_needs_pods_only(tmp_path: Path) -> None:
    changed = yaml.safe_load(CONFIG.read_text())
    other = {"name": "other", "import_path": "shop:app", "route_prefix": "/shop"}
    changed["applications"].append(other)
    config = tmp_path / "serve_config.yaml"
    config.write_text(yaml.safe_dump(changed))
    assert "shop:app" in render_rayservice(config, PRODUCTION)


@pytest.mark.parametrize(
    ("deployments", "expected"),
    [
        (
            [
                create_deployment("A", 8, "cpu", num_cpus=1),
                create_deployment("G", 2, num_cpus=1, num_gpus=1),
            ],
            None,
        ),
        ([create_deployment("A", 9, "cpu", num_cpus=1)], "need 3 pods"),
        ([create_deployment("G", 3, num_cpus=1, num_gpus=1)], "need 3 pods"),
        ([create_deployment("A", 1, num_cpus=1)], "fits on 2 worker groups"),
        ([create_deployment("A", 1, "tpu", num_cpus=1)], "fits on 0 worker groups"),
    ],
)
def test_capacity_errors_name_groups_and_deployments(
    deployments: list[dict[str, Any]], expected: str | None
) -> None:
    errors = list(
        find_capacity_errors(deployments, [create_group("cpu"), create_group("gpu", gpus=1)])
    )
    assert (
        errors == [] if expected is None else all(expected in error for error in errors) and errors
    )


def test_capacity_covers_the_autoscaled_maximum() -> None:
    autoscaled = create_deployment("A", 1, "cpu", num_cpus=1)
    autoscaled |= {"num_replicas": None, "autoscaling_config": {"max_replicas": 9}}
    (error,) = find_capacity_errors([autoscaled], [create_group("cpu")])
    assert "the max_replicas of its deployments need 3 pods" in error
    autoscaled |= {"num_replicas": "auto", "autoscaling_config": None}
    (error,) = find_capacity_errors([autoscaled], [create_group("cpu")])
    assert "need 25 pods" in error


def test_capacity_covers_the_autoscaled_minimum() -> None:
    autoscaled = create_deployment("A", 1, "cpu", num_cpus=2)
    autoscaled |= {
        "num_replicas": None,
        "autoscaling_config": {"min_replicas": 3, "max_replicas": 4},
    }
    assert list(find_capacity_errors([autoscaled], [create_group("cpu", min_pods=2)])) == []
    (error,) = find_capacity_errors([autoscaled], [create_group("cpu", min_pods=1)])
    assert "the min_replicas of its deployments need 2 pods" in error


def test_capacity_counts_whole_pods() -> None:
    large_replicas = create_deployment("A", 2, "cpu", num_cpus=3)
    assert list(find_capacity_errors([large_replicas], [create_group("cpu", cpu=4)])) == []
    errors = list(find_capacity_errors([large_replicas], [create_group("cpu", cpu=6, pods=1)]))
    assert errors == []
    errors = list(find_capacity_errors([large_replicas], [create_group("cpu", cpu=5, pods=1)]))
    assert len(errors) == 2


def test_capacity_adds_fractions_exactly() -> None:
    fractional = create_deployment("A", 10, "cpu", num_cpus=0.1)
    assert list(find_capacity_errors([fractional], [create_group("cpu", cpu=1, pods=1)])) == []


def test_merge_keeps_other_settings() -> None:
    base = yaml.safe_load(CONFIG.read_text())
    merged = merge(base, read_production(PRODUCTION).serve)
    assert merged["http_options"] == {**base["http_options"], "host": "0.0.0.0"}
    for before, after in zip(
        base["applications"][0]["deployments"],
        merged["applications"][0]["deployments"],
        strict=True,
    ):
        if before["name"] == "Ingress":
            before["user_config"]["no_auth"] = True
            before["user_config"]["limits"]["trusted_proxies"] = 1
        assert before["user_config"] == after["user_config"]
        assert before["max_queued_requests"] == after["max_queued_requests"]


@pytest.mark.parametrize(
    ("port", "owner"),
    [
        (8265, "Ray's dashboard"),
        (8080, "Ray's metrics"),
        (9101, "HAProxy's metrics"),
        (10_500, "Ray's workers"),
        (30_000, "the replicas"),
        (31_000, "the replicas"),
        (31_001, None),
        (80, None),
    ],
)
def test_port_of_another_process_in_the_pods_is_rejected(port: int, owner: str | None) -> None:
    errors = list(find_endpoint_errors({"http_options": {"port": port}}))
    assert errors == (
        [f"`http_options.port` is {port}: in the pods it belongs to {owner}. Use 8000"]
        if owner
        else []
    )


def create_application(**changes: Any) -> ApplicationEntry:
    """Create an application with one tokenizer, and encoders of 2 GiB on one CPU each."""
    encoder = {"pool_bytes": 2 << 30}
    args = {"tokenizer_pool_bytes": 1, "encoders": {"cpu": encoder, "gpu": encoder}, **changes}
    deployments = [
        create_deployment("Tokenizer", 1, num_cpus=1),
        create_deployment("CpuEncoder", 8, "cpu", num_cpus=1),
        create_deployment("GpuEncoder", 8, num_cpus=1, num_gpus=1),
    ]
    import_path = "deployments.app:build_app"
    raw = {"import_path": import_path, "args": args, "deployments": deployments}
    return ApplicationEntry(("applications", 0), raw)


def test_pods_have_memory_for_the_pools_of_all_replicas_that_fit() -> None:
    application = create_application()
    assert list(find_memory_errors([application], [create_group("cpu", cpu=2)])) == []
    (error,) = find_memory_errors([application], [create_group("cpu", cpu=3)])
    assert error == (
        "a pod of worker group `cpu` has 8 GiB (`memory_gib`); 3 `CpuEncoder` fit on its CPUs and "
        "may take 8.0 GiB with Ray. Raise `memory_gib`, or lower `pool_bytes` and "
        "`tokenizer_pool_bytes` in `args`"
    )
    small = create_application(encoders={"cpu": {"pool_bytes": 1 << 30}})
    assert list(find_memory_errors([small], [create_group("cpu", cpu=3)])) == []


def test_models_on_gpus_take_no_memory_of_the_pod() -> None:
    group = create_group("gpu", cpu=8, gpus=8).model_copy(update={"memory_gib": 4})
    assert list(find_memory_errors([create_application()], [group])) == []
    large = create_application(tokenizer_pool_bytes=1 << 30)
    (error,) = find_memory_errors([large], [group])
    assert "1 `Tokenizer`, 7 `GpuEncoder` fit" in error


def test_kv_caches_in_main_memory_count() -> None:
    generator = create_deployment("GpuGenerator", 2, num_cpus=1, num_gpus=1)
    application = create_application(generators={"gpu": {"kv_cache_bytes": 3 << 30}})
    application.raw["deployments"] = [generator]
    group = create_group("gpu", gpus=2)
    assert list(find_memory_errors([application], [group])) == []
    offloading = group.model_copy(update={"offloaded_models": 2})
    (error,) = find_memory_errors([application], [offloading])
    assert "2 `GpuGenerator` fit on its CPUs and may take 13.7 GiB" in error
    assert error.endswith("or `kv_cache_bytes` of `generators.gpu`")


def test_memory_is_checked_for_the_most_replicas_of_a_deployment() -> None:
    application = create_application()
    application.raw["deployments"][1]["num_replicas"] = 2
    assert list(find_memory_errors([application], [create_group("cpu", cpu=64)])) == []


@pytest.mark.parametrize(("pods", "available"), [(0, None), (1, None), (2, 1), (5, 4)])
def test_disruption_budget_follows_the_minimum_of_its_group(
    pods: int, available: int | None
) -> None:
    production = read_production(PRODUCTION)
    group = create_group("pool", pods=8, min_pods=pods)
    budgets = build_disruption_budgets(production.model_copy(update={"workers": (group,)}))
    assert {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in budgets} == {
        **({"hundredfold-pool": available} if available else {}),
        "hundredfold-head": 1,
    }


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        ({}, []),
        ({"gpu_memory": 0.1}, ["`gpu_memory` leaves 4294967296 bytes"]),
        ({"gpu_memory": 41 << 30}, ["`args.gpu_memory` is 44023414784 bytes; a GPU of worker"]),
    ],
)
def test_gpu_memory_fits_on_the_gpus_of_each_group(
    args: dict[str, Any], messages: list[str]
) -> None:
    group = create_group("gpu", gpus=1).model_copy(update={"gpu_memory_gib": 40})
    settings = {"encoders": {}, "generators": {"gpu": {"kv_cache_bytes": 5 << 30}}}
    errors = list(
        find_gpu_memory_errors(AppArgs.parse({**settings, **args}), [create_group("cpu"), group])
    )
    assert len(errors) == len(messages)
    assert all(message in error for message, error in zip(messages, errors, strict=True))
