"""production.yaml is laid over serve_config.yaml, and what cannot work is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.kuberay.capacity import find_capacity_errors
from cluster.kuberay.overlay import InvalidOverlay, WorkerGroup, merge, read_production
from cluster.kuberay.render import PRODUCTION, render_rayservice

CONFIG = Path(__file__).parents[3] / "serve_config.yaml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """production.yaml with one text replaced."""
    text = PRODUCTION.read_text()
    assert text.count(old) >= 1, old
    copy = tmp_path / "production.yaml"
    copy.write_text(text.replace(old, new, 1))
    return copy


def group(
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


def deployment(name: str, replicas: int, pool: str | None = None, **options: Any) -> dict[str, Any]:
    if pool is not None:
        options["label_selector"] = {"hundredfold/pool": pool}
    return {"name": name, "num_replicas": replicas, "ray_actor_options": options}


def test_mappings_merge_by_key_and_named_lists_by_name() -> None:
    base = {"a": {"x": 1, "y": 2}, "items": [{"name": "p", "k": 1}, {"name": "q", "k": 2}]}
    changes = {"a": {"y": 3, "z": 4}, "items": [{"name": "q", "k": 5}], "new": [1]}
    assert merge(base, changes) == {
        "a": {"x": 1, "y": 3, "z": 4},
        "items": [{"name": "p", "k": 1}, {"name": "q", "k": 5}],
        "new": [1],
    }
    assert base["a"] == {"x": 1, "y": 2}


def test_other_lists_are_replaced() -> None:
    assert merge({"providers": ["a", "b"]}, {"providers": ["c"]}) == {"providers": ["c"]}


def test_a_change_to_an_item_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidOverlay, match="there is no `r`"):
        merge({"items": [{"name": "p"}]}, {"items": [{"name": "r"}]})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_gib: 4", "memory_gb: 4", "memory_gb"),
        ("min_replicas: 3 ", "min_replicas: 11 ", "min_replicas exceeds"),
        ("image: gpu", "image: tpu", "image"),
        ("name: hundredfold ", "name: Hundred_Fold ", "name"),
    ],
)
def test_a_wrong_overlay_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(InvalidOverlay, match=says):
        read_production(edited(tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("host: 0.0.0.0", "hots: 0.0.0.0", "did you mean `host`"),
        ("- name: CpuEncoder", "- name: CpuLine", "there is no `CpuLine`"),
        ("max_replicas: 10         #", "max_replicas: 3         #", "max_replicas .* need 8 pods"),
        ("min_replicas: 3 ", "min_replicas: 2 ", "min_replicas .* need 3 pods"),
        ("num_cpus: 2 ", "num_cpus: 5 ", "`CpuEncoder` fits on 0 worker groups"),
        ("gpus: 1 ", "gpus: 0 ", "`GpuEncoder` fits on 0 worker groups"),
        ("store: /artifacts", "store: null     ", "args.store"),
    ],
)
def test_an_overlay_that_cannot_work_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(InvalidOverlay, match=says):
        render_rayservice(CONFIG, edited(tmp_path, old, new))


@pytest.mark.parametrize(
    ("deployments", "says"),
    [
        ([deployment("A", 8, "cpu", num_cpus=1), deployment("G", 2, num_cpus=1, num_gpus=1)], None),
        ([deployment("A", 9, "cpu", num_cpus=1)], "need 3 pods"),
        ([deployment("G", 3, num_cpus=1, num_gpus=1)], "need 3 pods"),
        ([deployment("A", 1, num_cpus=1)], "fits on 2 worker groups"),
        ([deployment("A", 1, "tpu", num_cpus=1)], "fits on 0 worker groups"),
    ],
)
def test_capacity_errors_name_groups_and_deployments(
    deployments: list[dict[str, Any]], says: str | None
) -> None:
    errors = list(find_capacity_errors(deployments, [group("cpu"), group("gpu", gpus=1)]))
    assert errors == [] if says is None else all(says in error for error in errors) and errors


def test_capacity_covers_the_autoscaled_maximum() -> None:
    growing = deployment("A", 1, "cpu", num_cpus=1)
    growing |= {"num_replicas": None, "autoscaling_config": {"max_replicas": 9}}
    (error,) = find_capacity_errors([growing], [group("cpu")])
    assert "the max_replicas of its deployments need 3 pods" in error
    growing |= {"num_replicas": "auto", "autoscaling_config": None}
    (error,) = find_capacity_errors([growing], [group("cpu")])
    assert "need 25 pods" in error


def test_capacity_covers_the_autoscaled_minimum() -> None:
    steady = deployment("A", 1, "cpu", num_cpus=2)
    steady |= {"num_replicas": None, "autoscaling_config": {"min_replicas": 3, "max_replicas": 4}}
    assert list(find_capacity_errors([steady], [group("cpu", min_pods=2)])) == []
    (error,) = find_capacity_errors([steady], [group("cpu", min_pods=1)])
    assert "the min_replicas of its deployments need 2 pods" in error


def test_capacity_counts_whole_pods() -> None:
    two_of_three_cores = deployment("A", 2, "cpu", num_cpus=3)
    assert list(find_capacity_errors([two_of_three_cores], [group("cpu", cpu=4)])) == []
    errors = list(find_capacity_errors([two_of_three_cores], [group("cpu", cpu=6, pods=1)]))
    assert errors == []
    errors = list(find_capacity_errors([two_of_three_cores], [group("cpu", cpu=5, pods=1)]))
    assert len(errors) == 2


def test_capacity_adds_fractions_exactly() -> None:
    tenths = deployment("A", 10, "cpu", num_cpus=0.1)
    assert list(find_capacity_errors([tenths], [group("cpu", cpu=1, pods=1)])) == []


def test_the_overlay_changes_only_what_it_names() -> None:
    base = yaml.safe_load(CONFIG.read_text())
    merged = merge(base, read_production(PRODUCTION).serve)
    assert merged["http_options"] == {**base["http_options"], "host": "0.0.0.0"}
    for before, after in zip(
        base["applications"][0]["deployments"],
        merged["applications"][0]["deployments"],
        strict=True,
    ):
        assert before["user_config"] == after["user_config"]
        assert before["max_queued_requests"] == after["max_queued_requests"]
